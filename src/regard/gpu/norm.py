"""x + dropout(added) and its norm in one kernel, forward and backward.

The slow twin is `blocks.LayerNorm` or `RMSNorm` of the sum, with `dropout.hashed` saying what is dropped. One warp has
a row of up to 1,024 features to itself, several have a longer one; in the backward pass they take a few rows one after
the other, and sum up for the gradients of the norm's weight and bias.

T rows of D features.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, type-arg"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard import dropout

FEATURES_A_WARP = 1024
PROGRAMS = 2048  # of a backward pass: some for every multiprocessor

_FIRST, _SECOND = tl.constexpr(dropout.FIRST % 2**32), tl.constexpr(dropout.SECOND % 2**32)


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 16)) * _FIRST
    bits = (bits ^ (bits >> 13)) * _SECOND
    return bits ^ (bits >> 16)


@triton.jit
def _dropped(x, at, seeds, limit, scale):
    """x where the hash of its place is at least the limit, scaled; else 0. As `dropout.hashed` has it."""
    first = tl.load(seeds).to(tl.uint32, bitcast=True)
    second = tl.load(seeds + 1).to(tl.uint32, bitcast=True)
    bits = _mixed(_mixed(at.to(tl.uint32) ^ first) ^ second)
    return tl.where(bits.to(tl.int32, bitcast=True) >= limit, x * scale, 0.0)


@triton.jit
def _norm(
    x, added, weight, bias, seeds, total, out, mean, spread, d, eps, limit, scale,
    CENTRED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, DROPS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row, feature = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    at, there = row * d + feature, feature < d
    more = tl.load(added + at, mask=there, other=0.0).to(tl.float32)
    if DROPS:
        more = _dropped(more, at, seeds, limit, scale)
    both = tl.load(x + at, mask=there, other=0.0).to(tl.float32) + more
    tl.store(total + at, both.to(total.dtype.element_ty), mask=there)
    if CENTRED:
        middle = tl.sum(both, 0) / d
        tl.store(mean + row, middle)
        both = tl.where(there, both - middle, 0.0)
    less = tl.rsqrt(tl.sum(both * both, 0) / d + eps)
    tl.store(spread + row, less)
    found = both * less
    if WEIGHT:
        found *= tl.load(weight + feature, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        found += tl.load(bias + feature, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=there)


@triton.jit
def _norm_backward(
    total_slope, slope, total, mean, spread, weight, seeds, for_x, for_added, for_weight, for_bias,
    rows, each, d, limit, scale,
    CENTRED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, DROPS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    part, feature = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    real = feature < d
    if WEIGHT:
        gain = tl.load(weight + feature, mask=real, other=0.0).to(tl.float32)
    weights, biases = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    for n in range(each):
        row = part * each + n
        at, there, mine = row * d + feature, feature < tl.where(row < rows, d, 0), tl.minimum(row, rows - 1)
        hat = tl.load(total + at, mask=there, other=0.0).to(tl.float32)
        if CENTRED:
            hat = tl.where(there, hat - tl.load(mean + mine), 0.0)
        less = tl.load(spread + mine)
        hat *= less
        change = tl.load(slope + at, mask=there, other=0.0).to(tl.float32)
        weights += change * hat
        biases += change
        if WEIGHT:
            change *= gain
        change -= hat * (tl.sum(change * hat, 0) / d)
        if CENTRED:
            change -= tl.sum(change, 0) / d
        change = change * less + tl.load(total_slope + at, mask=there, other=0.0).to(tl.float32)
        tl.store(for_x + at, change.to(for_x.dtype.element_ty), mask=there)
        if DROPS:
            change = _dropped(change, at, seeds, limit, scale)
        tl.store(for_added + at, change.to(for_added.dtype.element_ty), mask=there)
    if WEIGHT:
        tl.store(for_weight + part * d + feature, weights, mask=real)
    if BIAS:
        tl.store(for_bias + part * d + feature, biases, mask=real)


def _how(d: int, share: float, centred: bool, weight: Tensor | None, biased: bool) -> tuple[list[float], dict]:
    """From which hash on a number is kept and what it is multiplied by then; and what a kernel is compiled for."""
    wide = triton.next_power_of_2(d)
    warps = min(triton.cdiv(wide, FEATURES_A_WARP), 8)
    kind = {"CENTRED": centred, "WEIGHT": weight is not None, "BIAS": biased, "DROPS": share > 0, "D": wide}
    return [dropout.limit(share), 1 / (1 - share)], {**kind, "num_warps": warps}


@torch.library.custom_op("regard::added_norm", mutates_args=())
def added_norm(
    x: Tensor,
    added: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seeds: Tensor | None,
    share: float,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and added [T, D] -> their sum, and its layer norm (not `centred`: root mean square norm) in this dtype.

    Of `added` a share is dropped, by two seeds [2] of int32. The third and the fourth are for the backward pass.
    """
    x, added = x.contiguous(), added.contiguous()
    (rows, d), total, out = x.shape, torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    mean, spread = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    numbers, options = _how(d, share, centred, weight, bias is not None)
    with torch.cuda.device_of(x):  # Triton starts a kernel on the current device, wherever its tensors are
        _norm[(rows,)](x, added, weight, bias, seeds, total, out, mean, spread, d, eps, *numbers, **options)
    return total, out, mean, spread


