"""Kernels of our own for GPUs, written in Triton. Each has a slow twin in PyTorch, which says what it computes."""

from __future__ import annotations

from functools import cache

import torch


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether they work here: whether there is a GPU, Triton, and what Triton needs to start a kernel on it."""
    return _tried()


@cache
def _tried() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        from regard.gpu.trial import trial

        return trial()
    except Exception:  # whatever Triton, its compiler or a C compiler throws
        return False
