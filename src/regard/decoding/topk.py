"""Top-k and normalisation over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard import kernels, taps, torch_private

GROUP = 64  # columns per group in the first stage of `topk`
MIN_RATIO = 8  # vocabulary size / k from which on `stable_topk` selects instead of sorting


def _triton() -> Any:
    from regard.kernels import topk  # Triton can be imported on GPUs only

    return topk


def log_sum(values: Tensor) -> Tensor:
    """log(sum(exp(v))) of each row [..., V], in float32."""
    if kernels.supports(values):
        return _triton().logsumexp(values)
    return values.float().logsumexp(-1)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-softmax over the last dimension; in place on a CPU (new memory costs a third more) unless a tap listens."""
    if not logits.is_cpu or not logits.is_contiguous() or taps.has_listeners():
        return functional.log_softmax(logits, -1)
    return torch_private.log_softmax_(logits)


def topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest values of each row [..., V] in descending order, and their indices: [..., min(count, V)].

    Long rows take two stages: the groups of columns with the `count` greatest maxima contain the `count` greatest
    values. On a GPU it is a Triton kernel.
    """
    size = values.shape[-1]
    if size <= 2 * (count + 1) * GROUP:
        top = values.topk(min(count, size))
        return top.values, top.indices
    if kernels.supports(values) and count <= _triton().MAX_COUNT:
        best, index = _triton().topk(values, count)
        return best.to(values.dtype), index
    whole = size // GROUP * GROUP
    groups = values[..., :whole].unflatten(-1, (-1, GROUP)).amax(-1).topk(count).indices
    within = torch.arange(GROUP, device=values.device)
    columns = (groups[..., None] * GROUP + within).flatten(-2)
    rest = torch.arange(whole, size, device=values.device).expand(*columns.shape[:-1], -1)
    columns = torch.cat([columns, rest], -1)
    top = values.gather(-1, columns).topk(count)
    return top.values, columns.gather(-1, top.indices)


def stable_topk(values: Tensor, count: int) -> Tensor:
    """Indices [..., count] of the `count` greatest values of each row [..., V], as a stable descending sort gives them.

    Of equal values the leftmost comes first, which `topk` does not guarantee. Sorting a whole vocabulary on a CPU takes
    longer than a step of many models. Instead, value and index are packed into the upper and lower half of an integer,
    so that no two are equal, and the greatest integers are selected.
    """
    size = values.shape[-1]
    if not selects(values, count):
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0, which it equals
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # the bits of negative floats are in reverse order
    best = ((ordered << 32) | torch.arange(size - 1, -1, -1)).topk(count).values  # for integers faster than two stages
    return size - 1 - (best & 0xFFFFFFFF)


def selects(values: Tensor, count: int) -> bool:
    """Return whether `stable_topk` selects, which is faster than sorting."""
    return values.is_cpu and values.dtype == torch.float32 and MIN_RATIO * count <= values.shape[-1]
