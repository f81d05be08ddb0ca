"""W x + b in parts, such as queries, keys and values, for training. The slow twin is a linear layer, taken apart.

In the backward pass one kernel lays the gradients of the parts side by side, for one matrix product with W, and sums up
over the tokens, which is the gradient of b. Of one part, it only sums up.

T tokens, D features, P parts of H heads with E features each.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, type-arg"

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from regard.gpu.common import beside

ROWS, COLUMNS, WARPS = 16, 256, 4  # of a tile
SOME = 128  # rows of a program


@triton.jit
def _join(
    first, second, third, out, sums, rows, columns,
    PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    lot, part = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * N + tl.arange(0, N)
    source = first
    if part == 1:
        source = second
    if part == 2:
        source = third
    total = tl.zeros([M, N], tl.float32)
    for tile in range(TILES):
        row = (lot * TILES + tile) * M + tl.arange(0, M)
        there = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None]
        found = tl.load(source + at * columns + column[None, :], mask=there, other=0.0)
        if PARTS > 1:
            tl.store(out + (at * PARTS + part) * columns + column[None, :], found, mask=there)
        total += found.to(tl.float32)
    tl.store(sums + (lot * PARTS + part) * columns + column, tl.sum(total, 0), mask=column < columns)


@torch.library.custom_op("regard::joined", mutates_args=())
def joined(parts: list[Tensor], each: int) -> tuple[Tensor, Tensor]:
    """Up to three parts [T, H, E] -> all of them [T, P H E], and their sums over so many tokens each [L, P H E].

    One part is not copied: of it, there are only the sums, and the first has no rows.
    """
    flat = [part.flatten(1).contiguous() for part in parts]
    (rows, columns), count = flat[0].shape, len(flat)
    out = flat[0].new_empty(rows if count > 1 else 0, count * columns)
    sums = out.new_empty(triton.cdiv(rows, each), count * columns, dtype=torch.float32)
    with beside(out):
        _join[len(sums), triton.cdiv(columns, COLUMNS), count](
            flat[0], flat[min(1, count - 1)], flat[-1], out, sums, rows, columns,
            PARTS=count, M=ROWS, N=COLUMNS, TILES=triton.cdiv(each, ROWS), num_warps=WARPS,
        )  # fmt: skip
    return out, sums


@joined.register_fake
def _(parts, each):
    rows, columns = len(parts[0]), len(parts) * parts[0].shape[1:].numel()
    out = parts[0].new_empty(rows if len(parts) > 1 else 0, columns)
    return out, out.new_empty(-(-rows // each), columns, dtype=torch.float32)


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, parts: int, heads: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t()).unflatten(-1, (parts, heads, -1)).unbind(-3)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        change, sums = joined(list(slopes), SOME)
        change = change if len(slopes) > 1 else slopes[0].flatten(1)
        return change @ weight, change.t() @ x, sums.sum(0).to(weight.dtype), None, None


def in_parts(x: Tensor, weight: Tensor, bias: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """x [T, D], weight [P H E, D], bias [P H E] -> up to three parts [T, H, E]."""
    return cast(tuple[Tensor, ...], _InParts.apply(x, weight, bias, parts, heads))
