"""Kernels of our own for GPUs, written in Triton. Each has a slow twin in PyTorch, which says what it computes."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

# Whether there is Triton, and a C compiler, with which it makes what starts its kernels.
AVAILABLE = find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))
