"""How well a key answers a query: the score functions of attention.

Each turns queries [..., Q, Dq] and keys [..., K, Dk] into scores [..., Q, K]. To try another one, write it here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Score(nn.Module):
    """A score function. Those that come down to a dot product say so, and may then use the fused kernels."""

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float] | None:
        """`(q, k, scale)` such that the score is `scale * q @ k^T`; None if it is no dot product."""
        return None

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        dot = self.as_dot(query, key)
        if dot is None:
            raise TypeError(f"{type(self).__name__} needs its own forward")
        q, k, scale = dot
        return scale * (q @ k.transpose(-2, -1))


class Dot(Score):
    """q · k (Luong, Pham and Manning 2015)."""

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query, key, 1.0


class ScaledDot(Score):
    """q · k / sqrt(D): without the root, the scores of wide vectors drive the softmax flat against its ends.

    >>> scores = torch.tensor([112.0, 96.0]) / 8          # width 64: 14 and 12
    >>> scores.softmax(0).mul(100).round().tolist()
    [88.0, 12.0]
    """

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query, key, 1.0 / math.sqrt(query.shape[-1])


class Bilinear(Score):
    """q^T W k: queries and keys may differ in width ("general" in Luong et al.)."""

    def __init__(self, query_width: int, key_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(query_width, key_width))
        nn.init.xavier_uniform_(self.weight)

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query @ self.weight, key, 1.0


class Additive(Score):
    """v · tanh(W q + U k), a single-layer network (Bahdanau, Cho and Bengio 2015)."""

    def __init__(self, query_width: int, key_width: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, hidden, bias=False)
        self.key = nn.Linear(key_width, hidden)
        self.out = nn.Linear(hidden, 1, bias=False)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        hidden = torch.tanh(self.query(query).unsqueeze(-2) + self.key(key).unsqueeze(-3))  # [..., Q, K, hidden]
        return self.out(hidden).squeeze(-1)
