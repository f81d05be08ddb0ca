"""f(W x + b), the first half of a feed-forward layer, for training. The slow twins are PyTorch's own activations.

A ReLU is in the matrix kernel's last lines, and its result says by itself where it let something through; a GELU is a
kernel of its own, and what went into it is kept. In the backward pass one kernel multiplies by the slope of f and sums
up over the tokens, which is the gradient of b.

T tokens, D features, E inner ones.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.gpu.common import LOG2E, beside

RELU, GELU, TANH = 0, 1, 2  # kinds of f: GELU by its definition, or with a tanh in place of the error function
EACH, WARPS = 1024, 4  # features of a program that maps one by one
ROWS, COLUMNS, STAGES = 2, 1024, 3  # of a tile of the backward pass, and how many tiles are under way at once
SOME = 32  # rows of a program of the backward pass

_STEEP = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBIC = tl.constexpr(0.044715)
_HALF = tl.constexpr(math.sqrt(0.5))
_PEAK = tl.constexpr(math.sqrt(0.5 / math.pi))
_RELU = tl.constexpr(RELU)
_TANH = tl.constexpr(TANH)


@triton.jit
def _share(x, KIND: tl.constexpr):
    """What a GELU lets through of x: gelu(x) = x share(x)."""
    if KIND == _TANH:  # 0.5 (1 + tanh(u)) = sigmoid(2 u)
        return 1 / (1 + tl.exp2((x + x * x * x * _CUBIC) * -_STEEP * LOG2E))
    return 0.5 + 0.5 * tl.erf(x * _HALF)


@triton.jit
def _incline(x, KIND: tl.constexpr):
    """The slope of a GELU at x."""
    share = _share(x, KIND)
    if KIND == _TANH:
        return share + x * share * (1 - share) * (1 + x * x * 3 * _CUBIC) * _STEEP
    return share + x * tl.exp2(x * x * -0.5 * LOG2E) * _PEAK


@triton.jit
def _gelu(before, out, size, KIND: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    x = tl.load(before + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, (x * _share(x, KIND)).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _bend(
    slope, kept, change, sums, rows, columns,
    KIND: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    column = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row = (part * TILES + tile) * M + tl.arange(0, M)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        there = (row < rows)[:, None] & (column < columns)[None, :]
        found = tl.load(slope + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(kept + at, mask=there, other=0.0).to(tl.float32)
        found = tl.where(x > 0, found, 0.0) if KIND == _RELU else found * _incline(x, KIND)
        tl.store(change + at, found.to(change.dtype.element_ty), mask=there)
        total += found
    tl.store(sums + part * columns + column, tl.sum(total, 0), mask=column < columns)


@torch.library.custom_op("regard::linear_relu", mutates_args=())
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [T, D], weight [E, D], bias [E] -> [T, E]."""
    return torch._addmm_activation(bias, x, weight.t())


@linear_relu.register_fake
def _(x, weight, bias):
    return x.new_empty(len(x), len(weight))


@torch.library.custom_op("regard::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """x [T, D], weight [E, D], bias [E] -> [T, E], and what went into the GELU."""
    before = torch.addmm(bias, x, weight.t())
    out, size = torch.empty_like(before), before.numel()
    with beside(x):
        _gelu[(triton.cdiv(size, EACH),)](before, out, size, KIND=kind, N=EACH, num_warps=WARPS)
    return out, before


@linear_gelu.register_fake
def _(x, weight, bias, kind):
    out = x.new_empty(len(x), len(weight))
    return out, torch.empty_like(out)


@torch.library.custom_op("regard::bent", mutates_args=())
def bent(slope: Tensor, kept: Tensor, kind: int, each: int) -> tuple[Tensor, Tensor]:
    """The slope [T, E] from before f, and parts [P, E] of its sum over the tokens, so many of them each.

    `kept` is what went into f, or of a ReLU, what came out.
    """
    slope, kept = slope.contiguous(), kept.contiguous()
    (rows, columns), change = slope.shape, torch.empty_like(slope)
    sums = slope.new_empty(triton.cdiv(rows, each), columns, dtype=torch.float32)
    with beside(slope):
        _bend[len(sums), triton.cdiv(columns, COLUMNS)](
            slope, kept, change, sums, rows, columns,
            KIND=kind, M=ROWS, N=COLUMNS, TILES=triton.cdiv(each, ROWS), STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
    return change, sums


@bent.register_fake
def _(slope, kept, kind, each):
    parts = -(-len(slope) // each)
    return slope.new_empty(slope.shape), slope.new_empty(parts, slope.shape[1], dtype=torch.float32)


def _keep(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # no zeros for what went into a GELU
    x, weight, _, *kind = inputs
    ctx.kind = kind[0] if kind else RELU
    ctx.save_for_backward(x, weight, output[1] if kind else output)


def _backward(ctx, slope, *_unused):
    x, weight, kept = ctx.saved_tensors
    change, sums = bent(slope, kept, ctx.kind, SOME)
    found = change @ weight, change.t() @ x, sums.sum(0).to(weight.dtype)
    return found if ctx.kind == RELU else (*found, None)


linear_relu.register_autograd(_backward, setup_context=_keep)
linear_gelu.register_autograd(_backward, setup_context=_keep)

Inner = Callable[[Tensor, Tensor, Tensor], Tensor]
ACTIVATIONS: dict[str, Inner] = {
    "relu": linear_relu,
    "gelu": lambda *inputs: linear_gelu(*inputs, GELU)[0],
    "gelu-tanh": lambda *inputs: linear_gelu(*inputs, TANH)[0],
}
