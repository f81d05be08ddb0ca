"""Kernels of our own for GPUs, written in Triton. Each has a slow twin in PyTorch, which says what it computes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from regard.errors import first_line


def available() -> bool:
    """Whether they work here: whether there is a GPU, Triton, and what Triton needs to start a kernel on it.

    Inside a compiler they do: its own kernels are made by Triton, too.
    """
    return torch.compiler.is_compiling() or why_not() is None


def supports(x: Tensor) -> bool:
    """Whether they work here for such a tensor: it is on a GPU, and no more exact than they compute."""
    return x.is_cuda and x.dtype != torch.float64 and available()


@cache
def why_not() -> str | None:
    """Why they do not work here, in a line."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    try:
        from regard.kernels.probe import run_probe

        return None if run_probe() else "a trial kernel did not do what it should"
    except Exception as error:  # whatever Triton, its compiler or a C compiler throws
        return first_line(error)
