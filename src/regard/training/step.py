"""One update of the weights: forward, backward, clip, optimiser, running average.

`TrainingStep` is the definition. `CapturedStep` does the same on a GPU: the step is captured once as a CUDA graph and
replayed for every batch, so that no kernel waits for Python. Both run the model as `accelerate` prepared it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import accelerate
from regard.devices import autocast
from regard.errors import first_line
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.recipes.schema import TrainingSettings
from regard.training.checkpoint import EMA
from regard.training.static_batch import StaticBatchShape

WARM = 3  # updates before the one that is captured: compilers and libraries have set themselves up by then


@dataclass(eq=False)
class TrainingStep:
    """Makes updates, and keeps what they showed on the device until it is asked for."""

    model: SequenceModel
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    settings: TrainingSettings
    device: torch.device

    def __post_init__(self) -> None:
        device = self.device
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # summed since it was last put to zero
        self.norm = torch.zeros((), device=device)  # of the last gradient
        # A loss that is not finite raises this flag on the device; the fused optimiser skips its updates while it is
        # up, and the host looks at it only every few steps, so no step waits for the device.
        self.nonfinite = torch.zeros((), device=device)
        self.nonfinite_step = torch.zeros((), dtype=torch.long, device=device)
        self.scalars = torch.zeros(3, device=device)  # one over the tokens, the learning rate, which step it is

    def __call__(self, batches: Sequence[SeqBatch], number: int, rate: float) -> int:
        """One step of the optimiser on the mean loss a target token over all the batches together: how many tokens."""
        tokens = sum(batch.num_targets for batch in batches)
        torch.manual_seed(self.settings.seed * 1_000_003 + number)  # dropout depends on seed and step alone
        self.model.train()
        self._upload_scalars(1 / max(tokens, 1), rate, number)
        for batch in batches:
            self._add(batch)
        self._apply()
        return tokens

    def _upload_scalars(self, share: float, rate: float, number: int) -> None:
        """The numbers of this update, to where the device finds them."""
        host = torch.tensor([share, rate, number], dtype=torch.float32)
        host = host.pin_memory() if self.device.type == "cuda" else host
        self.scalars.copy_(host, non_blocking=True)
        for group in self.optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):  # else it is one of the numbers, for a graph to read
                group["lr"] = rate

    def _add(self, batch: SeqBatch) -> None:
        """Add the gradient of a batch."""
        self._backward(batch.to(self.device))

    def _backward(self, batch: SeqBatch) -> None:
        with autocast(self.settings.precision, self.device):
            loss = self.model(batch, self.settings.label_smoothing, self.settings.r_drop)
        (loss * self.scalars[0]).backward()
        self.loss += loss.detach()

    def _apply(self) -> None:
        """Take the step that the gradients say, and forget them."""
        self._optimizer_step()
        self.optimizer.zero_grad(set_to_none=True)

    def _optimizer_step(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm or float("inf"))
        bad = ~(torch.isfinite(norm) & torch.isfinite(self.loss))
        self.nonfinite_step += self.scalars[2].long() * (bad & (self.nonfinite == 0))
        self.nonfinite.logical_or_(bad)
        self.norm.copy_(norm)
        self.optimizer.found_inf = self.nonfinite  # type: ignore[attr-defined]  # what the fused kernels look at
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model)


@dataclass(eq=False)
class CapturedStep(TrainingStep):
    """The same update, recorded once and played again. It takes batches of one `shape` only.

    The first few updates are made without recording. What is drawn at random depends on the seed and the step here as
    there: a generator's state is read anew whenever a graph is played.
    """

    shape: StaticBatchShape[Any]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.buffer = torch.zeros(self.shape.size, dtype=torch.uint8, device=self.device)
        self.stream = torch.cuda.Stream(self.device)
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self.bf16_weights = accelerate.bf16_context(self.model, self.settings, self.device)
        self.left = WARM  # updates before the one that is captured
        for group in self.optimizer.param_groups:
            group["capturable"] = True  # the number of steps is counted on the device
            group["lr"] = self.scalars[1]

    def __call__(self, batches: Sequence[SeqBatch], number: int, rate: float) -> int:
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)  # who puts the loss to zero, or weights in their place, does it before this
        with torch.cuda.stream(self.stream):
            if self.left == 0 and self.graphs is None:
                self._capture()
            self.left -= 1
            tokens = super().__call__(batches, number, rate)
        outside.wait_stream(self.stream)  # and who looks at the loss or the weights, after it
        return tokens

    def _add(self, batch: SeqBatch) -> None:
        self.buffer.copy_(self.shape.flatten(batch, pinned=True), non_blocking=True)
        if self.graphs:
            self.graphs[0].replay()
        else:
            self._backward(self.shape.unflatten(self.buffer))

    def _backward(self, batch: SeqBatch) -> None:
        with self.bf16_weights():
            super()._backward(batch)

    def _apply(self) -> None:
        if self.graphs:
            self.graphs[1].replay()
        else:
            self._optimizer_step()
            self._forget()

    def _forget(self) -> None:
        """Gradients of one batch are written over by the next; those of several are added up, and begin at zero."""
        self.optimizer.zero_grad(set_to_none=self.settings.accumulate == 1)

    def _capture(self) -> None:
        """Record an update; nothing of it happens before it is played."""
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._forget()
        try:
            with torch.cuda.graph(first, stream=self.stream):
                self._backward(self.shape.unflatten(self.buffer))
            with torch.cuda.graph(second, pool=first.pool(), stream=self.stream):
                self._optimizer_step()
                if self.settings.accumulate > 1:
                    self._forget()
        except RuntimeError as error:
            self.optimizer.zero_grad(set_to_none=True)  # what was recorded never happened: there is nothing in them
            self.say(f"the training step cannot be captured, and goes on without: {first_line(error)}")
        else:
            self.graphs = first, second


def make_step(
    model: SequenceModel,
    optimizer: torch.optim.Optimizer,
    ema: EMA | None,
    settings: TrainingSettings,
    device: torch.device,
    shape: StaticBatchShape[Any] | None = None,
    say: Callable[[str], None] = print,
) -> TrainingStep:
    """A step for batches of this shape; None: of any."""
    if shape is None:
        return TrainingStep(model, optimizer, ema, settings, device)
    return CapturedStep(model, optimizer, ema, settings, device, shape, say)
