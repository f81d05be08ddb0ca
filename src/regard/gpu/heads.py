"""Queries or keys of every head by their root mean square, times a gain. The slow twin is `nn.RMSNorm`.

A program takes a few vectors at a time; in the backward pass it takes several such lots, and sums up for the gradient
of the gain.

T tokens, H heads of E features.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, type-arg"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.gpu.common import beside

FEATURES, WARPS = 2048, 4  # of a program at a time
SOME = 256  # vectors of a program of the backward pass


@triton.jit
def _hat(x, vector, there, heads, stride, head, e, eps, E: tl.constexpr):
    """So many vectors, each by its root mean square; one over that; and where the vectors of a dense tensor lie."""
    feature = tl.arange(0, E)[None, :]
    place = vector.to(tl.int64)[:, None]
    real = there[:, None] & (feature < e)
    found = tl.load(x + place // heads * stride + place % heads * head + feature, mask=real, other=0.0).to(tl.float32)
    less = tl.rsqrt(tl.sum(found * found, 1) / e + eps)[:, None]
    return found * less, less, place * e + feature, real


@triton.jit
def _heads(x, gain, out, vectors, heads, stride, head, e, eps, M: tl.constexpr, E: tl.constexpr):
    vector = tl.program_id(0) * M + tl.arange(0, M)
    hat, _, at, real = _hat(x, vector, vector < vectors, heads, stride, head, e, eps, E)
    feature = tl.arange(0, E)
    times = tl.load(gain + feature, mask=feature < e, other=0.0).to(tl.float32)
    tl.store(out + at, (hat * times[None, :]).to(out.dtype.element_ty), mask=real)


@triton.jit
def _heads_backward(
    slope, x, gain, for_x, sums, vectors, heads, stride, head, e, eps,
    LOTS: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    part, feature = tl.program_id(0), tl.arange(0, E)
    times = tl.load(gain + feature, mask=feature < e, other=0.0).to(tl.float32)
    total = tl.zeros([M, E], tl.float32)
    for lot in range(LOTS):
        vector = (part * LOTS + lot) * M + tl.arange(0, M)
        hat, less, at, real = _hat(x, vector, vector < vectors, heads, stride, head, e, eps, E)
        change = tl.load(slope + at, mask=real, other=0.0).to(tl.float32)
        total += change * hat
        change *= times[None, :]
        change = (change - hat * (tl.sum(change * hat, 1) / e)[:, None]) * less
        tl.store(for_x + at, change.to(for_x.dtype.element_ty), mask=real)
    tl.store(sums + part * e + feature, tl.sum(total, 0), mask=feature < e)


def _how(x: Tensor) -> dict:
    wide = triton.next_power_of_2(x.shape[-1])
    return {"M": max(FEATURES // wide, 1), "E": wide, "num_warps": WARPS}


@torch.library.custom_op("regard::normed_heads", mutates_args=())
def normed_heads(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [T, H, E], gain [E] -> [T, H, E]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (tokens, heads, e), how = x.shape, _how(x)
    out = x.new_empty(x.shape)
    with beside(x):
        _heads[(triton.cdiv(tokens * heads, how["M"]),)](
            x, gain, out, tokens * heads, heads, *x.stride()[:2], e, eps, **how
        )
    return out


@normed_heads.register_fake
def _(x, gain, eps):
    return x.new_empty(x.shape)


@torch.library.custom_op("regard::normed_heads_backward", mutates_args=())
def normed_heads_backward(slope: Tensor, x: Tensor, gain: Tensor, eps: float, each: int) -> tuple[Tensor, Tensor]:
    """The gradient in x, and parts [P, E] of that in the gain, of so many vectors each."""
    slope, x = slope.contiguous(), x if x.stride(-1) == 1 else x.contiguous()
    (tokens, heads, e), how = x.shape, _how(x)
    for_x = x.new_empty(x.shape)
    sums = x.new_empty(triton.cdiv(tokens * heads, each), e, dtype=torch.float32)
    with beside(x):
        _heads_backward[(len(sums),)](
            slope, x, gain, for_x, sums, tokens * heads, heads, *x.stride()[:2], e, eps,
            LOTS=triton.cdiv(each, how["M"]), **how,
        )  # fmt: skip
    return for_x, sums


@normed_heads_backward.register_fake
def _(slope, x, gain, eps, each):
    parts = -(-x.shape[0] * x.shape[1] // each)
    return x.new_empty(x.shape), x.new_empty(parts, x.shape[-1], dtype=torch.float32)


def _keep(ctx, inputs, output):
    x, gain, ctx.eps = inputs
    ctx.save_for_backward(x, gain)


def _backward(ctx, slope):
    x, gain = ctx.saved_tensors
    for_x, sums = normed_heads_backward(slope, x, gain, ctx.eps, SOME)
    return for_x, sums.sum(0).to(gain.dtype), None


normed_heads.register_autograd(_backward, setup_context=_keep)
