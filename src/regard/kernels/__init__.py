"""Triton kernels for GPUs. Each has a definition in PyTorch, with which the tests compare it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from regard.errors import first_line

_simulated = False  # not a ContextVar, which torch.compile cannot trace


@contextmanager
def simulated() -> Iterator[None]:
    """Choose the kernels for every tensor while the context lasts, as on a GPU.

    For fake tensors, which have shapes and no data: `regard.planning` runs a training step on them.
    """
    global _simulated
    before, _simulated = _simulated, True
    try:
        yield
    finally:
        _simulated = before


def available() -> bool:
    """Return whether the kernels work here: they need a GPU, Triton, and what Triton needs to launch a kernel.

    True inside a compiler, whose own kernels are written in Triton, too.
    """
    return torch.compiler.is_compiling() or _simulated or why_not() is None


def supports(x: Tensor) -> bool:
    """Return whether the kernels work for this tensor: on a GPU, and not in float64."""
    return (x.is_cuda or _simulated) and x.dtype != torch.float64 and available()


@cache
def why_not() -> str | None:
    """Why the kernels do not work here, in one line; None if they do."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    try:
        from regard.kernels.probe import run_probe

        return None if run_probe() else "a test kernel returned a wrong result"
    except Exception as error:  # Triton, its compiler and the C compiler raise many kinds
        return first_line(error)
