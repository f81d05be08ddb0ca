"""Cross-entropy and its gradient with respect to the logits, in the memory of the logits. Defined in `nn.losses`.

One program per row: a first pass computes the sum of exponentials, a second one, while the row is still in the cache,
overwrites the logits with the gradient.
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
MANY, FEW = (8192, 16), (4096, 8)


@triton.jit
def _logits(row, bias, at, there, BIAS: tl.constexpr):
    found = tl.load(row + at, mask=there, other=float("-inf")).to(tl.float32)
    if BIAS:
        found += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    return found


@triton.jit
def _cross_entropy_kernel(
    logits, bias, labels, counted, losses, units, smoothing,
    BIAS: tl.constexpr, SMOOTH: tl.constexpr, WANTED: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    place, size = tl.program_id(0).to(tl.int64), units * UNIT  # tells the compiler the alignment of rows
    row = logits + place * size
    if tl.load(counted + place) == 0:
        tl.store(losses + place, 0.0)
        if WANTED:
            for first in range(0, size, N):
                at = first + tl.arange(0, N)
                tl.store(row + at, tl.zeros([N], row.dtype.element_ty), mask=at < size)
    else:  # exponentials in base 2, as the hardware has them
        label = tl.load(labels + place)
        known = (label >= 0) & (label < size)
        right = tl.load(row + label, mask=known, other=float("nan")).to(tl.float32)
        if BIAS:
            right += tl.load(bias + label, mask=known, other=0.0).to(tl.float32)
        most, total, together = tl.full([], MIN_TILE, tl.float32), 0.0, 0.0
        for first in range(0, size, N):
            at = first + tl.arange(0, N)
            some = _logits(row, bias, at, at < size, BIAS)
            if SMOOTH:
                together += tl.sum(tl.where(at < size, some, 0.0), 0)
            some *= LOG2E
            higher = tl.maximum(most, tl.max(some, 0))
            total = total * tl.exp2(most - higher) + tl.sum(tl.exp2(some - higher), 0)
            most = higher
        lse = most + tl.log2(total)
        tl.store(losses + place, lse / LOG2E - (1 - smoothing) * right - smoothing * together / size)
        if WANTED:
            spread = smoothing / size
            for first in range(0, size, N):
                at = first + tl.arange(0, N)
                there = at < size
                some = tl.exp2(_logits(row, bias, at, there, BIAS) * LOG2E - lse)
                if SMOOTH:
                    some -= spread
                tl.store(row + at, some.to(row.dtype.element_ty), mask=there)
            tl.debug_barrier()  # the gradient at the label is written last
            some = tl.exp2(right * LOG2E - lse) - spread - (1 - smoothing)
            tl.store(row + label, some.to(row.dtype.element_ty), mask=known)


@torch.library.custom_op("regard::cross_entropy_with_grad", mutates_args=())
def cross_entropy_with_grad(
    x: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, counted: Tensor, smoothing: float, wanted: bool
) -> tuple[Tensor, Tensor]:
    """x [C, D] and table [V, D] -> losses [C], zero where `counted` [C] is False, and the gradient [C, V] of their sum.

    If the gradient is not wanted, the second output holds the logits without the bias.
    """
    labels, counted = labels.contiguous(), counted.contiguous()
    bias = None if bias is None else bias.contiguous()
    logits = x @ table.T
    (places, size), losses = logits.shape, torch.empty(len(x), dtype=torch.float32, device=x.device)
    unit, (block, warps) = math.gcd(size, 16), FEW if size <= MANY[0] else MANY
    with device_of(x):
        _cross_entropy_kernel[(places,)](
            logits, bias, labels, counted, losses, size // unit, smoothing,
            BIAS=bias is not None, SMOOTH=smoothing > 0, WANTED=wanted, UNIT=unit, N=block, num_warps=warps,
        )  # fmt: skip
    return losses, logits


@cross_entropy_with_grad.register_fake
def _(x, table, bias, labels, counted, smoothing, wanted):
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty(len(x), len(table))
