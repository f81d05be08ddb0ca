"""logsumexp and top-k of logits, for decoding. Defined by `torch.logsumexp` and `torch.topk`.

Equal values are in the order of their indices. V is the vocabulary.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.common import LOG2E, MIN_TILE, device_of

BLOCK, WARPS = 8192, 16  # values of a row per iteration
GROUP, GROUPS = 64, 64  # values per group, whose maxima are computed first; groups per program
MAX_COUNT = 64
_NO_INDEX = tl.constexpr(1 << 30)  # above all indices; clamped to the last one in a row of NaNs


@triton.jit
def _logsumexp_kernel(values, out, size, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most, total = tl.full([], MIN_TILE, tl.float32), 0.0
    for first in range(0, size, N):
        at = first + tl.arange(0, N)
        some = tl.load(values + row * size + at, mask=at < size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(some, 0))
        total = total * tl.exp2((most - higher) * LOG2E) + tl.sum(tl.exp2((some - higher) * LOG2E), 0)
        most = higher
    tl.store(out + row, most + tl.log2(total) / LOG2E)


@triton.jit
def _group_maxima_kernel(values, out, size, groups, GROUP: tl.constexpr, M: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * M + tl.arange(0, M)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    some = tl.load(values + row * size + at, mask=at < size, other=float("-inf")).to(tl.float32)
    tl.store(out + row * groups + group, tl.max(some, 1), mask=group < groups)


@triton.jit
def _select_kernel(
    values, maxima, best, where, size, groups, count,
    GROUP: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.arange(0, G)
    slot, within = tl.arange(0, C), tl.arange(0, GROUP)
    tops = tl.load(maxima + row * groups + group, mask=group < groups, other=float("-inf"))
    chosen = tl.full([C], 0, tl.int32)
    left = group < groups  # a group is selected once, even if all of its values are -inf
    for n in range(count):
        top = tl.max(tl.where(left, tops, float("-inf")), 0)
        index = tl.minimum(tl.min(tl.where(left & (tops == top), group, _NO_INDEX), 0), groups - 1)
        left = left & (group != index)
        chosen = tl.where(slot == n, index, chosen)
    at = chosen[:, None] * GROUP + within[None, :]
    there = (slot < count)[:, None] & (at < size)
    some = tl.load(values + row * size + at, mask=there, other=float("-inf")).to(tl.float32)
    for n in range(count):
        top = tl.max(tl.max(tl.where(there, some, float("-inf")), 1), 0)
        index = tl.minimum(tl.min(tl.min(tl.where(there & (some == top), at, _NO_INDEX), 1), 0), size - 1)
        there = there & (at != index)
        tl.store(best + row * count + n, top)
        tl.store(where + row * count + n, index.to(tl.int64))


@torch.library.custom_op("regard::logsumexp", mutates_args=())
def logsumexp(values: Tensor) -> Tensor:
    """[..., V] -> [...], in float32."""
    values = values.contiguous()
    out = values.new_empty(values.shape[:-1], dtype=torch.float32)
    with device_of(values):
        _logsumexp_kernel[(out.numel(),)](values, out, values.shape[-1], N=BLOCK, num_warps=WARPS)
    return out


@logsumexp.register_fake
def _(values):
    return values.new_empty(values.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("regard::topk", mutates_args=())
def topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row [..., V], descending, in float32, and their indices: [..., count]."""
    values, size = values.contiguous(), values.shape[-1]
    assert 0 < count <= min(MAX_COUNT, triton.cdiv(size, GROUP))
    best = values.new_empty(*values.shape[:-1], count, dtype=torch.float32)
    where = torch.empty_like(best, dtype=torch.long)
    rows, groups = values.numel() // size, triton.cdiv(size, GROUP)
    maxima = best.new_empty(rows, groups)
    with device_of(values):
        _group_maxima_kernel[rows, triton.cdiv(groups, GROUPS)](
            values, maxima, size, groups, GROUP=GROUP, M=GROUPS, num_warps=4
        )
        _select_kernel[(rows,)](
            values, maxima, best, where, size, groups, count,
            GROUP=GROUP, G=triton.next_power_of_2(groups), C=triton.next_power_of_2(count), num_warps=4,
        )  # fmt: skip
    return best, where


@topk.register_fake
def _(values, count):
    best = values.new_empty(*values.shape[:-1], count, dtype=torch.float32)
    return best, torch.empty_like(best, dtype=torch.long)
