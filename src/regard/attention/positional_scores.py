"""Attention scores that depend on the positions of query and key, and bounded scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.scores import Dot, ScaledDot, Score, TokenPositions
from regard.errors import UserError

_DOT, _SCALED_DOT = Dot(), ScaledDot()


@dataclass(frozen=True)
class RopeScaling:
    """The change of rotary positions for contexts that are longer than in the original training.

    A frequency makes `original` / wavelength turns within the `original` context. With kind "linear", every frequency
    is divided by `factor`. With "llama3" and "yarn", those with fewer turns than `turns[0]` are divided, those with
    more than `turns[1]` are not, and those between are interpolated by the number of turns (llama3) or by the index of
    the frequency (yarn, Peng et al. 2023). `attention` multiplies queries and keys.
    """

    kind: str
    factor: float
    original: int = 0
    turns: tuple[float, float] = (1.0, 4.0)
    attention: float = 1.0

    def scaled(self, frequencies: Tensor, base: float, width: int) -> Tensor:
        """frequencies [F] -> [F]."""
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            low, high = self.turns
            turns = self.original * frequencies / (2 * math.pi)
            kept = ((turns - low) / (high - low)).clamp(0, 1)
        else:
            # the index f of the frequency that makes this number of turns
            high, low = (
                width * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in self.turns
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
            index = torch.arange(len(frequencies), dtype=torch.float64, device="cpu")
            kept = 1 - ((index - low) / ((high - low) or 0.001)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class RotaryTable:
    """cos and sin of position / base^(2f/D), [L, F] each for F frequencies: computed in float64, extended on demand."""

    def __init__(self, width: int, base: float, scaling: RopeScaling | None = None) -> None:
        self._settings = width, base, scaling
        self.frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
        if scaling is not None:
            self.frequencies = scaling.scaled(self.frequencies, base, width)
        self._table: tuple[Tensor, Tensor] | None = None
        self._on_device: dict[torch.device, Tensor] = {}  # with constant addresses, as CUDA graphs require

    def at(self, positions: TokenPositions, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for tokens at these positions [...], [..., 1, F] each."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key, device = (self._settings, dtype), positions.index.device
        if key not in positions.cache:
            if device not in self._on_device:
                with torch.inference_mode(False):
                    self._on_device[device] = self.frequencies.to(device)
            angle = positions.index[..., None, None] * self._on_device[device]
            positions.cache[key] = angle.cos().to(dtype), angle.sin().to(dtype)
        return positions.cache[key]

    def __call__(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for the positions 0 .. length - 1, [length, F] each, on the device of `like`."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        table = self._table
        if table is None or len(table[0]) < length or table[0].device != like.device or table[0].dtype != dtype:
            with torch.inference_mode(False):  # the table may be used in training later
                position = torch.arange(max(64, 1 << (length - 1).bit_length()), dtype=torch.float64, device="cpu")
                angle = position[:, None] * self.frequencies
                table = self._table = angle.cos().to(like.device, dtype), angle.sin().to(like.device, dtype)
        return table[0][:length], table[1][:length]


class Rotary(Score):
    """(R_i q) · (R_j k) / sqrt(D): R_i rotates pairs of features by angles proportional to position i (Su et al. 2021).

    R_i^T R_j = R_(j-i), so the score depends on the distance only. Features f and f + D/2 form a pair, rotated by
    position / base^(2f/D). The last query is at the position of the last key: query i of Q is at K - Q + i, key j at j.
    """

    def __init__(self, width: int, base: float = 10000.0, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        if width % 2:
            raise UserError(f"rotary positions rotate pairs of features: the width of a head, {width}, must be even")
        self.table = RotaryTable(width, base, scaling)
        self.amplitude = 1.0 if scaling is None else scaling.attention**2  # factor of the score

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        cos, sin = self.table(key.shape[-2], key)
        first = key.shape[-2] - query.shape[-2]
        scale = self.amplitude / math.sqrt(query.shape[-1])
        return _rotate(query, cos[first:], sin[first:]), _rotate(key, cos, sin), scale

    def encode_positions(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
        cos, sin = self.table.at(positions, query)
        query = _rotate(query, cos, sin)
        return query if self.amplitude == 1 else query * self.amplitude, _rotate(key, cos, sin), _SCALED_DOT


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (a, b) = (x_f, x_(f + D/2)) of x [..., L, D] by its angle, with cos and sin [L, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class SoftCapped(Score):
    """c tanh(s / c) for another score s, which bounds it by c (Gemma 2)."""

    def __init__(self, score: Score, cap: float) -> None:
        super().__init__()
        self.inner, self.cap = score, cap

    def project_keys(self, key: Tensor) -> Tensor:
        return self.inner.project_keys(key)

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return self.cap * torch.tanh(self.inner.compare(query, key) / self.cap)

    def cached_width(self, width: int) -> int:
        return self.inner.cached_width(width)

    def encode_positions(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
        query, key, score = self.inner.encode_positions(query, key, positions)
        return query, key, SoftCapped(score, self.cap)


class Relative(Score):
    """((q + u) · k + (q + v) · W R(i - j)) / sqrt(D), as in Transformer-XL (Dai et al. 2019).

    R(t) [D] are sines and cosines of the distance t. Learned per head: u [D] weights every content, v [D] every
    distance, and W [D, D] projects distances. Sines and cosines of i - j are linear in those of j, with coefficients
    that depend on i, so the score is one dot product: [q + u, W^T (q + v) rotated by i] · [k, R(j)].

    Queries and keys are [..., H, L, D]; the last query is at the position of the last key.
    """

    def __init__(self, width: int, heads: int, base: float = 10000.0) -> None:
        super().__init__()
        self.table = RotaryTable(width, base)
        self.content = nn.Parameter(torch.empty(heads, width))  # u
        self.distance = nn.Parameter(torch.empty(heads, width))  # v
        self.weight = nn.Parameter(torch.empty(heads, width, 2 * len(self.table.frequencies)))  # W; sines first
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        keys, queries = key.shape[-2], query.shape[-2]
        cos, sin = self.table(keys, key)
        projected = (query + self.distance[:, None]) @ self.weight  # [..., H, Q, 2F]
        rotated = self._rotate(projected, cos[keys - queries :], sin[keys - queries :])
        q = torch.cat([query + self.content[:, None], *rotated], dim=-1).to(query.dtype)
        waves = torch.cat([sin, cos], dim=-1).to(key.dtype)
        k = torch.cat([key, waves.expand(*key.shape[:-1], -1)], dim=-1)
        return q, k, 1.0 / math.sqrt(query.shape[-1])

    def encode_positions(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
        cos, sin = self.table.at(positions, query)
        projected = torch.einsum("...hd,hdf->...hf", query + self.distance, self.weight)
        q = torch.cat([query + self.content, *self._rotate(projected, cos, sin)], dim=-1) / math.sqrt(query.shape[-1])
        waves = torch.cat([sin, cos], dim=-1).expand(*key.shape[:-1], -1)
        return q.to(query.dtype), torch.cat([key, waves.to(key.dtype)], dim=-1), _DOT

    @staticmethod
    def _rotate(projected: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients [..., 2F] of R(i - j), and cos and sin of i -> coefficients [..., F] of sin(j) and of cos(j)."""
        for_sin, for_cos = projected.chunk(2, dim=-1)
        # sin(i - j) = sin i cos j - cos i sin j,  cos(i - j) = cos i cos j + sin i sin j
        return for_cos * sin - for_sin * cos, for_sin * sin + for_cos * cos

    @classmethod
    def flops(cls, query_width: int, key_width: int, queries: int, keys: int, pairs: int) -> int:
        waves = query_width + query_width % 2
        return 2 * queries * query_width * waves + 2 * pairs * (query_width + waves)

    def cached_width(self, width: int) -> int:
        return width + 2 * len(self.table.frequencies)


