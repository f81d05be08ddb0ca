"""Where a token stands in its sentence, as a vector added to its embedding.

Attention treats its keys as a set; only what is added here tells "dog bites man" from "man bites dog".
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PositionEncoding(nn.Module):
    """Position vectors: `forward(position, length)` turns places [...] into vectors [..., width].

    `length` is the length of the sentence that the position belongs to; only `FractionPosition` reads it. A decoder
    does not know how long its output will be, so it passes the length of the source sentence.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, position: Tensor, length: Tensor) -> Tensor:
        raise NotImplementedError  # each kind's own


class Sinusoidal(PositionEncoding):
    """PE(pos, 2i) = sin(pos / base^(2i/d)),  PE(pos, 2i+1) = cos(pos / base^(2i/d)).

    Wavelengths run from 2π up to (nearly) base · 2π, and PE(pos + k) is a rotation of PE(pos) that depends on k alone.
    Computed on the fly in float32, so there is no longest sentence. In training there is one, and they are looked up.
    """

    frequency: Tensor
    known: Tensor

    def __init__(self, width: int, base: float = 10000.0, longest: int = 0) -> None:
        super().__init__(width)
        exponent = torch.arange(0, width, 2, dtype=torch.float64) / width  # 2i/d, shared by sine and cosine
        self.register_buffer("frequency", (base**-exponent).float(), persistent=False)
        self.register_buffer("known", self._waves(torch.arange(longest)), persistent=False)

    def forward(self, position: Tensor, length: Tensor) -> Tensor:
        return F.embedding(position, self.known) if self.training and len(self.known) else self._waves(position)

    def _waves(self, position: Tensor) -> Tensor:
        angle = position.unsqueeze(-1).float() * self.frequency  # [..., ceil(width / 2)]
        waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)  # sine and cosine alternate
        return waves[..., : self.width]


class SinusoidalSplit(Sinusoidal):
    """The same sinusoids in another order: all sines, then all cosines (as Marian has them)."""

    def _waves(self, position: Tensor) -> Tensor:
        angle = position.unsqueeze(-1).float() * self.frequency
        return torch.cat([angle.sin(), angle.cos()], dim=-1)[..., : self.width]


class LearnedPositions(PositionEncoding):
    """A trained vector a place, up to `longest` places."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__(width)
        self.table = nn.Parameter(torch.empty(longest, width))
        nn.init.normal_(self.table, std=1 / math.sqrt(width))

    def forward(self, position: Tensor, length: Tensor) -> Tensor:
        return self.table[position]


class IndexPosition(PositionEncoding):
    """The bare number of the place, in the first feature: unbounded, and kept for comparison."""

    def number(self, position: Tensor, length: Tensor) -> Tensor:
        return position.float()

    def forward(self, position: Tensor, length: Tensor) -> Tensor:
        number = self.number(position, length)
        return F.pad(number[..., None], (0, self.width - 1))


class FractionPosition(IndexPosition):
    """How much of the sentence has passed, pos / (length - 1): bounded, but a step means less in a longer sentence."""

    def number(self, position: Tensor, length: Tensor) -> Tensor:
        return position / (length - 1).clamp(min=1)


class NoPositions(PositionEncoding):
    """No vector: the place counts inside the attention (rotary, relative), or not at all."""

    def forward(self, position: Tensor, length: Tensor) -> Tensor:
        return torch.zeros((), device=position.device).expand(*position.shape, self.width)


IN_ATTENTION = ("rotary", "relative")  # kinds that are a score of the attention: see `regard.attention.scores.placed`


def make(kind: str, width: int, *, base: float = 10000.0, longest: int = 1024) -> PositionEncoding:
    """Make position encodings by name. Rotary, relative and none add nothing here."""
    if kind in (*IN_ATTENTION, "none"):
        return NoPositions(width)
    if kind in ("sinusoidal", "sinusoidal-split"):
        return {"sinusoidal": Sinusoidal, "sinusoidal-split": SinusoidalSplit}[kind](width, base, longest)
    if kind == "learned":
        return LearnedPositions(width, longest)
    return {"index": IndexPosition, "fraction": FractionPosition}[kind](width)
