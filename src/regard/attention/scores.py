"""How well a key answers a query: the score functions of attention.

Each turns queries [..., Q, Dq] and keys [..., K, Dk] into scores [..., Q, K]. To try another one, write it here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.errors import UserError


class TokenPositions:
    """Positions [...] of tokens in their sentences, and what layers with equal settings make of them, made once."""

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self.made: dict[object, tuple[Tensor, Tensor]] = {}


class Score(nn.Module):
    """A score function. Those that come down to a dot product say so, and may then use the fused kernels."""

    def at(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
        """Queries and keys [..., H, D] of tokens at known positions, as a cache keeps them, and the score of those."""
        return query, key, self

    def cached_width(self, width: int) -> int:
        """Features of a key of `width` features as a cache keeps it."""
        return width

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """`(q, k, scale)` such that the score is `scale * q @ k^T`."""
        raise TypeError(f"{type(self).__name__} is no dot product: only the plain kernel, by its forward, computes it")

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        q, k, scale = self.as_dot(query, key)
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


_DOT, _SCALED_DOT = Dot(), ScaledDot()


class Bilinear(Score):
    """q^T W k: queries and keys may differ in width ("general" in Luong et al.)."""

    def __init__(self, query_width: int, key_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(query_width, key_width))
        nn.init.xavier_uniform_(self.weight)

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query @ self.weight, key, 1.0


class Additive(Score):
    """v · tanh(W q + U k), a single-layer network (Bahdanau, Cho and Bengio 2015).

    With key_width None the keys come as U k already: whoever asks many times computes that once.
    """

    def __init__(self, query_width: int, key_width: int | None, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, hidden, bias=False)
        self.key = nn.Identity() if key_width is None else nn.Linear(key_width, hidden)
        self.out = nn.Linear(hidden, 1, bias=False)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        hidden = torch.tanh(self.query(query).unsqueeze(-2) + self.key(key).unsqueeze(-3))  # [..., Q, K, hidden]
        return self.out(hidden).squeeze(-1)


class RotaryTable:
    """cos and sin of place / base^(2f/D), [L, F] each: made in float64, kept, and made anew when more are asked for."""

    def __init__(self, width: int, base: float) -> None:
        self._settings = width, base
        self.frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
        self._kept: tuple[Tensor, Tensor] | None = None
        self._moved: dict[torch.device, Tensor] = {}  # they stay where they are, as CUDA graphs require

    def at(self, positions: TokenPositions, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for tokens at these positions [...], [..., 1, F] each."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key, device = (self._settings, dtype), positions.index.device
        if key not in positions.made:
            if device not in self._moved:
                with torch.inference_mode(False):
                    self._moved[device] = self.frequencies.to(device)
            angle = positions.index[..., None, None] * self._moved[device]
            positions.made[key] = angle.cos().to(dtype), angle.sin().to(dtype)
        return positions.made[key]

    def __call__(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        kept = self._kept
        if kept is None or len(kept[0]) < length or kept[0].device != like.device or kept[0].dtype != dtype:
            with torch.inference_mode(False):  # what is kept may be wanted in training later
                places = torch.arange(max(64, 1 << (length - 1).bit_length()), dtype=torch.float64, device="cpu")
                angle = places[:, None] * self.frequencies
                kept = self._kept = angle.cos().to(like.device, dtype), angle.sin().to(like.device, dtype)
        return kept[0][:length], kept[1][:length]


class Rotary(Score):
    """(R_i q) · (R_j k) / sqrt(D): R_i turns pairs of features by angles that grow with the place (Su et al. 2021).

    R_i^T R_j = R_(j-i), so the score depends on the distance alone. Feature f turns together with f + D/2, by
    place / base^(2f/D). The last query stands at the last key: query i of Q at place K - Q + i, key j at place j.
    """

    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        if width % 2:
            raise UserError(f"rotary positions turn pairs of features, and a head of {width} has no pairs")
        self.waves = RotaryTable(width, base)

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        cos, sin = self.waves(key.shape[-2], key)
        first = key.shape[-2] - query.shape[-2]
        turned = _rotate(query, cos[first:], sin[first:]), _rotate(key, cos, sin)
        return *turned, 1.0 / math.sqrt(query.shape[-1])

    def at(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
        cos, sin = self.waves.at(positions, query)
        return _rotate(query, cos, sin), _rotate(key, cos, sin), _SCALED_DOT


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (a, b) = (x_f, x_(f + D/2)) of [..., L, D] by the angle of its place, [L, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Relative(Score):
    """((q + u) · k + (q + v) · W R(i - j)) / sqrt(D), as in Transformer-XL (Dai et al. 2019).

    R(t) are the sines and cosines of the distance, D of them; u, v [H, D] and W [H, D, D] are learned for each head:
    how much is asked of any content, of any distance, and what a distance means. A sinusoid of i - j is a linear
    function of those of i and of j, so all of it is one dot product: of [q + u, W^T (q + v) turned by i] with
    [k, R(j)]. Queries and keys are [..., H, L, D]; the last query stands at the last key.
    """

    def __init__(self, width: int, heads: int, base: float = 10000.0) -> None:
        super().__init__()
        self.waves = RotaryTable(width, base)
        self.content = nn.Parameter(torch.empty(heads, width))  # u
        self.distance = nn.Parameter(torch.empty(heads, width))  # v
        self.weight = nn.Parameter(torch.empty(heads, width, 2 * len(self.waves.frequencies)))  # W; sines first
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def as_dot(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        keys, queries = key.shape[-2], query.shape[-2]
        cos, sin = self.waves(keys, key)
        asked = (query + self.distance[:, None]) @ self.weight  # [..., H, Q, 2F]
        for_sin, for_cos = asked.chunk(2, dim=-1)
        c, s = cos[keys - queries :], sin[keys - queries :]
        # sin(i - j) = sin i cos j - cos i sin j,  cos(i - j) = cos i cos j + sin i sin j
        turned = [for_cos * s - for_sin * c, for_sin * s + for_cos * c]
        q = torch.cat([query + self.content[:, None], *turned], dim=-1).to(query.dtype)
        places = torch.cat([sin, cos], dim=-1).to(key.dtype)
        k = torch.cat([key, places.expand(*key.shape[:-1], -1)], dim=-1)
        return q, k, 1.0 / math.sqrt(query.shape[-1])

    def at(self, query: Tensor, key: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Score]:
        cos, sin = self.waves.at(positions, query)
        asked = torch.einsum("...hd,hdf->...hf", query + self.distance, self.weight)
        for_sin, for_cos = asked.chunk(2, dim=-1)
        turned = [for_cos * sin - for_sin * cos, for_sin * sin + for_cos * cos]
        q = torch.cat([query + self.content, *turned], dim=-1) / math.sqrt(query.shape[-1])
        places = torch.cat([sin, cos], dim=-1).expand(*key.shape[:-1], -1)
        return q.to(query.dtype), torch.cat([key, places.to(key.dtype)], dim=-1), _DOT

    def cached_width(self, width: int) -> int:
        return width + 2 * len(self.waves.frequencies)


def positional_score(kind: str, width: int, heads: int, base: float = 10000.0) -> Callable[[], Score] | None:
    """What makes the score for positions of this kind: rotary and relative act inside the attention, others do not.

    `width` is the model's, which the heads share.
    """
    if kind == "rotary":
        return lambda: Rotary(width // heads, base)
    if kind == "relative":
        return lambda: Relative(width // heads, heads, base)
    return None
