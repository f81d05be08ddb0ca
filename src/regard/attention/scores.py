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

    @classmethod
    def flops(cls, query_width: int, key_width: int, queries: int, keys: int, pairs: int) -> int:
        """FLOPs of the matmuls of one head, for so many queries and keys and `pairs` scores."""
        return 2 * pairs * query_width

    def cached_width(self, width: int) -> int:
        """Features of a cached key: the width after `project_keys` and `at`, for keys of `width` features."""
        return width

    def at(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
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


_DOT, _SCALED_DOT = Dot(), ScaledDot()


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


class RotaryTable:
    """cos and sin of position / base^(2f/D), [L, F] each for F frequencies: computed in float64, extended on demand."""

    def __init__(self, width: int, base: float) -> None:
        self._settings = width, base
        self.frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
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

    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        if width % 2:
            raise UserError(f"rotary positions rotate pairs of features: the width of a head, {width}, must be even")
        self.table = RotaryTable(width, base)

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        cos, sin = self.table(key.shape[-2], key)
        first = key.shape[-2] - query.shape[-2]
        return _rotate(query, cos[first:], sin[first:]), _rotate(key, cos, sin), 1.0 / math.sqrt(query.shape[-1])

    def at(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
        cos, sin = self.table.at(positions, query)
        return _rotate(query, cos, sin), _rotate(key, cos, sin), _SCALED_DOT


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (a, b) = (x_f, x_(f + D/2)) of x [..., L, D] by its angle, with cos and sin [L, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


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

    def at(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
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
