"""Token embeddings with positions."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.dropout import dropout
from regard.nn import positions


class EmbeddingSettings(Protocol):
    """The settings of a family that an embedding reads."""

    @property
    def width(self) -> int: ...
    @property
    def positions(self) -> str: ...
    @property
    def position_base(self) -> float: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def scale_embeddings(self) -> bool: ...


class TokenEmbedding(nn.Module):
    """dropout(E[id] · sqrt(D) + position encoding); the factor only with `scale_embeddings`.

    If `norm` is given, it is applied before the dropout.
    """

    def __init__(self, vocabulary: int, settings: EmbeddingSettings, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm
        self.table = nn.Parameter(torch.empty(vocabulary, settings.width))
        nn.init.normal_(self.table, std=1 / math.sqrt(settings.width))
        self.positions = positions.make(
            settings.positions, settings.width, base=settings.position_base, longest=settings.max_positions
        )
        self.dropout = settings.dropout
        self.scale = math.sqrt(settings.width) if settings.scale_embeddings else 1.0

    def forward(self, ids: Tensor, position: Tensor, length: Tensor) -> Tensor:
        """Token ids, positions, and lengths of their sentences, [...] each -> [..., D]."""
        tokens = taps.tap(self, "tokens", F.embedding(ids, self.table) * self.scale)
        positions = taps.tap(self, "positions", self.positions(position, length))
        x = tokens + positions if self.norm is None else self.norm(tokens + positions)
        return taps.tap(self, "stream", dropout(x, self.dropout, self.training))
