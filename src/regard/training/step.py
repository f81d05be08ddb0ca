"""One update of the weights: forward, backward, clip, optimiser, running average.

`Step` is the definition. `CapturedStep` does the same on a GPU with everything recorded once as a CUDA graph and played
again for every batch, so that nothing waits for Python to launch it; `compiled` blocks make what is recorded quicker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import gpu
from regard.devices import autocast, in_bf16
from regard.errors import UserError, first_line
from regard.models import Translator
from regard.models.family import Compiled
from regard.recipes.schema import ModelSettings, Training
from regard.rows import PairBatch
from regard.training.halves import Halves
from regard.training.state import Average
from regard.training.static import Shape

CAPTURED = ("transformer", "gpt", "bert")  # recurrent cells need to know on the host how long each sentence is
LONG_JOB = 1e17  # floating-point operations, minutes of a large GPU, from where on compiling pays for itself
WARM = 3  # updates before the one that is captured: compilers and libraries have set themselves up by then


@dataclass(eq=False)
class Step:
    """Makes updates, and keeps what they showed on the device until it is asked for."""

    model: Translator
    optimizer: torch.optim.Optimizer
    ema: Average | None
    settings: Training
    device: torch.device

    def __post_init__(self) -> None:
        device = self.device
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # summed since it was last put to zero
        self.norm = torch.zeros((), device=device)  # of the last gradient
        # A loss that is not finite raises this flag on the device; the fused optimiser skips its updates while it is
        # up, and the host looks at it only every few steps, so no step waits for the device.
        self.broken = torch.zeros((), device=device)
        self.broken_step = torch.zeros((), dtype=torch.long, device=device)
        self.numbers = torch.zeros(3, device=device)  # one over the tokens, the learning rate, which step it is

    def __call__(self, batches: Sequence[PairBatch], number: int, rate: float) -> int:
        """One step of the optimiser on the mean loss a target token over all the batches together: how many tokens."""
        tokens = sum(batch.tokens for batch in batches)
        torch.manual_seed(self.settings.seed * 1_000_003 + number)  # dropout depends on seed and step alone
        self.model.train()
        self._set(1 / max(tokens, 1), rate, number)
        for batch in batches:
            self._add(batch)
        self._apply()
        return tokens

    def _set(self, share: float, rate: float, number: int) -> None:
        """The numbers of this update, to where the device finds them."""
        host = torch.tensor([share, rate, number], dtype=torch.float32)
        host = host.pin_memory() if self.device.type == "cuda" else host
        self.numbers.copy_(host, non_blocking=True)
        for group in self.optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):  # else it is one of the numbers, for a graph to read
                group["lr"] = rate

    def _add(self, batch: PairBatch) -> None:
        """Add the gradient of a batch."""
        self._backward(batch.to(self.device))

    def _backward(self, batch: PairBatch) -> None:
        with autocast(self.settings.precision, self.device):
            loss = self.model.loss(batch, self.settings.label_smoothing, self.settings.r_drop)
        (loss * self.numbers[0]).backward()
        self.loss += loss.detach()

    def _apply(self) -> None:
        """Take the step that the gradients say, and forget them."""
        self._move()
        self.optimizer.zero_grad(set_to_none=True)

    def _move(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip or float("inf"))
        bad = ~(torch.isfinite(norm) & torch.isfinite(self.loss))
        self.broken_step += self.numbers[2].long() * (bad & (self.broken == 0))
        self.broken.logical_or_(bad)
        self.norm.copy_(norm)
        self.optimizer.found_inf = self.broken  # type: ignore[attr-defined]  # what the fused kernels look at
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model)


@dataclass(eq=False)
class CapturedStep(Step):
    """The same update, recorded once and played again. It takes batches of one `shape` only.

    The first few updates are made without recording. What is drawn at random depends on the seed and the step here as
    there: a generator's state is read anew whenever a graph is played.
    """

    shape: Shape
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.laid = torch.zeros(self.shape.size, dtype=torch.long, device=self.device)
        self.stream = torch.cuda.Stream(self.device)
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self.halved = _halved(self.model, self.settings, self.device)
        self.left = WARM  # updates before the one that is captured
        for group in self.optimizer.param_groups:
            group["capturable"] = True  # the number of steps is counted on the device
            group["lr"] = self.numbers[1]

    def __call__(self, batches: Sequence[PairBatch], number: int, rate: float) -> int:
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)  # who puts the loss to zero, or weights in their place, does it before this
        with torch.cuda.stream(self.stream):
            if self.left == 0 and self.graphs is None:
                self._capture()
            self.left -= 1
            tokens = super().__call__(batches, number, rate)
        outside.wait_stream(self.stream)  # and who looks at the loss or the weights, after it
        return tokens

    def _add(self, batch: PairBatch) -> None:
        self.laid.copy_(self.shape.lay(batch).pin_memory(), non_blocking=True)
        if self.graphs:
            self.graphs[0].replay()
        else:
            self._backward(self.shape.batch(self.laid))

    def _backward(self, batch: PairBatch) -> None:
        with self.halved():
            super()._backward(batch)

    def _apply(self) -> None:
        if self.graphs:
            self.graphs[1].replay()
        else:
            self._move()
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
                self._backward(self.shape.batch(self.laid))
            with torch.cuda.graph(second, pool=first.pool(), stream=self.stream):
                self._move()
                if self.settings.accumulate > 1:
                    self._forget()
        except RuntimeError as error:
            self.optimizer.zero_grad(set_to_none=True)  # what was recorded never happened: there is nothing in them
            self.say(f"the training step cannot be captured, and goes on without: {first_line(error)}")
        else:
            self.graphs = first, second


def _halved(model: Translator, settings: Training, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """`Halves.used`, in bf16, unless gradients of several batches are added up, which is done in float32."""
    return Halves(model).used if in_bf16(settings.precision, device) and settings.accumulate == 1 else nullcontext


def kind(settings: Training, model: ModelSettings, device: torch.device) -> str:
    """How updates are made: as the recipe says, or captured where this device and this model can, else plain."""
    able = device.type == "cuda" and model.family in CAPTURED and not settings.checkpoint_activations
    able = able and getattr(model, "mask", "causal") == "causal" and gpu.available()
    if settings.update != "auto":
        if settings.update != "plain" and not able:
            raise UserError(
                f'training.update = "{settings.update}" needs a GPU with Triton and a C compiler, a model of the '
                f'family {" or ".join(CAPTURED)} that sees everything, and no checkpoint_activations: try "auto"'
            )
        return settings.update
    return "captured" if able else "plain"


def worth_compiling(model: Translator, settings: Training) -> bool:
    """Whether a job is long, roughly: six operations for every weight and every token that is read.

    (`flops` counts it exactly, from lengths that the host knows; of static rows it does not, and this will do.)
    """
    weights, readings = sum(p.numel() for p in model.parameters()), 2 if settings.r_drop else 1
    return 6.0 * weights * readings * settings.batch_tokens * settings.accumulate * settings.steps >= LONG_JOB


def make(
    model: Translator,
    optimizer: torch.optim.Optimizer,
    ema: Average | None,
    settings: Training,
    device: torch.device,
    shape: Shape | None = None,
    say: Callable[[str], None] = print,
) -> Step:
    """A step for batches of this shape; None: of any."""
    if shape is None:
        return Step(model, optimizer, ema, settings, device)
    return CapturedStep(model, optimizer, ema, settings, device, shape, say)


def usable(
    how: str,
    model: Translator,
    batch: PairBatch,
    settings: Training,
    device: torch.device,
    say: Callable[[str], None],
) -> str:
    """`how` if that works on a static batch; else, after a line that says why not, the next slower way that does.

    Where the recipe leaves it open, a step that is captured is compiled, too, if the job is long. The model's blocks
    and loss are compiled on the way if that is wanted. Nothing else is left of the trial: neither gradients, nor
    numbers drawn at random, nor running statistics.
    """
    ways = ["compiled", "captured"]
    if settings.update == "auto" and worth_compiling(model, settings):
        how = "compiled"
    for way in ways[ways.index(how) :]:
        if way == "compiled":
            say("compiling the training step")
            torch._dynamo.reset()  # what an earlier training in this process compiled would count towards a limit
        model.compiled = Compiled.make() if way == "compiled" else None
        try:
            _try(model, batch, settings, device)
        except Exception as error:  # whatever a compiler throws
            say(f"the training step cannot be {way} here, and goes on without: {first_line(error)}")
        else:
            return way
    model.compiled = None
    return "plain"


def _try(model: Translator, batch: PairBatch, settings: Training, device: torch.device) -> None:
    model.train()
    before = [buffer.clone() for buffer in model.buffers()]
    halved = _halved(model, settings, device)
    drawn = torch.random.fork_rng([device] if device.type == "cuda" else [])
    try:
        with drawn, halved(), autocast(settings.precision, device):
            model.loss(batch, settings.label_smoothing, settings.r_drop).backward()
    finally:
        model.zero_grad(set_to_none=True)
        for buffer, was in zip(model.buffers(), before, strict=True):
            buffer.copy_(was)
