"""The training step as a CUDA graph: captured once and replayed for every batch, so that no kernel waits for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard import accelerate
from regard.errors import first_line
from regard.models import SequenceModel
from regard.packed import Batch
from regard.recipes.schema import TrainingSettings
from regard.training.checkpoint import EMA
from regard.training.static_batch import StaticBatchShape
from regard.training.step import TrainingStep

WARMUP_STEPS = 3  # steps before the one that is captured, in which compilers and libraries initialise themselves


@dataclass(eq=False)
class CapturedTrainingStep(TrainingStep):
    """A `TrainingStep` for batches of one `shape`.

    The first few steps run uncaptured. Random numbers depend on the seed, the step and the micro-batch here too: a
    replay reads the generator's state anew.
    """

    shape: StaticBatchShape[Any]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.buffer = torch.zeros(self.shape.size, dtype=torch.uint8, device=self.device)
        self.stream = torch.cuda.Stream(self.device)
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self.bf16_weights = accelerate.bf16_context(self.model, self.settings, self.device)
        # FSDP allocates and frees gathered weights in every step, which a graph cannot: such steps are only compiled.
        self.steps_to_capture = WARMUP_STEPS if self.parallel is None else -1
        for group in self.optimizer.param_groups:
            group["capturable"] = True  # the optimizer counts its steps on the device
            group["lr"] = self.scalars[1]

    def __call__(self, batches: Mapping[int, Batch], step: int, rate: float, idle: Sequence[Batch] = ()) -> int:
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)  # resets of the loss and loaded weights come first
        with torch.cuda.stream(self.stream):
            if self.steps_to_capture == 0 and self.graphs is None:
                self._capture()
            self.steps_to_capture -= 1
            targets = super().__call__(batches, step, rate, idle)
        outside.wait_stream(self.stream)  # readers of the loss and of the weights come after
        return targets

    def _accumulate(self, batch: Batch) -> None:
        self.buffer.copy_(self.shape.flatten(batch, pinned=True), non_blocking=True)
        if self.graphs:
            self.graphs[0].replay()
        else:
            self._backward(self.shape.unflatten(self.buffer))

    def _backward(self, batch: Batch) -> None:
        with self.bf16_weights():
            super()._backward(batch)

    def _update(self) -> None:
        if self.graphs:
            self.graphs[1].replay()
        else:
            self._optimizer_step()
            self._clear_grads()

    def _clear_grads(self) -> None:
        """The gradients of one batch are overwritten by the next; those of several are summed, and start at zero."""
        self.optimizer.zero_grad(set_to_none=self.settings.accumulate == 1)

    def _capture(self) -> None:
        """Capture a step, which does not run before it is replayed."""
        backward, update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._clear_grads()
        try:
            with torch.cuda.graph(backward, stream=self.stream):
                self._backward(self.shape.unflatten(self.buffer))
            with torch.cuda.graph(update, pool=backward.pool(), stream=self.stream):
                self._optimizer_step()
                if self.settings.accumulate > 1:
                    self._clear_grads()
        except RuntimeError as error:
            self.optimizer.zero_grad(set_to_none=True)  # captured gradients hold no values
            self.say(f"the training step cannot be captured, and goes on without: {first_line(error)}")
        else:
            self.graphs = backward, update


def make_step(
    model: SequenceModel,
    optimizer: torch.optim.Optimizer,
    ema: EMA | None,
    settings: TrainingSettings,
    device: torch.device,
    shape: StaticBatchShape[Any] | None = None,
    say: Callable[[str], None] = print,
    parallel: accelerate.DataParallel | None = None,
) -> TrainingStep:
    """A captured step for batches of one shape; without a shape, a plain step for any batches."""
    if shape is None:
        return TrainingStep(model, optimizer, ema, settings, device, parallel)
    return CapturedTrainingStep(model, optimizer, ema, settings, device, parallel, shape, say)
