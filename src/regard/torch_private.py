"""All private PyTorch functions that the package uses, each with a fallback made of public ones.

They are used because no public function is as fast: operations on many tensors in one kernel, weights packed once for
oneDNN, an in-place log-softmax, a matmul that ends with a ReLU.
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
    for target, new in zip(into, sources, strict=True):
        target.copy_(new)


def foreach_lerp_(into: Tensors, ends: Tensors, weight: float) -> None:
    """Interpolate each tensor in place towards its counterpart."""
    if hasattr(torch, "_foreach_lerp_"):
        torch._foreach_lerp_(into, ends, weight)
        return
    for target, end in zip(into, ends, strict=True):
        target.lerp_(end, weight)


def foreach_mul_(into: Tensors, factor: Tensor | float) -> None:
    """Multiply every tensor by one factor in place."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(into, factor)
        return
    for target in into:
        target.mul_(factor)


def foreach_add_(into: Tensors, more: Tensors) -> None:
    """Add to each tensor its counterpart in place."""
    if hasattr(torch, "_foreach_add_"):
        torch._foreach_add_(into, more)
        return
    for target, added in zip(into, more, strict=True):
        target.add_(added)


def log_softmax_(logits: Tensor) -> Tensor:
    """In-place log_softmax over the last axis."""
    if hasattr(torch, "_log_softmax"):
        return torch._log_softmax(logits, -1, False, out=logits)
    return logits.copy_(logits.log_softmax(-1))


def addmm_relu(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """relu(bias + x weight) for x [T, D] and weight [D, F]; on a GPU the ReLU is part of the matmul."""
    if hasattr(torch, "_addmm_activation"):
        return torch._addmm_activation(bias, x, weight)
    return torch.addmm(bias, x, weight).relu_()


def version(tensor: Tensor) -> int | None:
    """The number of in-place changes of a tensor; None if unknown."""
    return getattr(tensor, "_version", None)


def has_vnni() -> bool:
    """Return whether the processor has VNNI instructions (products of 8-bit integers, summed in 32 bits)."""
    known = getattr(torch.cpu, "_is_vnni_supported", None)
    return False if known is None else bool(known())


@cache
def can_prepack() -> bool:
    """Return whether oneDNN can pack the weights of a linear layer (`prepack`, `prepacked_linear`)."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def prepack(weight: Tensor) -> Tensor:
    """A weight [O, I] in oneDNN's layout; unchanged if that is not available."""
    return torch.ops.mkldnn._reorder_linear_weight(weight) if can_prepack() else weight


def prepacked_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a weight from `prepack`."""
    if not can_prepack():
        return F.linear(x, packed, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
