"""x + added and its norm in one kernel, for decoding. Its slow twin is `blocks.LayerNorm` or `RMSNorm` of the sum.

One program a row of D features.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEATURES_A_WARP = 256


@triton.jit
def _norm(
    x, added, weight, bias, total, out, d, eps,
    CENTRED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row, feature = tl.program_id(0).to(tl.int64) * d, tl.arange(0, D)
    there = feature < d
    both = tl.load(x + row + feature, mask=there, other=0.0).to(tl.float32)
    both += tl.load(added + row + feature, mask=there, other=0.0).to(tl.float32)
    tl.store(total + row + feature, both.to(total.dtype.element_ty), mask=there)
    if CENTRED:
        both = tl.where(there, both - tl.sum(both, 0) / d, 0.0)
    found = both * tl.rsqrt(tl.sum(both * both, 0) / d + eps)
    if WEIGHT:
        found *= tl.load(weight + feature, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        found += tl.load(bias + feature, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row + feature, found.to(out.dtype.element_ty), mask=there)


@torch.library.custom_op("regard::added_norm", mutates_args=())
def added_norm(
    x: Tensor, added: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x and added [..., D] -> their sum, and its layer norm (not `centred`: root mean square norm) in this dtype."""
    x, added = x.contiguous(), added.contiguous()
    total, out, d = torch.empty_like(x), torch.empty_like(x, dtype=dtype), x.shape[-1]
    wide = triton.next_power_of_2(d)
    warps = min(max(wide // FEATURES_A_WARP, 1), 8)
    with torch.cuda.device_of(x):  # Triton starts a kernel on the current device, wherever its tensors are
        _norm[(x.numel() // d,)](
            x, added, weight, bias, total, out, d, eps,
            CENTRED=centred, WEIGHT=weight is not None, BIAS=bias is not None, D=wide, num_warps=warps,
        )  # fmt: skip
    return total, out


@added_norm.register_fake
def _(x, added, weight, bias, eps, centred, dtype):
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype)
