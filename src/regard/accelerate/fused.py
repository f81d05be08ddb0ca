"""Blocks in which a residual sum, its dropout and the next norm are one kernel (`kernels.add_norm`).

Each class computes the same as its base class in `regard.nn.blocks`, with the same parameters and names. It falls back
to the base class if the kernel does not support the input, or if a tap has listeners: the kernel never stores the
values that they would read. In training, the kernel also adds the bias of a sub-layer's last linear layer, because it
computes that gradient at little cost. The bias of a block's last layer is thus added by the kernel of the next block,
except in sharded models, where a block's weights are there only while it is computed. T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import kernels, taps
from regard.accelerate.linear_relu import linear_relu
from regard.attention import AttentionLayout, PackedQK
from regard.dropout import new_seeds
from regard.nn.blocks import BlockStack, DecoderBlock, EncoderBlock, FeedForward, Residual
from regard.nn.norms import LayerNorm, RMSNorm
from regard.packed import PackedLayout
from regard.precision import matrix_dtype


class PendingResidual(NamedTuple):
    """x + dropout(added + bias): a residual sum, to be computed by the kernel of the next norm."""

    x: Tensor  # [T, D]
    added: Tensor  # [T, D]
    bias: Tensor | None  # [D], of the layer that `added` comes from
    dropout: float = 0.0


ResidualStream = Tensor | PendingResidual


def can_fuse(x: Tensor, norm: nn.Module) -> bool:
    """Return whether the kernel supports this tensor and norm, and there are no listeners."""
    return kernels.supports(x) and isinstance(norm, LayerNorm | RMSNorm) and not taps.has_listeners()


def add_and_norm(norm: nn.Module, pending: PendingResidual, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return the sum [T, D], and its norm [T, D] in this dtype (default: the dtype of matmuls)."""
    from regard.kernels.add_norm import add_norm

    assert isinstance(norm, LayerNorm | RMSNorm) and norm.eps is not None
    x = pending.x
    seeds = new_seeds(x.device) if pending.dropout else None
    dtype = matrix_dtype(x) if dtype is None else dtype
    flat, added = (t.flatten(0, -2) for t in (x, pending.added))
    how = pending.dropout, norm.eps, isinstance(norm, LayerNorm), dtype
    total, normed, *_ = add_norm(flat, added, pending.bias, norm.weight, getattr(norm, "bias", None), seeds, *how)
    if x.dim() == 2:  # FSDP warns of views
        return total, normed
    return total.view(x.shape), normed.view(x.shape)


def start_pending(x: Tensor, block: nn.Module) -> PendingResidual:
    """Wrap the input of the first block like the output of a block, so that all blocks are compiled once.

    In training, the sums have the precision of matmuls, since norms are bound by memory bandwidth.
    """
    assert isinstance(block, FusedEncoderBlock | FusedDecoderBlock)
    zeros = torch.zeros_like(x, dtype=matrix_dtype(x)).requires_grad_(x.requires_grad)
    last = _last_bias(block)
    bias = nn.Parameter(torch.zeros_like(last)) if block.training and last is not None else None
    return PendingResidual(x.to(zeros.dtype) if block.training else x, zeros, bias, _dropout(block.self_attn_residual))


def _dropout(residual: Residual) -> float:
    return residual.dropout if residual.training else 0.0


def _last_bias(block: FusedEncoderBlock | FusedDecoderBlock) -> nn.Parameter | None:
    """The bias that the next block adds; None if this one does, because a gate follows or the model is sharded."""
    return None if block.adds_last_bias or block.feed_forward.squeeze_excite else block.feed_forward.w_out.bias


def _residual(
    residual: Residual, x: ResidualStream, hidden: Callable[[Tensor], Tensor], out: nn.Linear | None
) -> ResidualStream:
    """Compute `residual` around f(x) = out(hidden(x)); if `out` is None, around f(x) = hidden(x)."""

    def pending(x: Tensor, h: Tensor) -> PendingResidual:
        if out is None or not residual.training or type(out) is not nn.Linear:  # an adapted layer is called whole
            return PendingResidual(x, h if out is None else out(h), None, _dropout(residual))
        return PendingResidual(x, F.linear(h, out.weight), out.bias, _dropout(residual))

    if isinstance(x, PendingResidual):
        total, normed = add_and_norm(residual.norm, x)
        return pending(total, hidden(normed))
    return add_and_norm(residual.norm, pending(x, hidden(x)), x.dtype)[1]


def _feed_forward(
    block: FusedEncoderBlock | FusedDecoderBlock, x: ResidualStream, rows: PackedLayout | None
) -> ResidualStream:
    f = block.feed_forward
    if f.squeeze_excite is None and not block.adds_last_bias:
        return _residual(block.feed_forward_residual, x, f.hidden, f.w_out)
    return _residual(block.feed_forward_residual, x, lambda h: f(h, rows), None)


