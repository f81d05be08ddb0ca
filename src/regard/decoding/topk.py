"""Top-k and normalisation over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from regard import kernels, taps, torch_private

GROUP = 64  # columns of which the greatest is found first
FEWER = 8  # times as long is a row whose likeliest are found quicker than it is sorted


def log_sum(values: Tensor) -> Tensor:
    """log(sum(exp(v))) of each row [..., V], in float32."""
    if kernels.supports(values):
        from regard.kernels import topk

        return topk.logsumexp(values)
    return values.float().logsumexp(-1)


def log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension. On a CPU in place, where new memory costs a third more, unless a tap listens."""
    if not logits.is_cpu or not logits.is_contiguous() or taps.has_listeners():
        return functional.log_softmax(logits, -1)
    return torch_private.log_softmax_(logits)


def topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest of each row [..., V], greatest first, and where they stand: values and indices [..., count].

    Of a long row it first finds the greatest of every group, for the groups that hold the `count` greatest are among
    the `count` groups with the greatest maximum. Of a short row there are V at most. On a GPU
    it is a kernel of our own.
    """
    size = values.shape[-1]
    if size <= 2 * (count + 1) * GROUP:
        found = values.topk(min(count, size))
        return found.values, found.indices
    if kernels.supports(values):
        from regard.kernels import topk

        if count <= topk.MOST:
            best, where = topk.topk(values, count)
            return best.to(values.dtype), where
    whole = size // GROUP * GROUP
    groups = values[..., :whole].unflatten(-1, (-1, GROUP)).amax(-1).topk(count).indices
    within = torch.arange(GROUP, device=values.device)
    columns = (groups[..., None] * GROUP + within).flatten(-2)
    rest = torch.arange(whole, size, device=values.device).expand(*columns.shape[:-1], -1)
    columns = torch.cat([columns, rest], -1)
    found = values.gather(-1, columns).topk(count)
    return found.values, columns.gather(-1, found.indices)


def stable_topk(values: Tensor, count: int) -> Tensor:
    """Where the `count` greatest of each row [..., V] stand, [..., count], as a stable sort puts them.

    Of equals the one further left comes first, which `topk` does not promise. On a CPU sorting a whole vocabulary
    takes longer than many a model's step. There they are the greatest of whole numbers that hold the value in their
    upper half and the place in their lower, no two of which are equal.
    """
    size = values.shape[-1]
    if not selects(values, count):
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0, which it equals
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # of negative numbers the greater have the smaller bits
    best = ((ordered << 32) | torch.arange(size - 1, -1, -1)).topk(count).values  # of whole numbers quicker than groups
    return size - 1 - (best & 0xFFFFFFFF)


def selects(values: Tensor, count: int) -> bool:
    """Whether `stable_topk` selects, which is quicker than to sort."""
    return values.is_cpu and values.dtype == torch.float32 and FEWER * count <= values.shape[-1]
