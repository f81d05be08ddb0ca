"""What the kernels share.

One rule: the shapes of what an operation gives out hang on its arguments alone, never on a constant of a module. The
compiler keeps what it made on the disk, beyond this process and this version of the package, and looks at the arguments
only to see whether it still fits. So whoever calls a backward pass says how many rows a program of it takes.
"""

from __future__ import annotations

import math

import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))  # exp(x) is exp2(LOG2E x), which is what the hardware has
LEAST = tl.constexpr(-1e30)  # below any score, and finite: a row that has seen nothing yet has no NaN
