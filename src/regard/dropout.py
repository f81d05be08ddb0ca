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
MULTIPLIER_1, MULTIPLIER_2 = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
LEVELS = 2**16  # values of the 16 random bits that decide about an element


def dropout(x: Tensor, share: float, training: bool) -> Tensor:
    """Zero each element of x with probability `share`, and divide the others by 1 - share."""
    if not training or share == 0:
        return x
    if torch.compiler.is_compiling():
        return torch.where(hash_mask(x.shape, share, new_seeds(x.device)), x / (1 - share), 0.0)
    if x.device.type != "cpu":
        return F.dropout(x, share)
    dropped = round(share * LEVELS)
    # Despite its name, this computes x * mask * scale, and its gradient has the same form.
    return torch.ops.aten.native_dropout_backward(x, random_mask(x.shape, dropped), LEVELS / (LEVELS - dropped))


def random_mask(shape: torch.Size, dropped: int) -> Tensor:
    """A mask of this shape, False with probability `dropped` / 65,536, from PyTorch's CPU generator."""
    count = shape.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    return draws.view(torch.int16)[:count].ge(dropped - LEVELS // 2).view(shape)


def new_seeds(device: torch.device) -> Tensor:
    """Draw two int32 seeds [2] for `hash_mask`."""
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)


def hash_mask(shape: torch.Size, share: float, seeds: Tensor) -> Tensor:
    """A mask of this shape, False with probability `share`: a hash of the index and two int32 seeds [2]."""
    bits = torch.arange(shape.numel(), dtype=torch.int32, device=seeds.device).view(shape)
    bits = _mix(_mix(bits ^ seeds[0]) ^ seeds[1])
    return bits >= hash_limit(share)


def hash_limit(share: float) -> int:
    """The smallest int32 hash at which an element is kept."""
    return round(share * 2**32) - 2**31


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 16)) * MULTIPLIER_1
    bits = (bits ^ _shift_right(bits, 13)) * MULTIPLIER_2
    return bits ^ _shift_right(bits, 16)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right; PyTorch's operator shifts arithmetically."""
    return (bits >> by) & ((1 << (32 - by)) - 1)
