"""A few of many: the candidates that can matter in a vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from regard import gpu

GROUP = 64  # columns of which the greatest is found first


def log_sum(values: Tensor) -> Tensor:
    """log(sum(exp(v))) of each row [..., V], in float32."""
    if gpu.takes(values):
        from regard.gpu import candidates

        return candidates.log_sum(values)
    return values.float().logsumexp(-1)


def greatest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest of each row [..., V], greatest first, and where they stand: values and indices [..., count].

    As `topk` gives them, but of a long row it first finds the greatest of every group: the groups that the `count`
    greatest are in are among the `count` groups with the greatest maximum. Of a short row there are V at most. On a GPU
    it is a kernel of our own.
    """
    size = values.shape[-1]
    if size <= 2 * (count + 1) * GROUP:
        found = values.topk(min(count, size))
        return found.values, found.indices
    if gpu.takes(values):
        from regard.gpu import candidates

        if count <= candidates.MOST:
            best, where = candidates.greatest(values, count)
            return best.to(values.dtype), where
    whole = size // GROUP * GROUP
    groups = values[..., :whole].unflatten(-1, (-1, GROUP)).amax(-1).topk(count).indices
    within = torch.arange(GROUP, device=values.device)
    columns = (groups[..., None] * GROUP + within).flatten(-2)
    rest = torch.arange(whole, size, device=values.device).expand(*columns.shape[:-1], -1)
    columns = torch.cat([columns, rest], -1)
    found = values.gather(-1, columns).topk(count)
    return found.values, columns.gather(-1, found.indices)
