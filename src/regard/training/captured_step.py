"""The training step as a CUDA graph: captured once and replayed for every batch, so that no kernel waits for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from regard import accelerate, distributed
from regard.errors import UserError, first_line
from regard.models import SequenceModel
from regard.packed import Batch
from regard.recipes.schema import TrainingSettings
from regard.training.checkpoint import EMA
from regard.training.parallel_step import ParallelTrainingStep
from regard.training.static_batch import StaticBatchShape
from regard.training.step import TrainingStep

WARMUP_STEPS = 3  # steps before the one that is captured, in which compilers and libraries initialise themselves


@dataclass(frozen=True)
class StepGraphs:
    """The parts of a captured step. The last pass of several processes sums their gradients too."""

    last_pass: torch.cuda.CUDAGraph
    other_pass: torch.cuda.CUDAGraph
    update: torch.cuda.CUDAGraph


@dataclass(eq=False)
class CapturedTrainingStep(ParallelTrainingStep):
    """A step for batches of one `shape`.

    The first few steps run uncaptured. Random numbers depend on the seed, the step and the micro-batch here too: a
    replay reads the generator's current state.
    """

    shape: StaticBatchShape[Any]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.buffer = torch.zeros(self.shape.size, dtype=torch.uint8, device=self.device)
        self.stream = torch.cuda.Stream(self.device)
        self.graphs: StepGraphs | None = None
        if self.parallel is None:
            self.copies = accelerate.bf16_weights(self.model, self.settings, self.device)
        else:
            self.copies = self.parallel.copies
        self.steps_to_capture = WARMUP_STEPS if self.parallel is None or self.parallel.capturable else -1
        self._last = True  # whether this pass is the last of its step
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

    def _accumulating(self, last: bool) -> AbstractContextManager[None]:
        self._last = last
        return nullcontext() if self.graphs else super()._accumulating(last)

    def _accumulate(self, batch: Batch) -> None:
        self.buffer.copy_(self.shape.flatten(batch, pinned=True), non_blocking=True)
        if self.graphs:
            (self.graphs.last_pass if self._last else self.graphs.other_pass).replay()
        else:
            self._backward(self.shape.unflatten(self.buffer))

    def _backward(self, batch: Batch) -> None:
        with accelerate.bf16_context(self.copies):
            super()._backward(batch)

    def _update(self) -> None:
        if self.graphs:
            self.graphs.update.replay()
        else:
            super()._update()

    @property
    def _keeps_grads(self) -> bool:
        """The gradients of one batch are overwritten by the next; those of several are summed, and start at zero."""
        return self.settings.accumulate > 1 or super()._keeps_grads

    def _capture(self) -> None:
        """Capture a step, which does not run before it is replayed."""
        self._clear_grads()
        update = torch.cuda.CUDAGraph()
        try:
            last = self._capture_pass(True, None)
            # Other passes sum no gradients; under FSDP, which has few of them, all do.
            apart = self.parallel is not None and self.parallel.static_grads and self.settings.accumulate > 1
            other = self._capture_pass(False, last.pool()) if apart else last
            with torch.cuda.graph(update, pool=last.pool(), stream=self.stream):
                self._optimizer_step()
                if self._keeps_grads:
                    self._clear_grads()
        except RuntimeError as error:
            if self.parallel is not None and not self.parallel.static_grads:  # FSDP cannot leave a pass in the middle
                hint = 'set training.backend = "plain"'
                raise UserError(f"the training step cannot be captured: {first_line(error)}; {hint}") from error
            if not super()._keeps_grads:
                self.optimizer.zero_grad(set_to_none=True)  # captured gradients hold no values
            self.say(f"the training step cannot be captured, and goes on without: {first_line(error)}")
        else:
            self.graphs = StepGraphs(last, other, update)

    def _capture_pass(self, last: bool, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self.stream), super()._accumulating(last):
            self._backward(self.shape.unflatten(self.buffer))
        return graph


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
    """A captured step for batches of one shape; without a shape, a plain one, of one process or of several."""
    if shape is not None:
        return CapturedTrainingStep(model, optimizer, ema, settings, device, parallel, shape, say)
    if distributed.is_initialised():
        return ParallelTrainingStep(model, optimizer, ema, settings, device, parallel)
    return TrainingStep(model, optimizer, ema, settings, device)
