"""The training step of several processes: each computes its share of the step's batch, and all take the same update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from regard import distributed, torch_private
from regard.accelerate import DataParallel
from regard.packed import Batch
from regard.sharding import is_sharded, local
from regard.training.running_statistics import RunningStatistics
from regard.training.step import TrainingStep, dropout_seed


def clip_parts(grads: list[Tensor], max_norm: float) -> Tensor:
    """Clip a gradient of which each process has a part; return its norm before.

    The same as `clip_grad_norm_` of DTensors, which costs the host more time.
    """
    total = get_total_norm(grads).double().square()
    dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm:
        torch_private.foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(grads[0].dtype))
    return norm


@dataclass(eq=False)
class ParallelTrainingStep(TrainingStep):
    """A `TrainingStep` of which every process does a part; with one process, the same as that."""

    parallel: DataParallel | None  # None: there is one process

    def __post_init__(self) -> None:
        super().__post_init__()
        self.statistics = RunningStatistics(self.model, self.settings.accumulate)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._sharded = any(map(is_sharded, self._trained))

    def _count_targets(self, batches: Iterable[Batch]) -> int:
        """The number of targets in a step's batch, over all processes."""
        return int(distributed.all_sum(super()._count_targets(batches)))

    def _run_passes(self, batches: Mapping[int, Batch], idle: Sequence[Batch], step: int) -> None:
        self.statistics.start()
        for number, (index, batch) in enumerate(batches.items(), 1):
            torch.manual_seed(dropout_seed(self.settings.seed, step, index))
            with self.statistics.micro_batch(index), self._accumulating(number == len(batches) and not idle):
                self._accumulate(batch)
        self._pass_idly(idle)
        self.statistics.finish()

    def _pass_idly(self, idle: Sequence[Batch]) -> None:
        """Take part in the collective operations of other processes: add gradients of zero, and no loss."""
        if not idle:
            return
        loss = self.loss.clone()
        self.scalars[0] = 0.0
        for number, batch in enumerate(idle, 1):
            with self.statistics.micro_batch(None), self._accumulating(number == len(idle)):
                self._accumulate(batch)
        self.loss.copy_(loss)

    def _accumulating(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.parallel is None else self.parallel.accumulating(last)

    def _forward(self, batch: Batch) -> Tensor:
        if self.parallel is None:
            return super()._forward(batch)
        return self.parallel(batch, self.settings.label_smoothing, self.settings.r_drop)

    @torch.no_grad()
    def _clip(self) -> Tensor:
        if not self._sharded:
            return super()._clip()
        return clip_parts([local(p.grad) for p in self._trained if p.grad is not None], self.settings.max_grad_norm)

    @property
    def _keeps_grads(self) -> bool:
        return self.parallel is not None and self.parallel.static_grads

    def _any(self, flag: Tensor) -> Tensor:
        return distributed.any_(flag)
