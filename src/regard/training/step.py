"""One training step: forward, backward, clip, optimizer, moving average.

This is the definition. `parallel_step` divides it among several processes, and `captured_step` runs it as a CUDA graph.
All run the model as `accelerate` prepared it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.models import SequenceModel
from regard.packed import Batch
from regard.precision import autocast
from regard.recipes.schema import TrainingSettings
from regard.training.checkpoint import EMA


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The seed of the random numbers of a forward pass; it does not depend on the process that computes it.

    Micro-batches are never split between processes. With a seed for each of them, dropout is a function of the run's
    seed, the step and the micro-batch, for any number of processes. This costs seeding a generator once per
    micro-batch; PyTorch has no generator on a CPU that counts by position.

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

    def __post_init__(self) -> None:
        device = self.device
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # summed since the last reset
        self.norm = torch.zeros((), device=device)  # norm of the last gradient
        # A loss that is not finite sets this flag on the device. The fused optimizer skips its updates while it is set,
        # and the host reads it only every few steps, so that no step waits for the device.
        self.nonfinite = torch.zeros((), dtype=torch.float32, device=device)
        self.nonfinite_step = torch.zeros((), dtype=torch.long, device=device)
        self.scalars = torch.zeros(3, device=device)  # weight of the loss, learning rate, step

    def __call__(self, batches: Mapping[int, Batch], step: int, rate: float, idle: Sequence[Batch] = ()) -> int:
        """Take one optimizer step on the mean loss per target of a step's batch; return its number of targets.

        `batches` are this process's micro-batches by their index in the step's batch, `idle` those it passes with
        weight 0 (see `BatchShare`; one process alone has none).
        """
        targets = self._count_targets(batches.values())
        if not self.model.training:  # it visits all modules
            self.model.train()
        self._upload_scalars(1 / max(targets, 1), rate, step)
        self._run_passes(batches, idle, step)
        self._update()
        return targets

    def _count_targets(self, batches: Iterable[Batch]) -> int:
        """The number of targets in a step's batch: what its summed loss is divided by."""
        return sum(batch.num_targets for batch in batches)

    def _upload_scalars(self, weight: float, rate: float, step: int) -> None:
        """Copy the numbers of this step to the device, where a captured graph reads them."""
        host = torch.tensor([weight, rate, step], dtype=torch.float32)
        host = host.pin_memory() if self.device.type == "cuda" else host
        self.scalars.copy_(host, non_blocking=True)
        for group in self.optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):  # a tensor is one of the scalars above
                group["lr"] = rate

    def _run_passes(self, batches: Mapping[int, Batch], idle: Sequence[Batch], step: int) -> None:
        """Add up the gradients of the micro-batches."""
        for index, batch in batches.items():
            torch.manual_seed(dropout_seed(self.settings.seed, step, index))
            self._accumulate(batch)

    def _accumulate(self, batch: Batch) -> None:
        """Add the gradient of a micro-batch."""
        self._backward(batch.to(self.device))

    def _backward(self, batch: Batch) -> None:
        with autocast(self.settings.precision, self.device):
            loss = self._forward(batch)
        self._weighted(loss).backward()
        self.loss += loss.detach()

    def _weighted(self, loss: Tensor) -> Tensor:
        """The mean loss per target, whose gradient is computed."""
        return loss * self.scalars[0]

    def _forward(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(batch, self.settings.label_smoothing, self.settings.r_drop)
        return loss

    def _update(self) -> None:
        """Update the weights by the gradients, and clear these."""
        self._optimizer_step()
        self._clear_grads()

    def _clear_grads(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self._keeps_grads)

    @property
    def _keeps_grads(self) -> bool:
        """Whether gradients are zeroed between steps, not removed."""
        return False

    def _optimizer_step(self) -> None:
        norm = self._clip()
        bad = self._any(~(torch.isfinite(norm) & torch.isfinite(self.loss)))
        self.nonfinite_step += self.scalars[2].long() * (bad & (self.nonfinite == 0))
        self.nonfinite.logical_or_(bad)
        self.norm.copy_(norm)
        self.optimizer.found_inf = self.nonfinite  # type: ignore[attr-defined]  # read by the fused kernels
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model)

    def _clip(self) -> Tensor:
        """Clip the gradient; return its norm before."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm or float("inf"))

    def _any(self, flag: Tensor) -> Tensor:
        """Whether a flag is set in any process: there is one."""
        return flag
