"""x + dropout(added + offset) and its norm in one kernel, forward and backward.

The definition is `nn.norms.LayerNorm` or `RMSNorm` of the sum, with the dropout mask of `dropout.hash_mask`. A program
has one warp per 1,024 features of a row. In the backward pass it processes several rows in sequence, and accumulates
the gradients of the offset and of the norm's weight and bias.

T rows of D features.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, type-arg"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard import dropout
from regard.kernels.common import device_of

FEATURES_A_WARP = 1024
# Programs of a backward pass, and pipeline stages (rows in flight). The second was fastest on an H200 for 768 features.
# Several rows of more than 1,024 features do not fit into every multiprocessor.
DEFAULT_LAUNCH, MEDIUM_LAUNCH = (2048, 1), (1024, 3)

_FIRST, _SECOND = tl.constexpr(dropout.MULTIPLIER_1 % 2**32), tl.constexpr(dropout.MULTIPLIER_2 % 2**32)


@triton.jit
def _hash(bits):
    bits = (bits ^ (bits >> 16)) * _FIRST
    bits = (bits ^ (bits >> 13)) * _SECOND
    return bits ^ (bits >> 16)


@triton.jit
def _dropout(x, at, seeds, limit, scale):
    """x * scale if the hash of its index is at least the limit, else 0; as in `dropout.hash_mask`."""
    first = tl.load(seeds).to(tl.uint32, bitcast=True)
    second = tl.load(seeds + 1).to(tl.uint32, bitcast=True)
    bits = _hash(_hash(at.to(tl.uint32) ^ first) ^ second)
    return tl.where(bits.to(tl.int32, bitcast=True) >= limit, x * scale, 0.0)


@triton.jit
def _add_norm_kernel(
    x, added, offset, weight, bias, seeds, total, out, mean, rstd, d, eps, limit, scale,
    CENTRED: tl.constexpr, OFFSET: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    DROPS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row, feature = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    at, there = row * d + feature, feature < d
    addend = tl.load(added + at, mask=there, other=0.0).to(tl.float32)
    if OFFSET:
        addend += tl.load(offset + feature, mask=there, other=0.0).to(tl.float32)
    if DROPS:
        addend = _dropout(addend, at, seeds, limit, scale)
    summed = (tl.load(x + at, mask=there, other=0.0).to(tl.float32) + addend).to(total.dtype.element_ty)
    tl.store(total + at, summed, mask=there)
    summed = summed.to(tl.float32)  # normalise the sum as it is stored, after rounding
    if CENTRED:
        row_mean = tl.sum(summed, 0) / d
        tl.store(mean + row, row_mean)
        summed = tl.where(there, summed - row_mean, 0.0)
    row_rstd = tl.rsqrt(tl.sum(summed * summed, 0) / d + eps)
    tl.store(rstd + row, row_rstd)
    normed = summed * row_rstd
    if WEIGHT:
        normed *= tl.load(weight + feature, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        normed += tl.load(bias + feature, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=there)


@triton.jit
def _add_norm_backward_kernel(
    grad_total, grad_out, total, mean, rstd, weight, seeds, grad_x, grad_added, sums, rows, each, d, limit, scale,
    CENTRED: tl.constexpr, OFFSET: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    STREAM: tl.constexpr, TWO_GRADS: tl.constexpr, DROPS: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, feature = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    real = feature < d
    if WEIGHT:
        gain = tl.load(weight + feature, mask=real, other=0.0).to(tl.float32)
    weights, biases, offsets = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    for n in tl.range(0, each, num_stages=STAGES):
        row = program * each + n
        at, there, clamped = row * d + feature, feature < tl.where(row < rows, d, 0), tl.minimum(row, rows - 1)
        hat = tl.load(total + at, mask=there, other=0.0).to(tl.float32)
        if CENTRED:
            hat = tl.where(there, hat - tl.load(mean + clamped), 0.0)
        row_rstd = tl.load(rstd + clamped)
        hat *= row_rstd
        grad = tl.load(grad_out + at, mask=there, other=0.0).to(tl.float32)
        weights += grad * hat
        biases += grad
        if WEIGHT:
            grad *= gain
        grad -= hat * (tl.sum(grad * hat, 0) / d)
        if CENTRED:
            grad -= tl.sum(grad, 0) / d
        grad *= row_rstd
        if STREAM:
            grad += tl.load(grad_total + at, mask=there, other=0.0).to(tl.float32)
        tl.store(grad_x + at, grad.to(grad_x.dtype.element_ty), mask=there)
        if DROPS:
            grad = _dropout(grad, at, seeds, limit, scale)
        if TWO_GRADS:
            tl.store(grad_added + at, grad.to(grad_added.dtype.element_ty), mask=there)
        offsets += grad
    sums += program * 3 * d + feature
    if OFFSET:
        tl.store(sums, offsets, mask=real)
    if WEIGHT:
        tl.store(sums + d, weights, mask=real)
    if BIAS:
        tl.store(sums + 2 * d, biases, mask=real)


def _kernel_options(d: int, share: float, centred: bool, given: Sequence[bool]) -> tuple[list[float], dict]:
    """The dropout limit and scale, and the compile-time options of a kernel.

    `given` tells whether there are an offset, a weight and a bias.
    """
    wide = triton.next_power_of_2(d)
    warps = min(triton.cdiv(wide, FEATURES_A_WARP), 8)
    there = dict(zip(("OFFSET", "WEIGHT", "BIAS"), given, strict=True))
    kind = {"CENTRED": centred, **there, "DROPS": share > 0, "D": wide, "num_warps": warps}
    return [dropout.hash_limit(share), 1 / (1 - share)], kind


@torch.library.custom_op("regard::add_norm", mutates_args=())
def add_norm(
    x: Tensor,
    added: Tensor,
    offset: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seeds: Tensor | None,
    share: float,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and added [T, D] -> their sum, and its layer norm (not `centred`: root mean square norm) in this dtype.

    The offset [D] is added to each row of `added` before dropout with probability `share` and two int32 seeds [2]. The
    third and fourth output (mean and inverse deviation, [T] each) are for the backward pass.
    """
    x, added = x.contiguous(), added.contiguous()
    (rows, d), total, out = x.shape, torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    numbers, options = _kernel_options(d, share, centred, [t is not None for t in (offset, weight, bias)])
    with device_of(x):
        _add_norm_kernel[(rows,)](
            x, added, offset, weight, bias, seeds, total, out, mean, rstd, d, eps, *numbers, **options
        )
    return total, out, mean, rstd


