"""Blocks whose decoding steps on a CPU call fewer operators.

In a step for few sentences, most operators take longer to call than to compute. Here, keys and values are stored
together, the matmul before a residual connection adds the residual, a ReLU is part of its matmul, and what a block
reads of its modules is looked up once. Each class computes the same as its base class in `regard.nn.blocks`, bit for
bit, with the same parameters and names. It falls back to the base class outside of decoding steps, and if a tap has
listeners.

T tokens of a step (one for each beam), D width, N sentences, K beams, H heads, E features of a head.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps, torch_private
from regard.accelerate.linear_backends import PrepackedLinear
from regard.attention import AttentionLayout, Dot, KVCache, MultiHeadAttention, ScaledDot, SourceCache
from regard.attention.backends import attend_in_kernel_layout
from regard.models import SequenceModel
from regard.nn.blocks import DecoderBlock, EncoderBlock, FeedForward, Residual
from regard.nn.norms import LayerNorm


class SubLayer:
    """A sub-layer's first and last linear layer, and its residual connection: f(x) = last(hidden(first(x)))."""

    def __init__(self, linear: PrepackedLinear, residual: Residual, first: nn.Linear, last: nn.Linear) -> None:
        norm = cast(LayerNorm, residual.norm)
        self.norm_first = residual.place == "before"
        self.norm = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        self.first, self.last = ((linear.packed(layer.weight), layer.bias) for layer in (first, last))
        self.linear, self.linear_add = torch_private.onednn_linear()

    def project_in(self, x: Tensor, function: str = "none") -> Tensor:
        """The first layer of x [T, D], and a function ("none" or "relu"): [T, O]."""
        x = torch.layer_norm(x, *self.norm) if self.norm_first else x
        return self.linear(x, *self.first, function, [], "")

    def project_out(self, x: Tensor, hidden: Tensor) -> Tensor:
        """The last layer of `hidden` [T, I], and the residual connection around x [T, D]."""
        x = self.linear_add(hidden, x, *self.last, "add")
        return x if self.norm_first else torch.layer_norm(x, *self.norm)


