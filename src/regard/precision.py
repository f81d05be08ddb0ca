"""Precision of computations: of training under autocast, and of decoding."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from regard.errors import UserError

DECODING = ("auto", "fp32", "bf16", "int8")


def decoding_precision(requested: str, trained: str, device: torch.device) -> str:
    """The precision for decoding on a device: fp32, bf16 (GPU) or int8 (CPU).

    auto: fp32 on a CPU; on a GPU, the precision of training.
    """
    if requested not in DECODING:
        raise UserError(f"no precision {requested!r}: there are {', '.join(DECODING)}")
    gpu = device.type == "cuda"
    if requested == "auto":
        return "bf16" if gpu and trained != "fp32" else "fp32"
    if requested == "int8" and gpu:
        raise UserError("int8 is for CPUs: use it with --device cpu")
    if requested == "bf16" and not gpu:
        raise UserError("bf16 is for GPUs, where it is quicker: leave --precision out, or use int8")
    return requested


def in_bf16(precision: str, device: torch.device) -> bool:
    """Return whether matmuls are in bf16; auto: on a GPU they are, on a CPU not."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matmuls run in this precision. Weights stay in fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if in_bf16(precision, device) else nullcontext()


def matrix_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matmul with x in the current autocast context."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
