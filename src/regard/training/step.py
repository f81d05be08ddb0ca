"""One training step: forward, backward, clip, optimizer, moving average.

This is the definition; `captured_step` does the same as a CUDA graph. Both run the model as `accelerate` prepared it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard import distributed
from regard.accelerate import DataParallel
from regard.devices import autocast
from regard.models import SequenceModel
from regard.packed import Batch
from regard.recipes.schema import TrainingSettings
from regard.sharding import whole
from regard.training.checkpoint import EMA
from regard.training.running_statistics import RunningStatistics


def global_targets(batches: Iterable[Batch]) -> int:
    """The number of targets in a step's batch, over all processes: what its summed loss is divided by."""
    return int(distributed.all_sum(sum(batch.num_targets for batch in batches)))


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The seed of what is drawn in a forward pass, whichever process computes it.

    Micro-batches are never split between processes, so that a seed for each of them makes dropout a function of seed,
    step and position in the step's batch, for any number of processes and in every layer, at the cost of seeding a
    generator once per micro-batch. Counters by position would need a generator of our own on a CPU.

    >>> len({dropout_seed(0, 1, 0), dropout_seed(1, 0, 0), dropout_seed(0, 0, 1), dropout_seed(0, 0, 0)})
    4
    """
    return int(np.random.SeedSequence((seed, step, micro_batch)).generate_state(1, np.uint64)[0])


@dataclass(eq=False)
class TrainingStep:
    """Updates the weights, and keeps loss and gradient norm on the device until they are read."""

    model: SequenceModel
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    settings: TrainingSettings
    device: torch.device
    parallel: DataParallel | None  # None: gradients are summed, if there are several processes, after the backward pass

    def __post_init__(self) -> None:
        device = self.device
        self.statistics = RunningStatistics(self.model, self.settings.accumulate)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # this process's, summed since the last reset
        self.norm = torch.zeros((), device=device)  # of the last gradient
        # A loss that is not finite sets this flag on the device. The fused optimizer skips its updates while it is set,
        # and the host reads it only every few steps, so that no step waits for the device.
        self.nonfinite = torch.zeros((), dtype=torch.float32, device=device)
        self.nonfinite_step = torch.zeros((), dtype=torch.long, device=device)
        self.scalars = torch.zeros(3, device=device)  # 1 / targets, learning rate, step

    def __call__(self, batches: Mapping[int, Batch], step: int, rate: float, idle: Sequence[Batch] = ()) -> int:
        """Take one optimizer step on the mean loss per target of a step's batch; return its number of targets.

        `batches` are this process's micro-batches by their index in the step's batch, `idle` those it passes with
        weight 0 (see `BatchShare`).
        """
        targets = global_targets(batches.values())
        self.model.train()
        self._upload_scalars(self._grad_divisor / max(targets, 1), rate, step)
        self.statistics.start()
        for number, (index, batch) in enumerate(batches.items(), 1):
            torch.manual_seed(dropout_seed(self.settings.seed, step, index))
            with self.statistics.micro_batch(index), self._accumulating(number == len(batches) and not idle):
                self._accumulate(batch)
        self._pass_idly(idle)
        self.statistics.finish()
        self._update()
        return targets

    @property
    def _grad_divisor(self) -> int:
        return 1 if self.parallel is None else self.parallel.grad_divisor

    def _accumulating(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.parallel is None else self.parallel.accumulating(last)

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

    def _upload_scalars(self, per_target: float, rate: float, step: int) -> None:
        """Copy the numbers of this step to the device, where a captured graph reads them."""
        host = torch.tensor([per_target, rate, step], dtype=torch.float32)
        host = host.pin_memory() if self.device.type == "cuda" else host
        self.scalars.copy_(host, non_blocking=True)
        for group in self.optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):  # a tensor is one of the scalars above
                group["lr"] = rate

    def _accumulate(self, batch: Batch) -> None:
        """Add the gradient of a micro-batch."""
        self._backward(batch.to(self.device))

    def _backward(self, batch: Batch) -> None:
        with autocast(self.settings.precision, self.device):
            call = self.model if self.parallel is None else self.parallel
            loss = call(batch, self.settings.label_smoothing, self.settings.r_drop)
        (loss * self.scalars[0]).backward()
        self.loss += loss.detach()

    def _update(self) -> None:
        """Update the weights by the gradients, and clear these."""
        self._optimizer_step()
        self.optimizer.zero_grad(set_to_none=True)

    def _optimizer_step(self) -> None:
        if self.parallel is None:
            distributed.sum_grads(self.model.parameters())
        norm = self._clip()
        bad = distributed.any_(~(torch.isfinite(norm) & torch.isfinite(self.loss)))
        self.nonfinite_step += self.scalars[2].long() * (bad & (self.nonfinite == 0))
        self.nonfinite.logical_or_(bad)
        self.norm.copy_(norm)
        self.optimizer.found_inf = self.nonfinite  # type: ignore[attr-defined]  # read by the fused kernels
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model)

    def _clip(self) -> Tensor:
        """Clip the gradient; return its norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm or float("inf"))
        return whole(norm)
