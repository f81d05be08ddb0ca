"""Cross-entropy and its gradient with respect to the logits, in the memory of the logits.

Defined in `nn.linear_cross_entropy`. One program per row: a first pass computes the sum of exponentials, a second one,
while the row is still in the cache, overwrites the logits with the gradient.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg, misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.common import LOG2E, MIN_TILE, device_of

# Logits per iteration, and warps: fastest on an H200 for vocabularies of 37,000 and 50,304, and of 8,000 tokens.
LARGE_TILE, SMALL_TILE = (8192, 16), (4096, 8)


@triton.jit
def _logits(row, bias, at, there, BIAS: tl.constexpr):
    found = tl.load(row + at, mask=there, other=float("-inf")).to(tl.float32)
    if BIAS:
        found += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    return found


@triton.jit
def _cross_entropy_kernel(
    logits, bias, labels, loss_mask, losses, units, smoothing,
    BIAS: tl.constexpr, SMOOTH: tl.constexpr, NEEDS_GRAD: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    index, size = tl.program_id(0).to(tl.int64), units * UNIT  # tells the compiler the alignment of rows
    row = logits + index * size
    if tl.load(loss_mask + index) == 0:
        tl.store(losses + index, 0.0)
        if NEEDS_GRAD:
            for first in range(0, size, N):
                at = first + tl.arange(0, N)
                tl.store(row + at, tl.zeros([N], row.dtype.element_ty), mask=at < size)
    else:  # exponentials in base 2, as the hardware has them
        label = tl.load(labels + index)
        is_class = (label >= 0) & (label < size)
        label_logit = tl.load(row + label, mask=is_class, other=float("nan")).to(tl.float32)
        if BIAS:
            label_logit += tl.load(bias + label, mask=is_class, other=0.0).to(tl.float32)
        running_max, total, logit_sum = tl.full([], MIN_TILE, tl.float32), 0.0, 0.0
        for first in range(0, size, N):
            at = first + tl.arange(0, N)
            some = _logits(row, bias, at, at < size, BIAS)
            if SMOOTH:
                logit_sum += tl.sum(tl.where(at < size, some, 0.0), 0)
            some *= LOG2E
            new_max = tl.maximum(running_max, tl.max(some, 0))
            total = total * tl.exp2(running_max - new_max) + tl.sum(tl.exp2(some - new_max), 0)
            running_max = new_max
        lse = running_max + tl.log2(total)
        tl.store(losses + index, lse / LOG2E - (1 - smoothing) * label_logit - smoothing * logit_sum / size)
        if NEEDS_GRAD:
            spread = smoothing / size
            for first in range(0, size, N):
                at = first + tl.arange(0, N)
                there = at < size
                some = tl.exp2(_logits(row, bias, at, there, BIAS) * LOG2E - lse)
                if SMOOTH:
                    some -= spread
                tl.store(row + at, some.to(row.dtype.element_ty), mask=there)
            tl.debug_barrier()  # the gradient at the label is written last
            some = tl.exp2(label_logit * LOG2E - lse) - spread - (1 - smoothing)
            tl.store(row + label, some.to(row.dtype.element_ty), mask=is_class)


@torch.library.custom_op("regard::cross_entropy_with_grad", mutates_args=())
def cross_entropy_with_grad(
    x: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, loss_mask: Tensor, smoothing: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """x [C, D] and table [V, D] -> losses [C], zero where `loss_mask` [C] is False, and the gradient [C, V] of the sum.

    If no gradient is needed, the second output holds the logits without the bias.
    """
    labels, loss_mask = labels.contiguous(), loss_mask.contiguous()
    bias = None if bias is None else bias.contiguous()
    logits = x @ table.T
    (rows, size), losses = logits.shape, torch.empty(len(x), dtype=torch.float32, device=x.device)
    unit, (block, warps) = math.gcd(size, 16), SMALL_TILE if size <= LARGE_TILE[0] else LARGE_TILE
    with device_of(x):
        _cross_entropy_kernel[(rows,)](
            logits, bias, labels, loss_mask, losses, size // unit, smoothing,
            BIAS=bias is not None, SMOOTH=smoothing > 0, NEEDS_GRAD=needs_grad, UNIT=unit, N=block, num_warps=warps,
        )  # fmt: skip
    return losses, logits


@cross_entropy_with_grad.register_fake
def _(x, table, bias, labels, loss_mask, smoothing, needs_grad):
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty(len(x), len(table))
