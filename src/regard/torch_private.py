"""Every function of PyTorch that is not public, in one place. Each has a fallback made of public ones.

They are used because nothing public does the same as fast: many tensors in one kernel, weights laid out once for
oneDNN, a log-softmax in its argument's own memory.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]


def foreach_copy_(into: Tensors, sources: Tensors) -> None:
    """Copy each tensor into its counterpart."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(into, sources)
        return
    for own, new in zip(into, sources, strict=True):
        own.copy_(new)


def foreach_lerp_(into: Tensors, ends: Tensors, weight: float) -> None:
    """Move each tensor by this share of the way to its counterpart."""
    if hasattr(torch, "_foreach_lerp_"):
        torch._foreach_lerp_(into, ends, weight)
        return
    for own, end in zip(into, ends, strict=True):
        own.lerp_(end, weight)


def foreach_mul_(into: Tensors, factor: Tensor | float) -> None:
    """Multiply every tensor by one number."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(into, factor)
        return
    for own in into:
        own.mul_(factor)


def foreach_add_(into: Tensors, more: Tensors) -> None:
    """Add to each tensor its counterpart."""
    if hasattr(torch, "_foreach_add_"):
        torch._foreach_add_(into, more)
        return
    for own, added in zip(into, more, strict=True):
        own.add_(added)


def log_softmax_(logits: Tensor) -> Tensor:
    """log_softmax over the last axis, in the memory of the logits."""
    if hasattr(torch, "_log_softmax"):
        return torch._log_softmax(logits, -1, False, out=logits)
    return logits.copy_(logits.log_softmax(-1))


def version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where that is not known."""
    return getattr(tensor, "_version", None)


def has_vnni() -> bool:
    """Whether the processor sums products of 8-bit integers up in 32 bits (VNNI)."""
    known = getattr(torch.cpu, "_is_vnni_supported", None)
    return False if known is None else bool(known())


@cache
def can_prepack() -> bool:
    """Whether oneDNN can lay the weights of a linear layer out once (`prepack`, `prepacked_linear`)."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def prepack(weight: Tensor) -> Tensor:
    """[O, I] -> the same in oneDNN's own layout; as it is where that is impossible."""
    return torch.ops.mkldnn._reorder_linear_weight(weight) if can_prepack() else weight


def prepacked_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a weight from `prepack`."""
    if not can_prepack():
        return F.linear(x, packed, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
