"""Helpers of the kernels.

One rule for all custom operators: output shapes depend on the arguments only, never on a constant of a module. The
compiler caches compiled code on disk, across processes and versions of this package, under a key made from the
arguments. So the caller of a backward operator passes the number of rows per program.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))  # exp(x) = exp2(LOG2E x); the hardware has exp2
MIN_TILE = tl.constexpr(-1e30)  # below any score, and finite: no NaN in a row that has no allowed key yet


def device_of(x: Tensor) -> AbstractContextManager[None]:
    """Make the device of this tensor current: Triton launches kernels on the current device."""
    return torch.cuda.device_of(x)


def tile_size(size: int) -> int:
    """The smallest power of two that is at least `size` and at least 16, the minimum of `tl.dot`."""
    return max(triton.next_power_of_2(size), 16)


def dot_precision(x: Tensor) -> str:
    """The precision of `tl.dot`: float32 is not rounded to tf32; other dtypes are not affected."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