@dataclass(frozen=True)
class DistanceBuckets:
    """Groups of distances j - i of a key j from a query i (Raffel et al. 2020).

    Half of the buckets hold one distance each; the others grow logarithmically up to `distance`, and the last holds all
    that are larger. If keys may follow their query, half of the `count` buckets are for those.
    """

    count: int = 32
    distance: int = 128
    causal: bool = False

    def table(self) -> Tensor:
        """The buckets of the distances -`distance` .. `distance`, [2 · `distance` + 1]."""
        buckets = self.count if self.causal else self.count // 2
        offset = torch.arange(-self.distance, self.distance + 1, device="cpu")
        steps = (-offset).clamp(min=0) if self.causal else offset.abs()
        exact = buckets // 2
        # in float32 and in this order: distances at the boundary of two buckets are rounded as in T5
        growth = torch.log(steps.float() / exact) / math.log(self.distance / exact) * (buckets - exact)
        bucket = torch.where(steps < exact, steps, (exact + growth.clamp(min=0).long()).clamp(max=buckets - 1))
        return bucket if self.causal else bucket + buckets * (offset > 0)


class BucketedBias(Score):
    """q · k / sqrt(D) + b[bucket(j - i)], with a learned number b for each bucket and head, as in T5.

    Queries and keys are [..., H, L, D]; the last query is at the position of the last key.
    """

    buckets: Tensor

    def __init__(self, heads: int, buckets: DistanceBuckets) -> None:
        super().__init__()
        self.distance = buckets.distance
        self.bias = nn.Parameter(torch.empty(buckets.count, heads))
        nn.init.normal_(self.bias, std=0.02)
        self.register_buffer("buckets", buckets.table(), persistent=False)

    def biases(self, offset: Tensor) -> Tensor:
        """The biases of distances j - i: [..., Q, K] -> [..., H, Q, K]."""
        by_distance = self.bias[self.buckets]  # [2 · distance + 1, H]
        return F.embedding(offset.clamp(-self.distance, self.distance) + self.distance, by_distance).movedim(-1, -3)

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        keys, queries = key.shape[-2], query.shape[-2]
        at = torch.arange(keys, device=key.device)
        return _SCALED_DOT.compare(query, key) + self.biases(at - at[keys - queries :, None]).to(query.dtype)

    def encode_positions(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
        index = positions.index[..., None, None]
        digits = torch.cat([index // DIGIT_BASE, index % DIGIT_BASE], dim=-1)  # [..., 1, 2]
        q, k = (torch.cat([x, digits.expand(*x.shape[:-1], 2).to(x.dtype)], dim=-1) for x in (query, key))
        return q, k, _BiasAtPositions(self)

    def cached_width(self, width: int) -> int:
        return width + 2


DIGIT_BASE = 128  # positions are stored as two digits of this base, which are exact in bf16


class _BiasAtPositions(Score):
    """`BucketedBias` of queries and keys whose last two features are their positions."""

    def __init__(self, whole: BucketedBias) -> None:
        super().__init__()
        self.whole = whole

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        # the positions are the same in all heads
        i, j = ((x[..., 0, :, -2] * DIGIT_BASE + x[..., 0, :, -1]).long() for x in (query, key))  # [..., Q], [..., K]
        scores = _SCALED_DOT.compare(query[..., :-2], key[..., :-2])
        return scores + self.whole.biases(j[..., None, :] - i[..., None]).to(scores.dtype)