def _fuses(block: EncoderBlock | DecoderBlock, x: ResidualStream) -> bool:
    """Whether to use the kernel: with norms first, the stack has decided; with norms after, each block decides."""
    if isinstance(x, PendingResidual):
        return True
    first = block.self_attn_residual
    return first.place == "after" and can_fuse(x, first.norm)


def _norms_input(module: nn.Module) -> bool:
    """Whether a residual connection can be computed with the norm of the next one; true of any other module."""
    return not isinstance(module, Residual) or (
        module.place == "before" and isinstance(module.norm, LayerNorm | RMSNorm)
    )


class FusedFeedForward(FeedForward):
    """`FeedForward` whose first layer and ReLU are one matmul in training."""

    def hidden(self, x: Tensor) -> Tensor:
        plain = type(self.w_in) is nn.Linear and self.w_in.bias is not None and not self.gated
        if not (plain and self.training and self.activation is F.relu and x.dim() == 2 and kernels.supports(x)):
            return super().hidden(x)
        dtype = matrix_dtype(x)
        return linear_relu(x.to(dtype), self.w_in.weight.to(dtype), self.w_in.bias.to(dtype))


class FusedEncoderBlock(EncoderBlock):
    """`EncoderBlock` with residual sums and norms in one kernel."""

    adds_last_bias = False

    def forward(self, x: Any, self_layout: AttentionLayout, is_token: Tensor | None = None) -> Any:
        if not _fuses(self, x):
            return super().forward(x, self_layout, is_token)
        x = _residual(
            self.self_attn_residual, x, lambda h: self.self_attn.joined_heads(h, self_layout), self.self_attn.out_proj
        )
        return _feed_forward(self, x, self_layout.queries if isinstance(self_layout, PackedQK) else None)


class FusedDecoderBlock(DecoderBlock):
    """`DecoderBlock` with residual sums and norms in one kernel."""

    adds_last_bias = False

    def forward(
        self,
        x: Any,
        self_layout: AttentionLayout,
        cross_layout: AttentionLayout,
        source: Tensor | None = None,
        is_token: Tensor | None = None,
    ) -> Any:
        if not _fuses(self, x):
            return super().forward(x, self_layout, cross_layout, source, is_token)
        x = _residual(
            self.self_attn_residual, x, lambda h: self.self_attn.joined_heads(h, self_layout), self.self_attn.out_proj
        )
        x = _residual(
            self.cross_attn_residual,
            x,
            lambda h: self.cross_attn.joined_heads(h, cross_layout, source),
            self.cross_attn.out_proj,
        )
        return _feed_forward(self, x, None)


class FusedBlockStack(BlockStack):
    """`BlockStack` whose blocks return pending residual sums."""

    def forward(
        self,
        x: Tensor,
        *layouts: AttentionLayout | Sequence[AttentionLayout],
        is_token: Tensor | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        if self.norm is None or not can_fuse(x, self.norm) or not all(map(_norms_input, self.modules())):
            return super().forward(x, *layouts, is_token=is_token, **inputs)
        pending = start_pending(x, self[0])
        for block, block_layouts in zip(self, self._per_block(layouts), strict=False):
            pending = block(pending, *block_layouts, is_token=is_token, **inputs)
        return add_and_norm(self.norm, pending)[1]


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    BlockStack: FusedBlockStack,
    EncoderBlock: FusedEncoderBlock,
    DecoderBlock: FusedDecoderBlock,
    FeedForward: FusedFeedForward,
}


def fuse(model: nn.Module, sharded: bool = False) -> None:
    """Replace the plain stacks and blocks of a model by fused ones; `sharded`: of one that FSDP will divide.

    Their classes are swapped in place, as FSDP2's `fully_shard` does: parameters, names and references stay.
    """
    for module in model.modules():
        if type(module) in FUSED:
            module.__class__ = FUSED[type(module)]
        if isinstance(module, FusedEncoderBlock | FusedDecoderBlock):
            module.adds_last_bias = sharded


def deferred_biases(model: nn.Module) -> set[nn.Parameter]:
    """The biases that are added in the kernel, in float32."""
    biases: set[nn.Parameter | None] = set()
    for block in model.modules():
        if isinstance(block, FusedEncoderBlock | FusedDecoderBlock):
            biases |= {block.self_attn.out_proj.bias, _last_bias(block)}
        if isinstance(block, FusedDecoderBlock):
            biases.add(block.cross_attn.out_proj.bias)
    return {bias for bias in biases if bias is not None}
