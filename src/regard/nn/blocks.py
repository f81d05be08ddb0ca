"""Residual connections, feed-forward layers, the two Transformer blocks, and stacks of them.

This is the definition, as in the papers' figures; `regard.accelerate` replaces parts of it by faster equivalents.
Shapes: T tokens of a packed batch, S source tokens, D width, F inner width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.attention import AttentionLayout, PackedQK
from regard.attention.squeeze_excite import SqueezeExcite
from regard.dropout import dropout
from regard.nn.block_config import BlockConfig
from regard.nn.norms import BatchNorm, LayerNorm, RMSNorm
from regard.packed import PackedLayout
from regard.registry import ACTIVATIONS

ACTIVATIONS.register("relu")(F.relu)
ACTIVATIONS.register("gelu")(F.gelu)
ACTIVATIONS.register("gelu-tanh")(partial(F.gelu, approximate="tanh"))
ACTIVATIONS.register("silu")(F.silu)
GATED = "gated"  # prefix of the activations of a gate beside the hidden features (Shazeer 2020)
ACTIVATIONS.register("gated")(F.silu)  # SwiGLU
ACTIVATIONS.register("gated-gelu")(F.gelu)  # GEGLU
ACTIVATIONS.register("gated-gelu-tanh")(partial(F.gelu, approximate="tanh"))
ACTIVATIONS.register("gated-relu")(F.relu)


class FeedForward(nn.Module):
    """W_2 f(W_1 x): f is ReLU, GELU or SiLU; gated: W_2 (f(W_g x) * W_1 x).

    With `se_dim`, the output passes a squeeze-and-excite gate over its features, one per sentence.
    """

    def __init__(self, config: BlockConfig, se_dim: int = 0) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gated = config.activation.startswith(GATED)
        self.squeeze_excite = SqueezeExcite(config.width, se_dim) if se_dim else None
        rows = config.ffn_width * (2 if self.gated else 1)  # gated: W_g, then W_1
        self.w_in = nn.Linear(config.width, rows, bias=config.ffn_bias)
        self.w_out = nn.Linear(config.ffn_width, config.width, bias=config.ffn_bias)
        for linear in (self.w_in, self.w_out):
            nn.init.xavier_uniform_(linear.weight)
            if config.ffn_bias:
                nn.init.zeros_(linear.bias)
        if config.zero_init:
            nn.init.zeros_(self.w_out.weight)

    def forward(self, x: Tensor, layout: PackedLayout | None = None) -> Tensor:
        """x [T, D] -> [T, D]; the layout of the batch is for the gate."""
        x = self.w_out(self.hidden(x))
        return x if self.squeeze_excite is None or layout is None else self.squeeze_excite(x, layout)

    def hidden(self, x: Tensor) -> Tensor:
        """f(W_1 x): [T, D] -> [T, F]."""
        hidden = self.w_in(x)
        if not self.gated:
            return self.activation(hidden)
        gate, hidden = hidden.chunk(2, dim=-1)
        return self.activation(taps.tap(self, "gate", gate)) * hidden


class Residual(nn.Module):
    """A residual connection around a sub-layer f, with a norm in one of four places (`BlockConfig.place`).

    "before": x + dropout(f(norm(x))), which trains more stably; "after": norm(x + dropout(f(x))), as in "Attention Is
    All You Need"; "output": x + dropout(norm(f(x))), as in OLMo 2; "both": x + dropout(output_norm(f(norm(x)))), as in
    Gemma 2.
    """

    output_norm: nn.Module

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.place, self.dropout = config.place, config.dropout
        self.norm: nn.Module = config.make_norm()
        if self.place == "both":
            self.output_norm = config.make_norm()

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor], is_token: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D]; `is_token` [T] is False for padding."""
        if self.place == "before":
            x = x + self._dropout(f(self.norm(x, is_token)))
        elif self.place == "after":
            x = self.norm(x + self._dropout(f(x)), is_token)
        elif self.place == "output":
            x = x + self._dropout(self.norm(f(x), is_token))
        else:
            x = x + self._dropout(self.output_norm(f(self.norm(x, is_token)), is_token))
        return taps.tap(self, "stream", x)

    def _dropout(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each with a residual connection."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.self_attn = config.make_self_attn()
        self.self_attn_residual = Residual(config)
        self.feed_forward = FeedForward(config, config.se_dim)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: Tensor, self_layout: AttentionLayout, is_token: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D]."""
        packed = self_layout.queries if isinstance(self_layout, PackedQK) else None
        x = self.self_attn_residual(x, lambda h: self.self_attn(h, self_layout), is_token)
        x = self.feed_forward_residual(x, lambda h: self.feed_forward(h, packed), is_token)
        return x


class DecoderBlock(nn.Module):
    """Masked self-attention, cross-attention over the source, then feed-forward."""

    def __init__(self, config: BlockConfig, source_width: int | None = None) -> None:
        super().__init__()
        self.self_attn = config.make_self_attn()
        self.self_attn_residual = Residual(config)
        self.cross_attn = config.make_cross_attn(source_width or config.width)
        self.cross_attn_residual = Residual(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        self_layout: AttentionLayout,
        cross_layout: AttentionLayout,
        source: Tensor | None = None,
        is_token: Tensor | None = None,
    ) -> Tensor:
        """x [T, D] and source [S, Ds] -> [T, D]; source is None if `cross_layout` caches its keys and values."""
        x = self.self_attn_residual(x, lambda h: self.self_attn(h, self_layout), is_token)
        x = self.cross_attn_residual(x, lambda h: self.cross_attn(h, cross_layout, source), is_token)
        x = self.feed_forward_residual(x, self.feed_forward, is_token)
        return x


class BlockStack(nn.Module):
    """Blocks in sequence and, if norms come first, a norm after the last block.

    Indexing and iteration yield the blocks, whose names are "0", "1", ...
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
    def of(
        cls,
        config: BlockConfig,
        block: type[EncoderBlock] | type[DecoderBlock],
        depth: int,
        changes: Callable[[int], dict[str, Any]] = lambda layer: {},
    ) -> BlockStack:
        """Create `depth` blocks; `changes` are the fields of `config` in which a block differs.

        If norms come first, the output of the last block still needs one.
        """
        blocks = [block(replace(config, **changes(layer))) for layer in range(depth)]
        return cls(blocks, config.make_norm() if config.has_last_norm else None)

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
        is_token: Tensor | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        """x [T, D] -> [T, D]. A layout is the same for every block, or a list with one per block (KV caches)."""
        for block, block_layouts in zip(self, self._per_block(layouts), strict=False):
            x = block(x, *block_layouts, is_token=is_token, **inputs)
        return self.last_norm(x, is_token)

    def last_norm(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        """Apply the norm after the last block, if there is one: [T, D] -> [T, D]."""
        return x if self.norm is None else self.norm(x, is_token)

    def _per_block(
        self, layouts: Sequence[AttentionLayout | Sequence[AttentionLayout]]
    ) -> Iterable[tuple[AttentionLayout, ...]]:
        return zip(*(each if isinstance(each, Sequence) else repeat(each) for each in layouts), strict=False)
