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

QK_NORM_EPS = torch.finfo(torch.float32).eps


class MultiHeadAttention(nn.Module):
    """Concat(head_1 ... head_H) W_O with head_h = attend(x W_Q, s W_K, s W_V).

    Self-attention (s = x) if `source_width` is None; else cross-attention to a source of that width. The layout says
    whether x is a packed batch or one decoding step. With `qk_norm`, queries and keys are RMS-normalised per head;
    with `zero_init`, W_O starts as zeros. T tokens, S source tokens, D width, H heads.
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
            self.q_norm, self.k_norm = (nn.RMSNorm(width // heads, eps=QK_NORM_EPS) for _ in range(2))
        if zero_init:
            nn.init.zeros_(self.out_proj.weight)
        self.guided_head: int | None = None  # whose queries and keys a forward pass leaves in `guided_qk`
        self.guided_qk: tuple[Tensor, Tensor] | None = None  # [T, D / H] and [S, D / H]

    def _initialise(self) -> None:
        """Xavier for each [width, width] matrix, also within stacked ones; zeros for biases."""
        for name, parameter in self.named_parameters():
            if name.startswith("score"):
                continue  # scores initialise their own parameters
            if parameter.dim() < 2:
                nn.init.zeros_(parameter)
            else:
                for matrix in parameter.split(self.width):
                    nn.init.xavier_uniform_(matrix)

    def _project(self, linear: nn.Linear, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Apply a layer with parts * D outputs to x [T, D] -> `parts` tensors [T, H, D / H]."""
        return linear(x).unflatten(-1, (parts, self.heads, -1)).unbind(-3)

    def forward(self, x: Tensor, layout: AttentionLayout, source: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D]. Cross-attention takes the source [S, Ds], or None if the layout caches its keys."""
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
        if self.guided_head is not None and key is not None:
            self.guided_qk = query[:, self.guided_head], key[:, self.guided_head]
        heads = attend(query, key, value, layout, score=self.score, owner=self)
        return taps.tap(self, "heads", heads).flatten(-2)

    def cached_like(self) -> tuple[Tensor, Tensor]:
        """Empty keys and values [0, H, 0, D] with the shape and dtype of those in a KV cache."""
        weight, width = self.qkv_proj.weight, self.width // self.heads
        widths = self.score.cached_width(width), width
        key, value = (weight.new_empty(0, self.heads, 0, each) for each in widths)
        return key, value

    def source_kv(self, source: Tensor, layout: PackedLayout) -> SourceCache:
        """Compute the keys and values of the source [S, Ds] once, for all decoding steps."""
        key, value = self._project(self.kv_proj, source, 2)
        if self.qk_norm:
            key = _norm_per_head(self.k_norm, key)
        key = self.score.project_keys(key)
        key, value = (layout.pad(t).transpose(1, 2).contiguous() for t in (key, value))  # [N, H, L, D / H]
        return SourceCache(key, value, PackedQK(layout, layout).allowed)


def _norm_per_head(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Normalise the features of each head of x [T, H, E]; autocast must not change its dtype."""
    normed: Tensor = norm(x).type_as(x)
    return normed
