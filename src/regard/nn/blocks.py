"""Residual connections, feed-forward layers, the two Transformer blocks, and stacks of them.

This is the definition, as the papers' figures show it. What makes it faster on a device is in `regard.accelerate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.attention import AttentionLayout, MultiHeadAttention, PackedQK, Score
from regard.attention.squeeze_excite import SqueezeExcite
from regard.dropout import dropout
from regard.nn.norms import BatchNorm, LayerNorm, RMSNorm
from regard.packed import PackedLayout
from regard.registry import ACTIVATIONS, NORMS, POSITIONS, SCORES


@dataclass(frozen=True)
class BlockConfig:
    """What a Transformer block is made of."""

    width: int
    heads: int
    ffn_width: int
    dropout: float = 0.0
    activation: str = "relu"
    norm: str = "layer"
    norm_first: bool = True
    norm_eps: float = 1e-5
    se_dim: int = 0  # of the encoder's feed-forward layers; 0: none
    qk_norm: bool = False
    zero_init: bool = False
    score: str = "scaled-dot"
    cross_score: str | None = None  # of cross-attention; None: as `score`
    positions: str = "none"  # rotary and relative positions are the score of self-attention
    position_base: float = 10000.0

    @classmethod
    def from_settings(cls, settings: object) -> BlockConfig:
        """Take the fields that a family's settings have; the others keep their defaults."""
        given = {field.name: getattr(settings, field.name) for field in fields(cls) if hasattr(settings, field.name)}
        return cls(**given)

    @property
    def only_dot_scores(self) -> bool:
        """Whether all scores are dot products, as the fused kernels require."""
        return all(SCORES[name].is_dot for name in (self.score, self.cross_score or self.score))

    def make_norm(self) -> LayerNorm | RMSNorm | BatchNorm:
        return NORMS[self.norm](self.width, eps=self.norm_eps)

    def make_self_attn(self) -> MultiHeadAttention:
        return self._make_attn(self._positional_score() or self._make_score(self.score))

    def make_cross_attn(self, source_width: int) -> MultiHeadAttention:
        return self._make_attn(self._make_score(self.cross_score or self.score), source_width)

    def _make_attn(self, score: Score, source_width: int | None = None) -> MultiHeadAttention:
        flags = {"qk_norm": self.qk_norm, "zero_init": self.zero_init}
        return MultiHeadAttention(self.width, self.heads, source_width, score, **flags)

    def _make_score(self, name: str) -> Score:
        score: Score = SCORES[name](self.width // self.heads, self.width // self.heads, self.heads)
        return score

    def _positional_score(self) -> Score | None:
        score: Score | None = POSITIONS[self.positions].score(self.width // self.heads, self.heads, self.position_base)
        return score


ACTIVATIONS.register("relu")(F.relu)
ACTIVATIONS.register("gelu")(F.gelu)
ACTIVATIONS.register("gelu-tanh")(partial(F.gelu, approximate="tanh"))
ACTIVATIONS.register("silu")(F.silu)
ACTIVATIONS.register("gated")(F.silu)  # of a gate beside the hidden features (SwiGLU, Shazeer 2020)


class FeedForward(nn.Module):
    """W_2 f(W_1 x): f is ReLU, GELU or SiLU; gated: W_2 (silu(W_g x) * W_1 x).

    With `squeeze`, the output passes a squeeze-and-excite gate over its features, one per sentence.
    """

    def __init__(self, settings: BlockConfig, squeeze: int = 0) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[settings.activation]
        self.gated = settings.activation == "gated"
        self.squeeze_excite = SqueezeExcite(settings.width, squeeze) if squeeze else None
        hidden = settings.ffn_width * (2 if self.gated else 1)
        self.w_in = nn.Linear(settings.width, hidden)
        self.w_out = nn.Linear(settings.ffn_width, settings.width)
        for linear in (self.w_in, self.w_out):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        if settings.zero_init:
            nn.init.zeros_(self.w_out.weight)

    def forward(self, x: Tensor, rows: PackedLayout | None = None) -> Tensor:
        """x [T, D] -> [T, D]."""
        x = self.w_out(self.hidden(x))
        return x if self.squeeze_excite is None or rows is None else self.squeeze_excite(x, rows)

    def hidden(self, x: Tensor) -> Tensor:
        """f(W_1 x): [T, D] -> [T, inner]."""
        hidden = self.w_in(x)
        if not self.gated:
            return self.activation(hidden)
        gate, hidden = hidden.chunk(2, dim=-1)
        return self.activation(taps.tap(self, "gate", gate)) * hidden


class Residual(nn.Module):
    """A residual connection around a sub-layer f, with dropout on what f adds.

    x + dropout(f(norm(x))), or norm(x + dropout(f(x))) as in "Attention Is All You Need".
    """

    def __init__(self, settings: BlockConfig) -> None:
        super().__init__()
        self.norm = settings.make_norm()
        self.norm_first = settings.norm_first
        self.dropout = settings.dropout

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor], real: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D]; `real` [T] is False at padding."""
        if self.norm_first:
            x = x + dropout(f(self.norm(x, real)), self.dropout, self.training)
        else:
            x = self.norm(x + dropout(f(x), self.dropout, self.training), real)
        return taps.tap(self, "stream", x)


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each with a residual connection."""

    def __init__(self, settings: BlockConfig) -> None:
        super().__init__()
        self.self_attn = settings.make_self_attn()
        self.self_attn_residual = Residual(settings)
        self.feed_forward = FeedForward(settings, settings.se_dim)
        self.feed_forward_residual = Residual(settings)

    def forward(self, x: Tensor, own: AttentionLayout, real: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D]."""
        rows = own.queries if isinstance(own, PackedQK) else None
        x = self.self_attn_residual(x, lambda h: self.self_attn(h, own), real)
        x = self.feed_forward_residual(x, lambda h: self.feed_forward(h, rows), real)
        return x


class DecoderBlock(nn.Module):
    """Masked self-attention, cross-attention over the source, then feed-forward."""

    def __init__(self, settings: BlockConfig, source_width: int | None = None) -> None:
        super().__init__()
        self.self_attn = settings.make_self_attn()
        self.self_attn_residual = Residual(settings)
        self.cross_attn = settings.make_cross_attn(source_width or settings.width)
        self.cross_attn_residual = Residual(settings)
        self.feed_forward = FeedForward(settings)
        self.feed_forward_residual = Residual(settings)

    def forward(
        self,
        x: Tensor,
        own: AttentionLayout,
        cross: AttentionLayout,
        source: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """x [T, D] and source [S, Ds] -> [T, D]; source is None where the cross layout caches its keys and values."""
        x = self.self_attn_residual(x, lambda h: self.self_attn(h, own), real)
        x = self.cross_attn_residual(x, lambda h: self.cross_attn(h, cross, source), real)
        x = self.feed_forward_residual(x, self.feed_forward, real)
        return x


class BlockStack(nn.Module):
    """Blocks one after the other and, where norms come first, the norm after the last one.

    It is indexed and iterated over as a list of its blocks, and names them "0", "1", ...
    """

    norm: LayerNorm | RMSNorm | BatchNorm | None

    def __init__(self, blocks: Iterable[nn.Module], norm: LayerNorm | RMSNorm | BatchNorm | None = None) -> None:
        super().__init__()
        self.depth = 0
        for block in blocks:
            self.add_module(str(self.depth), block)
            self.depth += 1
        self.norm = norm

    @classmethod
    def of(cls, settings: BlockConfig, kind: type[EncoderBlock] | type[DecoderBlock], depth: int) -> BlockStack:
        """So many fresh blocks. Where norms come first, nothing else normalises what the last block hands on."""
        blocks = [kind(settings) for _ in range(depth)]
        return cls(blocks, settings.make_norm() if settings.norm_first else None)

    def __len__(self) -> int:
        return self.depth

    def __getitem__(self, index: int) -> Any:
        return [*self][index]

    def __iter__(self) -> Iterator[Any]:
        return islice(self.children(), self.depth)

    def forward(
        self,
        x: Tensor,
        *layouts: AttentionLayout | Sequence[AttentionLayout],
        real: Tensor | None = None,
        **given: Tensor,
    ) -> Tensor:
        """x [T, D] -> [T, D]. A layout is the same for every block, or a list with one per block (KV caches)."""
        for block, each in zip(self, self._per_block(layouts), strict=False):
            x = block(x, *each, real=real, **given)
        return self.last_norm(x, real)

    def last_norm(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """The norm after the last block, where there is one."""
        return x if self.norm is None else self.norm(x, real)

    def _per_block(
        self, layouts: Sequence[AttentionLayout | Sequence[AttentionLayout]]
    ) -> Iterable[tuple[AttentionLayout, ...]]:
        return zip(*(each if isinstance(each, Sequence) else repeat(each) for each in layouts), strict=False)
