"""Losses and their gradients from logits, in the logits' own memory. Its slow twin is `losses.cross_entropy`.

One program a row: it goes over the row once for the sum of its exponentials and once more, while the row is still in
the cache, to put the gradient in its place.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg, misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))
LOGITS, WARPS = 4096, 8  # of a row at a time


@triton.jit
def _logits(row, bias, at, there, BIAS: tl.constexpr):
    found = tl.load(row + at, mask=there, other=float("-inf")).to(tl.float32)
    if BIAS:
        found += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    return found


@triton.jit
def _slope(
    logits, bias, labels, counted, losses, stride, size, smoothing,
    BIAS: tl.constexpr, WANTED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride
    if tl.load(counted + place) == 0:
        tl.store(losses + place, 0.0)
        if WANTED:
            for first in range(0, size, N):
                at = first + tl.arange(0, N)
                tl.store(row + at, tl.zeros([N], row.dtype.element_ty), mask=at < size)
    else:
        label = tl.load(labels + place)
        right = tl.load(row + label).to(tl.float32)
        if BIAS:
            right += tl.load(bias + label).to(tl.float32)
        most, total, together = float("-inf"), 0.0, 0.0
        for first in range(0, size, N):
            at = first + tl.arange(0, N)
            there = at < size
            few = _logits(row, bias, at, there, BIAS)
            higher = tl.maximum(most, tl.max(few, 0))
            total = total * tl.exp2((most - higher) * LOG2E) + tl.sum(tl.exp2((few - higher) * LOG2E), 0)
            together += tl.sum(tl.where(there, few, 0.0), 0)
            most = higher
        lse = most + tl.log2(total) / LOG2E
        tl.store(losses + place, lse - (1 - smoothing) * right - smoothing * together / size)
        if WANTED:
            for first in range(0, size, N):
                at = first + tl.arange(0, N)
                there = at < size
                few = tl.exp2((_logits(row, bias, at, there, BIAS) - lse) * LOG2E) - smoothing / size
                few = tl.where(at == label, few - (1 - smoothing), few)
                tl.store(row + at, few.to(row.dtype.element_ty), mask=there)


@torch.library.custom_op("regard::slope_", mutates_args=("logits",))
def slope_(
    logits: Tensor, bias: Tensor | None, labels: Tensor, counted: Tensor, smoothing: float, wanted: bool
) -> Tensor:
    """The losses [C] of logits [C, V] + bias, zero where a place does not count; the logits become the gradient."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    assert logits.stride(1) == 1
    _slope[(len(logits),)](
        logits, bias, labels, counted, losses, logits.stride(0), logits.shape[1], smoothing,
        BIAS=bias is not None, WANTED=wanted, N=LOGITS, num_warps=WARPS,
    )  # fmt: skip
    return losses


@slope_.register_fake
def _(logits, bias, labels, counted, smoothing, wanted):
    return logits.new_empty(len(logits), dtype=torch.float32)
