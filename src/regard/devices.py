"""Which device to compute on, and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from regard.errors import UserError


def pick(name: str = "auto") -> torch.device:
    """auto: a GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"no device {name!r}: try auto, cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"no device {name!r}: try auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"device {name} was asked for, but this PyTorch sees {count or 'no'} GPU{'s' * (count != 1)}")
    return device


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Where matrix products run: auto is bf16 on a GPU and fp32 on a CPU. Weights stay fp32 either way."""
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()
