"""A minimal kernel, to test whether kernels work here: Triton needs a C compiler and Python's headers."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _probe_kernel(x):
    tl.store(x, 1.0)


def run_probe() -> bool:
    x = torch.zeros(1, device="cuda")
    _probe_kernel[(1,)](x)
    return x.item() == 1.0
