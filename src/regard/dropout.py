"""Dropout, and random bits that cost next to nothing.

Random numbers for every feature of every token cost more than the norms between them. On a CPU one draw of 64 bits
serves four of them. On a GPU, in a compiled step and in the kernel of a residual sum (`gpu.norm`), the place and two
numbers drawn for the call are hashed: a dozen integer operations among others, forward and backward. Elsewhere it is
PyTorch's own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Murmur3's last mixing step (Appleby 2011), which spreads every bit of its input over all bits of its output; the
# multipliers are written as the signed integers that have the same bits.
FIRST, SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
STEPS = 2**16  # of the probability, where 16 random bits decide over a number


def dropout(x: Tensor, share: float, training: bool) -> Tensor:
    """Each number of x put to zero with this probability, and the others divided by what remains of one."""
    if not training or share == 0:
        return x
    if torch.compiler.is_compiling():
        return torch.where(hashed(x.shape, share, new_seeds(x.device)), x / (1 - share), 0.0)
    if x.device.type != "cpu":
        return F.dropout(x, share)
    dropped = round(share * STEPS)
    # Despite its name this is x * kept * scale; its own gradient is the same of what comes from above.
    return torch.ops.aten.native_dropout_backward(x, drawn(x.shape, dropped), STEPS / (STEPS - dropped))


def drawn(shape: torch.Size, dropped: int) -> Tensor:
    """Booleans of this shape, each False in `dropped` of 65,536 cases, from PyTorch's generator for the CPU."""
    count = shape.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    return draws.view(torch.int16)[:count].ge(dropped - STEPS // 2).view(shape)


def new_seeds(device: torch.device) -> Tensor:
    """Two numbers, drawn, for `hashed`."""
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)


def hashed(shape: torch.Size, share: float, seeds: Tensor) -> Tensor:
    """Booleans that are False with probability `share`, from two seeds [2] of int32."""
    bits = torch.arange(shape.numel(), dtype=torch.int32, device=seeds.device).view(shape)
    bits = _mixed(_mixed(bits ^ seeds[0]) ^ seeds[1])
    return bits >= limit(share)


def limit(share: float) -> int:
    """From which hash, an int32, on a number is kept where this share is dropped."""
    return round(share * 2**32) - 2**31


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 16)) * FIRST
    bits = (bits ^ _shifted(bits, 13)) * SECOND
    return bits ^ _shifted(bits, 16)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left; PyTorch's own shift repeats the sign."""
    return (bits >> by) & ((1 << (32 - by)) - 1)
