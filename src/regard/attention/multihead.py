"""Multi-head attention: project, split into heads, attend, join, project."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard import taps
from regard.attention.backends import attend
from regard.attention.kv_cache import SourceCache
from regard.attention.layouts import AttentionLayout, PackedQK
from regard.attention.scores import ScaledDot, Score
from regard.packed import PackedLayout

QK_NORM_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class AttentionOptions:
    """The options of an attention layer in which models differ."""

    kv_heads: int = 0  # heads of keys and values, each shared by heads / kv_heads queries; 0: as many as heads
    head_width: int = 0  # features of a head; 0: width / heads
    qkv_bias: bool = True
    out_bias: bool = True
    qk_norm: bool = False  # RMS-normalise the queries and keys of each head
    qk_norm_all: bool = False  # with `qk_norm`: over all heads together
    qk_norm_eps: float = QK_NORM_EPS


class MultiHeadAttention(nn.Module):
    """Concat(head_1 ... head_H) W_O with head_h = attend(x W_Q, s W_K, s W_V).

    Self-attention (s = x) if `source_width` is None; else cross-attention to a source of that width. The layout says
    whether x is a packed batch or one decoding step. `options` are what varies between published models; with
    `zero_init`, W_O starts as zeros. T tokens, S source tokens, D width, H heads, G heads of keys and values, E
    features of a head (D / H unless set).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        source_width: int | None = None,
        score: Score | None = None,
        *,
        options: AttentionOptions | None = None,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        options = AttentionOptions() if options is None else options
        self.width, self.heads, self.kv_heads = width, heads, options.kv_heads or heads
        self.head_width = options.head_width or width // heads
        if not options.head_width and width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        if heads % self.kv_heads:
            raise ValueError(f"heads {heads} is not a multiple of kv_heads {self.kv_heads}")
        self.is_cross = source_width is not None
        all_heads, kv = heads * self.head_width, 2 * self.kv_heads * self.head_width
        if source_width is None:
            self.qkv_proj = nn.Linear(width, all_heads + kv, bias=options.qkv_bias)
        else:
            self.q_proj = nn.Linear(width, all_heads, bias=options.qkv_bias)
            self.kv_proj = nn.Linear(source_width, kv, bias=options.qkv_bias)
        self.score = score if score is not None else ScaledDot()
        self.out_proj = nn.Linear(all_heads, width, bias=options.out_bias)
        self._initialise()
        self.qk_norm, self.norm_all_heads = options.qk_norm, options.qk_norm_all
        if self.qk_norm:
            for name, count in (("q_norm", heads), ("k_norm", self.kv_heads)):
                size = self.head_width * (count if self.norm_all_heads else 1)
                self.add_module(name, nn.RMSNorm(size, eps=options.qk_norm_eps))
        if zero_init:
            nn.init.zeros_(self.out_proj.weight)
        self.guided_head: int | None = None  # a forward pass leaves this head's queries and keys in `guided_qk`
        self.guided_qk: tuple[Tensor, Tensor] | None = None  # [T, D / H] and [S, D / H]

    q_norm: nn.RMSNorm
    k_norm: nn.RMSNorm

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """The rows of each matrix within a stacked projection."""
        query, key = self.heads * self.head_width, self.kv_heads * self.head_width
        return {"kv_proj": (key, key)} if self.is_cross else {"qkv_proj": (query, key, key)}

    def _initialise(self) -> None:
        """Xavier for each matrix, also within stacked ones; zeros for biases."""
        for name, parameter in self.named_parameters():
            if name.startswith("score"):
                continue  # scores initialise their own parameters
            if parameter.dim() < 2:
                nn.init.zeros_(parameter)
            else:
                for matrix in parameter.split(self.matrices.get(name.split(".")[0], (len(parameter),))):
                    nn.init.xavier_uniform_(matrix)

    def _project(self, linear: nn.Linear, x: Tensor, *heads: int) -> tuple[Tensor, ...]:
        """Apply a layer whose outputs are several tensors, of `heads` heads each: x [T, D] -> tensors [T, heads, E]."""
        y = linear(x)
        y = y.view(*y.shape[:-1], sum(heads), -1)
        return (y,) if len(heads) == 1 else y.split(heads, dim=-2)

    def forward(self, x: Tensor, layout: AttentionLayout, source: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D]. Cross-attention takes the source [S, Ds], or None if the layout caches its keys."""
        return self.out_proj(self.joined_heads(x, layout, source))

    def joined_heads(self, x: Tensor, layout: AttentionLayout, source: Tensor | None = None) -> Tensor:
        """Concat(head_1 ... head_H), before W_O: x [T, D] -> [T, D]."""
        key: Tensor | None
        value: Tensor | None
        if not self.is_cross:
            query, key, value = self._project(self.qkv_proj, x, self.heads, self.kv_heads, self.kv_heads)
        else:
            (query,) = self._project(self.q_proj, x, self.heads)
            key, value = (None, None) if source is None else self._source_kv(source)
        if self.qk_norm:
            query = self._norm(self.q_norm, query)
            key = None if key is None else self._norm(self.k_norm, key)
        if self.guided_head is not None and key is not None:
            self.guided_qk = query[:, self.guided_head], key[:, self.guided_head * self.kv_heads // self.heads]
        heads = attend(query, key, value, layout, score=self.score, owner=self)
        return taps.tap(self, "heads", heads).flatten(-2)

    def cached_like(self) -> tuple[Tensor, Tensor]:
        """Empty keys and values [0, G, 0, E] with the shape and dtype of those in a KV cache."""
        weight, width = self.qkv_proj.weight, self.head_width
        widths = self.score.cached_width(width), width
        key, value = (weight.new_empty(0, self.kv_heads, 0, each) for each in widths)
        return key, value

    def _source_kv(self, source: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self._project(self.kv_proj, source, self.kv_heads, self.kv_heads)
        return key, value

    def source_kv(self, source: Tensor, layout: PackedLayout) -> SourceCache:
        """Compute the keys and values of the source [S, Ds] once, for all decoding steps."""
        key, value = self._source_kv(source)
        if self.qk_norm:
            key = self._norm(self.k_norm, key)
        key = self.score.project_keys(key)
        key, value = (layout.pad(t).transpose(1, 2).contiguous() for t in (key, value))  # [N, G, L, E]
        return SourceCache(key, value, PackedQK(layout, layout).allowed)

    def _norm(self, norm: nn.RMSNorm, x: Tensor) -> Tensor:
        """Normalise the features of each head of x [T, H, E], or of all heads together; autocast keeps its dtype."""
        normed: Tensor = norm(x.flatten(-2)).view(x.shape) if self.norm_all_heads else norm(x)
        return normed.type_as(x)
