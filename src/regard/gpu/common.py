"""What the kernels share."""

from __future__ import annotations

import math

import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))  # exp(x) is exp2(LOG2E x), which is what the hardware has
LEAST = tl.constexpr(-1e30)  # below any score, and finite: a row that has seen nothing yet has no NaN
