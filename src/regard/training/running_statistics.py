"""Running statistics of batch norm over the micro-batches of several processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard import distributed
from regard.nn.norms import BatchNorm


class RunningStatistics:
    """Keeps running statistics equal in all processes, and equal to those of one process.

    One process moves them for each of n micro-batches, r <- (1 - m) r + m s_k. That is (1 - m)^n r plus the sum over k
    of (1 - m)^(n - 1 - k) m s_k, of which each process knows the terms of its own micro-batches.
    """

    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
        several = distributed.world_size() > 1
        self._buffers = [(b, n.momentum) for n in norms for b in (n.running_mean, n.running_variance)] * several
        self._count = micro_batches

    @torch.no_grad()
    def start(self) -> None:
        """Begin a step."""
        self._before = [buffer.clone() for buffer, _ in self._buffers]
        self._terms: list[Tensor] = [torch.zeros_like(buffer) for buffer, _ in self._buffers]

    @contextmanager
    def micro_batch(self, index: int | None) -> Iterator[None]:
        """A forward pass of a micro-batch by its index in the step's batch; None: one that another process counts."""
        for buffer, _ in self._buffers:
            buffer.zero_()
        yield
        for (buffer, momentum), term in zip(self._buffers, self._terms, strict=True):
            if index is not None:
                term.add_(buffer, alpha=(1 - momentum) ** (self._count - 1 - index))

    @torch.no_grad()
    def finish(self) -> None:
        """End a step."""
        for (buffer, momentum), before, term in zip(self._buffers, self._before, self._terms, strict=True):
            dist.all_reduce(term)
            buffer.copy_(before * (1 - momentum) ** self._count + term)
