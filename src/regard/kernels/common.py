"""What the kernels share.

One rule: the shapes of what an operation gives out hang on its arguments alone, never on a constant of a module. The
compiler keeps what it made on the disk, beyond this process and this version of the package, and looks at the arguments
only to see whether it still fits. So whoever calls a backward pass says how many rows a program of it takes.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))  # exp(x) is exp2(LOG2E x), which is what the hardware has
MIN_TILE = tl.constexpr(-1e30)  # below any score, and finite: a row that has seen nothing yet has no NaN


def device_of(x: Tensor) -> AbstractContextManager[None]:
    """On the device of this tensor: Triton starts a kernel on the current device, wherever its tensors are."""
    return torch.cuda.device_of(x)


def tile_size(size: int) -> int:
    """The side of the least tile that holds so many, of which two can be multiplied."""
    return max(triton.next_power_of_2(size), 16)


def dot_precision(x: Tensor) -> str:
    """How Triton multiplies float32: as it is, not rounded to tf32. For other types it makes no difference."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
