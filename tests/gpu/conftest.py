"""Where there is no GPU, kernels are interpreted on the CPU: slow, but line by line what a GPU would do."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
