"""Attention scores: how well a key matches a query.

A score turns queries [..., Q, Dq] and keys [..., K, Dk] into [..., Q, K]. To add one, write a class here and register
it under a name: it can then be selected as `model.score` in every model family.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.registry import SCORES


class TokenPositions:
    """Positions [...] of tokens in their sentences, and a cache of tensors that layers compute from them and share."""

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self.cache: dict[object, tuple[Tensor, Tensor]] = {}


class Score(nn.Module):
    """Base class of scores. A score implements `compare` or, if it is a dot product, `as_dot`.

    With `as_dot` it can be computed by the fused kernels; other scores fall back to the plain backend. A score is
    created with the widths of a head's queries and keys and the number of heads; one without parameters ignores them.
    """

    equal_widths: ClassVar[bool] = True  # whether queries and keys must have the same width
    is_dot: ClassVar[bool] = False  # whether there is an `as_dot`

    def __init_subclass__(cls) -> None:
        cls.is_dot = cls.as_dot is not Score.as_dot

    def __init__(self, query_width: int = 0, key_width: int = 0, heads: int = 1) -> None:
        super().__init__()
        if self.equal_widths and query_width != key_width:
            raise UserError(
                f"{type(self).__name__} needs queries and keys of one width, not {query_width}, {key_width}"
            )

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return `(q, k, scale)` such that the score is `scale * q @ k^T`."""
        raise TypeError(f"{type(self).__name__} is not a dot product: only the plain backend can compute it")

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """queries [..., Q, Dq] and keys [..., K, Dk] -> scores [..., Q, K]."""
        return self.compare(query, self.project_keys(key))

    def project_keys(self, key: Tensor) -> Tensor:
        """Compute the part of the score that depends on the key alone, once per token: [..., Dk] -> [..., D]."""
        return key

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        """queries [..., Q, Dq] and projected keys [..., K, D] -> scores [..., Q, K]."""
        q, k, scale = self.as_dot(query, key)
        return scale * (q @ k.transpose(-2, -1))

    def on_edges(self, query: Tensor, key: Tensor, receivers: Tensor, senders: Tensor) -> Tensor:
        """Scores [E, H] of the pairs (receivers[e], senders[e]) of queries [T, H, Dq] and projected keys [S, H, D]."""
        if not self.is_dot:
            return self.compare(query[receivers].unsqueeze(-2), key[senders].unsqueeze(-2)).flatten(-3)
        q, k, scale = self.as_dot(query, key)
        return scale * (q.index_select(0, receivers) * k.index_select(0, senders)).sum(-1)

    @classmethod
    def flops(cls, query_width: int, key_width: int, queries: int, keys: int, pairs: int) -> int:
        """FLOPs of the matmuls of one head, for these numbers of queries, keys and scores (`pairs`)."""
        return 2 * pairs * query_width

    def cached_width(self, width: int) -> int:
        """Features of a cached key after `project_keys` and `encode_positions`, for keys of `width` features."""
        return width

    def encode_positions(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
        """Encode the positions of tokens in their queries and keys [..., H, D], as a KV cache stores them.

        Returns queries, keys, and the score for these, which no longer depends on positions.
        """
        return query, key, self


@SCORES.register("dot")
class Dot(Score):
    """q · k (Luong, Pham and Manning 2015)."""

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query, key, 1.0


@SCORES.register("scaled-dot")
class ScaledDot(Score):
    """q · k / sqrt(D) (Vaswani et al. 2017).

    The dot product of wide vectors is large, and the softmax of large scores is nearly one-hot, with vanishing
    gradients; the square root keeps the variance of the scores at 1.

    >>> scores = torch.tensor([112.0, 96.0]) / 8          # width 64: 14 and 12
    >>> scores.softmax(0).mul(100).round().tolist()
    [88.0, 12.0]
    """

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query, key, 1.0 / math.sqrt(query.shape[-1])


@SCORES.register("bilinear")
class Bilinear(Score):
    """q^T W k, with W [Dq, Dk] shared by all heads ("general" in Luong et al. 2015)."""

    equal_widths = False

    def __init__(self, query_width: int, key_width: int, heads: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(query_width, key_width))
        nn.init.xavier_uniform_(self.weight)

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query @ self.weight, key, 1.0

    @classmethod
    def flops(cls, query_width: int, key_width: int, queries: int, keys: int, pairs: int) -> int:
        return 2 * queries * query_width * key_width + 2 * pairs * key_width


@SCORES.register("additive")
class Additive(Score):
    """v · tanh(W q + U k + b), a network with one hidden layer, shared by all heads (Bahdanau, Cho and Bengio 2015).

    `hidden` is the width of that layer (default: that of the queries). U k + b is computed by `project_keys`.
    """

    equal_widths = False

    def __init__(self, query_width: int, key_width: int, heads: int = 1, *, hidden: int | None = None) -> None:
        super().__init__()
        self.hidden = query_width if hidden is None else hidden
        self.key = nn.Linear(key_width, self.hidden)  # U, b
        nn.init.xavier_uniform_(self.key.weight)
        nn.init.zeros_(self.key.bias)
        self.query = nn.Linear(query_width, self.hidden, bias=False)  # W
        self.out = nn.Linear(self.hidden, 1, bias=False)  # v
        nn.init.xavier_uniform_(self.query.weight)
        nn.init.xavier_uniform_(self.out.weight)

    def project_keys(self, key: Tensor) -> Tensor:
        return self.key(key)

    @classmethod
    def flops(cls, query_width: int, key_width: int, queries: int, keys: int, pairs: int) -> int:
        return 2 * (queries * query_width + keys * key_width + pairs) * query_width

    def cached_width(self, width: int) -> int:
        return self.hidden

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        hidden = torch.tanh(self.query(query).unsqueeze(-2) + key.unsqueeze(-3))  # [..., Q, K, hidden]
        return self.out(hidden).squeeze(-1)