class AttentionLayer(SubLayer):
    """Self-attention or cross-attention with its residual connection."""

    def __init__(self, linear: PrepackedLinear, residual: Residual, attention: MultiHeadAttention) -> None:
        first = attention.q_proj if attention.is_cross else attention.qkv_proj
        super().__init__(linear, residual, first, attention.out_proj)
        self.heads, self.kv_heads, self.score = attention.heads, attention.kv_heads, attention.score

    def attend_to_self(self, x: Tensor, cache: KVCache) -> Tensor:
        """x [T, D] -> [T, D]."""
        q, k, v, allowed = cache.stacked_to_kernel(self.project_in(x), self.heads, self.kv_heads)
        return self.project_out(
            x, attend_in_kernel_layout(q, k, v, allowed, self.score).transpose(1, 2).reshape(len(x), -1)
        )

    def attend_to_source(self, x: Tensor, cache: SourceCache) -> Tensor:
        """x [T, D] -> [T, D]."""
        query, key = self.project_in(x), cache.key
        q = query.view(len(key), -1, self.heads, query.shape[1] // self.heads).transpose(1, 2)  # [N, H, K, E]
        heads = attend_in_kernel_layout(q, key, cache.value, cache.allowed, self.score)
        return self.project_out(x, heads.transpose(1, 2).reshape(len(x), -1))


class FeedForwardLayer(SubLayer):
    """The feed-forward layer with its residual connection."""

    def __init__(self, linear: PrepackedLinear, residual: Residual, layer: FeedForward) -> None:
        super().__init__(linear, residual, layer.w_in, layer.w_out)
        self.activation = None if layer.activation is F.relu else layer.activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        hidden = self.project_in(x, "relu") if self.activation is None else self.activation(self.project_in(x))
        return self.project_out(x, hidden)


class SubLayers:
    """The sub-layers of a block, with its weights as they are now."""

    def __init__(self, block: EncoderBlock | DecoderBlock, linear: PrepackedLinear) -> None:
        self.weights = tuple(block.parameters())
        self.versions = torch_private.versions(self.weights)
        self.self_attn = AttentionLayer(linear, block.self_attn_residual, block.self_attn)
        if isinstance(block, DecoderBlock):
            self.cross_attn = AttentionLayer(linear, block.cross_attn_residual, block.cross_attn)
        self.feed_forward = FeedForwardLayer(linear, block.feed_forward_residual, block.feed_forward)

    @classmethod
    def of(cls, block: StepEncoderBlock | StepDecoderBlock) -> SubLayers:
        """Those of a block, made again after its weights have changed."""
        layers = block.sub_layers
        if layers is None or torch_private.versions(layers.weights) != layers.versions:
            layers = block.sub_layers = cls(block, block.linear)
        return layers


class StepEncoderBlock(EncoderBlock):
    """`EncoderBlock` with faster decoding steps (of decoder-only models)."""

    linear: PrepackedLinear
    sub_layers: SubLayers | None = None

    def forward(self, x: Tensor, self_layout: AttentionLayout, is_token: Tensor | None = None) -> Tensor:
        if not _is_step(x, self_layout):
            return super().forward(x, self_layout, is_token)
        layers = SubLayers.of(self)
        x = layers.self_attn.attend_to_self(x, cast(KVCache, self_layout))
        return layers.feed_forward(x)


class StepDecoderBlock(DecoderBlock):
    """`DecoderBlock` with faster decoding steps."""

    linear: PrepackedLinear
    sub_layers: SubLayers | None = None

    def forward(
        self,
        x: Tensor,
        self_layout: AttentionLayout,
        cross_layout: AttentionLayout,
        source: Tensor | None = None,
        is_token: Tensor | None = None,
    ) -> Tensor:
        if not _is_step(x, self_layout):
            return super().forward(x, self_layout, cross_layout, source, is_token)
        layers = SubLayers.of(self)
        x = layers.self_attn.attend_to_self(x, cast(KVCache, self_layout))
        x = layers.cross_attn.attend_to_source(x, cast(SourceCache, cross_layout))
        return layers.feed_forward(x)


def _is_step(x: Tensor, layout: AttentionLayout) -> bool:
    """Return whether x [T, D] are the tokens of a decoding step on a CPU."""
    if not isinstance(layout, KVCache) or layout.tree.is_prompt or torch.is_grad_enabled():
        return False
    return x.is_cpu and x.dtype == torch.float32 and not taps.has_listeners()


STEP_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {EncoderBlock: StepEncoderBlock, DecoderBlock: StepDecoderBlock}


def use_step_blocks(model: SequenceModel) -> None:
    """Replace the blocks of a model with prepacked weights by faster ones, if their parts are the usual ones.

    Classes are swapped in place, as in `fused.fuse`: parameters, names and references stay.
    """
    if not isinstance(model.linear, PrepackedLinear):
        return
    for module in model.modules():
        if type(module) in STEP_BLOCKS and all(map(_is_usual, module.children())):
            module.__class__ = STEP_BLOCKS[type(module)]
            module.linear = model.linear  # type: ignore[assignment]


def _is_usual(part: nn.Module) -> bool:
    """Return whether a `SubLayer` computes this part of a block."""
    linear = [child for child in part.children() if isinstance(child, nn.Linear)]
    if any(type(layer) is not nn.Linear for layer in linear):
        return False  # adapted layers
    if isinstance(part, MultiHeadAttention):
        return not part.qk_norm and type(part.score) in (Dot, ScaledDot)
    if isinstance(part, FeedForward):
        return not part.gated and part.squeeze_excite is None
    return isinstance(part, Residual) and part.place in ("before", "after") and type(part.norm) is LayerNorm