@added_norm.register_fake
def _(x, added, weight, bias, seeds, share, eps, centred, dtype):
    mean, spread = (x.new_empty(len(x), dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype), mean, spread


def _rows_each(rows: int) -> int:
    """Of a program of the backward pass."""
    return max(-(-rows // PROGRAMS), 1)


@torch.library.custom_op("regard::added_norm_backward", mutates_args=())
def added_norm_backward(
    total_slope: Tensor,
    slope: Tensor,
    total: Tensor,
    mean: Tensor,
    spread: Tensor,
    weight: Tensor | None,
    seeds: Tensor | None,
    share: float,
    centred: bool,
    biased: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in x, and in `added` in this dtype; and parts [P, D] of those in weight and bias."""
    total_slope, slope = total_slope.contiguous(), slope.contiguous()
    (rows, d), each = total.shape, _rows_each(len(total))
    for_x, for_added = torch.empty_like(total), torch.empty_like(total, dtype=dtype)
    for_weight, for_bias = (total.new_empty(triton.cdiv(rows, each), d, dtype=torch.float32) for _ in range(2))
    numbers, options = _how(d, share, centred, weight, biased)
    with torch.cuda.device_of(total):
        _norm_backward[(len(for_weight),)](
            total_slope, slope, total, mean, spread, weight, seeds, for_x, for_added, for_weight, for_bias,
            rows, each, d, *numbers, **options,
        )  # fmt: skip
    return for_x, for_added, for_weight, for_bias


@added_norm_backward.register_fake
def _(total_slope, slope, total, mean, spread, weight, seeds, share, centred, biased, dtype):
    (rows, d), each = total.shape, _rows_each(len(total))
    parts = -(-rows // each)
    sums = [total.new_empty(parts, d, dtype=torch.float32) for _ in range(2)]
    return total.new_empty(total.shape), total.new_empty(total.shape, dtype=dtype), *sums


def _keep(ctx, inputs, output):
    _, added, weight, bias, seeds, ctx.share, _, ctx.centred, _ = inputs
    total, _, mean, spread = output
    ctx.save_for_backward(total, mean, spread, weight, seeds)
    ctx.dtype, ctx.bias = added.dtype, None if bias is None else bias.dtype


def _backward(ctx, total_slope, slope, *_unused):
    *kept, weight, seeds = ctx.saved_tensors
    how = ctx.share, ctx.centred, ctx.bias is not None, ctx.dtype
    for_x, for_added, for_weight, for_bias = added_norm_backward(total_slope, slope, *kept, weight, seeds, *how)
    for_weight = None if weight is None else for_weight.sum(0).to(weight.dtype)
    for_bias = None if ctx.bias is None else for_bias.sum(0).to(ctx.bias)
    return for_x, for_added, for_weight, for_bias, *[None] * 5


added_norm.register_autograd(_backward, setup_context=_keep)