@add_norm.register_fake
def _(x, added, offset, weight, bias, seeds, share, eps, centred, dtype):
    mean, rstd = (x.new_empty(len(x), dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype), mean, rstd


def _backward_grid(rows: int, d: int) -> tuple[int, int]:
    """Rows per program of the backward pass, and pipeline stages."""
    programs, stages = MEDIUM_LAUNCH if 512 < d <= 1024 else DEFAULT_LAUNCH
    return max(-(-rows // programs), 1), stages


def _grads_differ(total: Tensor, share: float, dtype: torch.dtype) -> bool:
    """Whether the gradient of `added` differs from that of x."""
    return share > 0 or dtype != total.dtype


@torch.library.custom_op("regard::add_norm_backward", mutates_args=())
def add_norm_backward(
    grad_total: Tensor | None,
    grad_out: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    seeds: Tensor | None,
    share: float,
    centred: bool,
    given: list[bool],
    dtype: torch.dtype,
    each: int,
    stages: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, and of `added` in this dtype; and partial sums [P, 3, D] for those of offset, weight and bias.

    `grad_total`, the gradient of the sum, is None if only its norm is used. Without dropout and with one dtype, both
    gradients are equal: then the second has no rows. A program processes `each` rows in a pipeline of `stages`.
    """
    grad_total, grad_out = None if grad_total is None else grad_total.contiguous(), grad_out.contiguous()
    (rows, d), two_grads = total.shape, _grads_differ(total, share, dtype)
    grad_x, grad_added = torch.empty_like(total), total.new_empty(rows if two_grads else 0, d, dtype=dtype)
    sums = total.new_empty(triton.cdiv(rows, each), 3, d, dtype=torch.float32)
    numbers, options = _kernel_options(d, share, centred, given)
    with device_of(total):
        _add_norm_backward_kernel[(len(sums),)](
            grad_total, grad_out, total, mean, rstd, weight, seeds, grad_x, grad_added, sums,
            rows, each, d, *numbers, STREAM=grad_total is not None, STAGES=stages,
            TWO_GRADS=two_grads, **options,
        )  # fmt: skip
    return grad_x, grad_added, sums


@add_norm_backward.register_fake
def _(grad_total, grad_out, total, mean, rstd, weight, seeds, share, centred, given, dtype, each, stages):
    rows, d = total.shape
    sums = total.new_empty(-(-rows // each), 3, d, dtype=torch.float32)
    grad_added = total.new_empty(rows if _grads_differ(total, share, dtype) else 0, d, dtype=dtype)
    return total.new_empty(total.shape), grad_added, sums


def _save_for_backward(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # no zero tensors for outputs without gradient
    _, added, offset, weight, bias, seeds, ctx.share, _, ctx.centred, _ = inputs
    total, _, mean, rstd = output
    ctx.save_for_backward(total, mean, rstd, weight, seeds)
    ctx.dtype, ctx.given = added.dtype, [None if t is None else t.dtype for t in (offset, weight, bias)]


def _backward(ctx, grad_total, grad_out, *_unused):
    grad_out = torch.zeros_like(ctx.saved_tensors[0]) if grad_out is None else grad_out
    options = ctx.share, ctx.centred, [dtype is not None for dtype in ctx.given], ctx.dtype
    launch = _backward_grid(*grad_out.shape)
    grad_x, grad_added, sums = add_norm_backward(grad_total, grad_out, *ctx.saved_tensors, *options, *launch)
    grad_added = grad_added if _grads_differ(grad_x, ctx.share, ctx.dtype) else grad_x
    grads = zip(ctx.given, sums.sum(0), strict=True)
    return grad_x, grad_added, *(None if dtype is None else total.to(dtype) for dtype, total in grads), *[None] * 5


add_norm.register_autograd(_backward, setup_context=_save_for_backward)
