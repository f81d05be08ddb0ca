"""Position encodings: vectors that are added to token embeddings.

Attention treats its keys as a set; only what is added here tells "dog bites man" from "man bites dog". Rotary and
relative positions act inside the attention instead, as its score.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import BucketedBias, DistanceBuckets, Relative, RopeScaling, Rotary, Score
from regard.registry import POSITIONS


class PositionEncoding(nn.Module):
    """Base class of position encodings: `forward(position, length)` maps positions [...] to vectors [..., width].

    `length` [...] is the length of the sentence of each position; only `FractionPosition` uses it. A decoder does not
    know the length of its output, so it passes that of the source. `base` sets the wavelengths of sinusoids, and
    `longest` is the largest number of positions.
    """

    needs_length: ClassVar[bool] = False  # whether `forward` reads `length`, which only an encoder-decoder has
    adds_vectors: ClassVar[bool] = True  # False: `forward` returns zeros
    is_dot: ClassVar[bool] = True  # False: `score` is not a dot product

    def __init__(self, width: int, base: float = 10000.0, longest: int = 1024) -> None:
        super().__init__()
        self.width = width

    @staticmethod
    def score(
        width: int, heads: int, base: float, rope: RopeScaling | None = None, buckets: DistanceBuckets | None = None
    ) -> Score | None:
        """The score of self-attention (with `heads` of `width` features) if positions act there; else None."""
        return None

    def forward(self, position: Tensor, length: Tensor) -> Tensor:
        raise NotImplementedError  # implemented by each encoding


@POSITIONS.register("sinusoidal")
class Sinusoidal(PositionEncoding):
    """PE(pos, 2i) = sin(pos / base^(2i/d)),  PE(pos, 2i+1) = cos(pos / base^(2i/d)).

    Wavelengths run from 2π up to (nearly) base · 2π, and PE(pos + k) is a rotation of PE(pos) that depends on k alone.
    Computed on the fly in float32, so there is no longest sentence; in training, looked up in a table.
    """

    frequency: Tensor
    table: Tensor

    def __init__(self, width: int, base: float = 10000.0, longest: int = 0) -> None:
        super().__init__(width)
        exponent = torch.arange(0, width, 2, dtype=torch.float64) / width  # 2i/d, shared by sine and cosine
        self.register_buffer("frequency", (base**-exponent).float(), persistent=False)
        self.register_buffer("table", self._waves(torch.arange(longest)), persistent=False)

    def forward(self, position: Tensor, length: Tensor) -> Tensor:
        return F.embedding(position, self.table) if self.training and len(self.table) else self._waves(position)

    def _waves(self, position: Tensor) -> Tensor:
        angle = position.unsqueeze(-1).float() * self.frequency  # [..., ceil(width / 2)]
        waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)  # sine and cosine alternate
        return waves[..., : self.width]


@POSITIONS.register("sinusoidal-split")
class SinusoidalSplit(Sinusoidal):
    """The same sinusoids in another order: all sines, then all cosines (as in Marian)."""

    def _waves(self, position: Tensor) -> Tensor:
        angle = position.unsqueeze(-1).float() * self.frequency
        return torch.cat([angle.sin(), angle.cos()], dim=-1)[..., : self.width]


@POSITIONS.register("sinusoidal-fairseq")
class SinusoidalFairseq(SinusoidalSplit):
    """Sinusoids whose wavelengths end at base · 2π exactly, with positions from 2 on (as in M2M100 and NLLB)."""

    def __init__(self, width: int, base: float = 10000.0, longest: int = 0) -> None:
        super().__init__(width, base)
        half = width // 2
        frequency = base ** -(torch.arange(half, dtype=torch.float64) / max(half - 1, 1))
        self.register_buffer("frequency", frequency.float(), persistent=False)
        self.register_buffer("table", self._waves(torch.arange(longest)), persistent=False)

    def _waves(self, position: Tensor) -> Tensor:
        waves = super()._waves(position + 2)
        return F.pad(waves, (0, self.width - waves.shape[-1]))


@POSITIONS.register("learned")
class LearnedPositions(PositionEncoding):
    """A learned vector for each of `longest` positions."""

    def __init__(self, width: int, base: float = 10000.0, longest: int = 1024) -> None:
        super().__init__(width)
        self.table = nn.Parameter(torch.empty(longest, width))
        nn.init.normal_(self.table, std=1 / math.sqrt(width))

    def forward(self, position: Tensor, length: Tensor) -> Tensor:
        return self.table[position]


@POSITIONS.register("index")
class IndexPosition(PositionEncoding):
    """The position itself, in the first feature: unbounded; for comparison."""

    def number(self, position: Tensor, length: Tensor) -> Tensor:
        return position.float()

    def forward(self, position: Tensor, length: Tensor) -> Tensor:
        number = self.number(position, length)
        return F.pad(number[..., None], (0, self.width - 1))


@POSITIONS.register("fraction")
class FractionPosition(IndexPosition):
    """pos / (length - 1): bounded, but a step is smaller in a longer sentence; for comparison."""

    needs_length = True

    def number(self, position: Tensor, length: Tensor) -> Tensor:
        return position / (length - 1).clamp(min=1)


@POSITIONS.register("none")
class NoPositions(PositionEncoding):
    """No positions: a model without them treats its input as a set, unless a causal mask orders it."""

    adds_vectors = False

    def forward(self, position: Tensor, length: Tensor) -> Tensor:
        return torch.zeros((), device=position.device).expand(*position.shape, self.width)


@POSITIONS.register("rotary")
class RotaryPositions(NoPositions):
    """Queries and keys are rotated by angles proportional to their positions (`regard.attention.Rotary`)."""

    @staticmethod
    def score(
        width: int, heads: int, base: float, rope: RopeScaling | None = None, buckets: DistanceBuckets | None = None
    ) -> Score:
        return Rotary(width, base, rope)


@POSITIONS.register("relative")
class RelativePositions(NoPositions):
    """Scores depend on the distance between query and key (`regard.attention.Relative`)."""

    @staticmethod
    def score(
        width: int, heads: int, base: float, rope: RopeScaling | None = None, buckets: DistanceBuckets | None = None
    ) -> Score:
        return Relative(width, heads, base)


@POSITIONS.register("bucketed")
class BucketedPositions(NoPositions):
    """Scores have a learned bias for each group of distances, as in T5 (`regard.attention.BucketedBias`)."""

    is_dot = False

    @staticmethod
    def score(
        width: int, heads: int, base: float, rope: RopeScaling | None = None, buckets: DistanceBuckets | None = None
    ) -> Score:
        return BucketedBias(heads, DistanceBuckets() if buckets is None else buckets)


def make(kind: str, width: int, *, base: float = 10000.0, longest: int = 1024) -> PositionEncoding:
    """Create the position encoding with this name."""
    encoding: PositionEncoding = POSITIONS[kind](width, base, longest)
    return encoding
