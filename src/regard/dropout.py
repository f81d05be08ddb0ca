"""Dropout with cheap random bits.

One random number per feature of every token costs more than a norm. On a CPU, each draw of 64 bits serves four
elements. On a GPU, in compiled code and in `kernels.add_norm`, a mask is a hash of the element's index and of two seeds
drawn per call: a dozen integer operations, recomputed in the backward pass. Elsewhere it is PyTorch's dropout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# The finaliser of MurmurHash3 (Appleby 2011), in which every input bit affects all output bits; multipliers as int32.
FIRST, SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
STEPS = 2**16  # steps of the probability if 16 random bits decide about an element


def dropout(x: Tensor, share: float, training: bool) -> Tensor:
    """Zero each element of x with probability `share`, and divide the others by 1 - share."""
    if not training or share == 0:
        return x
    if torch.compiler.is_compiling():
        return torch.where(hashed(x.shape, share, new_seeds(x.device)), x / (1 - share), 0.0)
    if x.device.type != "cpu":
        return F.dropout(x, share)
    dropped = round(share * STEPS)
    # Despite its name, this computes x * mask * scale, and its gradient has the same form.
    return torch.ops.aten.native_dropout_backward(x, drawn(x.shape, dropped), STEPS / (STEPS - dropped))


def drawn(shape: torch.Size, dropped: int) -> Tensor:
    """A mask of this shape, False with probability `dropped` / 65,536, from PyTorch's CPU generator."""
    count = shape.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    return draws.view(torch.int16)[:count].ge(dropped - STEPS // 2).view(shape)


def new_seeds(device: torch.device) -> Tensor:
    """Draw two int32 seeds [2] for `hashed`."""
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)


def hashed(shape: torch.Size, share: float, seeds: Tensor) -> Tensor:
    """A mask of this shape, False with probability `share`: a hash of the index and two int32 seeds [2]."""
    bits = torch.arange(shape.numel(), dtype=torch.int32, device=seeds.device).view(shape)
    bits = _mixed(_mixed(bits ^ seeds[0]) ^ seeds[1])
    return bits >= limit(share)


def limit(share: float) -> int:
    """The smallest int32 hash at which an element is kept."""
    return round(share * 2**32) - 2**31


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 16)) * FIRST
    bits = (bits ^ _shifted(bits, 13)) * SECOND
    return bits ^ _shifted(bits, 16)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right; PyTorch's operator shifts arithmetically."""
    return (bits >> by) & ((1 << (32 - by)) - 1)
