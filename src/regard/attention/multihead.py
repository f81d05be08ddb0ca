"""Multi-head attention: project, split into heads, attend, join, project."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard import taps
from regard.attention.backends import attend
from regard.attention.kv_cache import SourceCache
from regard.attention.layouts import AttentionLayout, PackedQK
from regard.attention.scores import ScaledDot, Score
from regard.packed import PackedLayout

TINY = torch.finfo(torch.float32).eps  # added to a mean square, of which the root is taken


class MultiHeadAttention(nn.Module):
    """Concat(head_1 ... head_H) W_O with head_h = attend(x W_Q, s W_K, s W_V).

    Self-attention when `source_width` is None (s = x); else cross-attention over a source of that width. Whether it
    trains on flat rows or takes one decoding step is the layout's affair. With `qk_norm` each head's queries and keys
    are divided by their root mean square and multiplied by learnt gains; with `zero_init` W_O begins as zeros.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        source_width: int | None = None,
        score: Score | None = None,
        *,
        qk_norm: bool = False,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.width, self.heads = width, heads
        self.is_cross = source_width is not None
        if source_width is None:
            self.qkv_proj = nn.Linear(width, 3 * width)
        else:
            self.q_proj = nn.Linear(width, width)
            self.kv_proj = nn.Linear(source_width, 2 * width)
        self.score = score if score is not None else ScaledDot()
        self.out_proj = nn.Linear(width, width)
        self._initialise()
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(width // heads, eps=TINY) for _ in range(2))
        if zero_init:
            nn.init.zeros_(self.out_proj.weight)

    def _initialise(self) -> None:
        """Xavier for each [width, width] matrix on its own, however they are stacked; biases zero."""
        for name, parameter in self.named_parameters():
            if name.startswith("score"):
                continue
            if parameter.dim() < 2:
                nn.init.zeros_(parameter)
            else:
                for matrix in parameter.split(self.width):
                    nn.init.xavier_uniform_(matrix)

    def _project(self, linear: nn.Linear, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """x [T, D], through a layer with parts * D outputs -> parts x [T, H, D / H]."""
        return linear(x).unflatten(-1, (parts, self.heads, -1)).unbind(-3)

    def forward(self, x: Tensor, layout: AttentionLayout, source: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D]. Cross-attention takes the source [S, Ds], or None where the layout caches its keys."""
        return self.out_proj(self.joined_heads(x, layout, source))

    def joined_heads(self, x: Tensor, layout: AttentionLayout, source: Tensor | None = None) -> Tensor:
        """Concat(head_1 ... head_H), before W_O: x [T, D] -> [T, D]."""
        key: Tensor | None
        value: Tensor | None
        if not self.is_cross:
            query, key, value = self._project(self.qkv_proj, x, 3)
        else:
            (query,) = self._project(self.q_proj, x, 1)
            key, value = (None, None) if source is None else self._project(self.kv_proj, source, 2)
        if self.qk_norm:
            query = _norm_per_head(self.q_norm, query)
            key = None if key is None else _norm_per_head(self.k_norm, key)
        heads = attend(query, key, value, layout, score=self.score, owner=self)
        return taps.tap(self, "heads", heads).flatten(-2)

    def cached_like(self) -> tuple[Tensor, Tensor]:
        """Empty keys and values [0, H, 0, D], as a cache of self-attention keeps them."""
        weight, width = self.qkv_proj.weight, self.width // self.heads
        widths = self.score.cached_width(width), width
        key, value = (weight.new_empty(0, self.heads, 0, each) for each in widths)
        return key, value

    def source_kv(self, source: Tensor, rows: PackedLayout) -> SourceCache:
        """The source's keys and values, computed once a sentence, for decoding."""
        key, value = self._project(self.kv_proj, source, 2)
        if self.qk_norm:
            key = _norm_per_head(self.k_norm, key)
        key = self.score.project_keys(key)
        key, value = (rows.pad(t).transpose(1, 2).contiguous() for t in (key, value))
        return SourceCache(key, value, PackedQK(rows, rows).allowed)


def _norm_per_head(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """x [T, H, E] with each head's features normalised, in the precision that they came in, whatever autocast does."""
    found: Tensor = norm(x).type_as(x)
    return found
