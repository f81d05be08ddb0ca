"""How fast a run trains and decodes on this machine, and how near that is to what the machine can do.

The run itself is only read: updates are made with a learning rate of zero to a copy of its weights in memory.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from random import Random
from statistics import median

import torch

from regard import accelerate, devices, tasks
from regard.data.packing import BatchShare, BatchStream
from regard.data.prefetch import Prefetched
from regard.models import SequenceModel
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.training import captured_step, flops, setup
from regard.training.checkpoint import EMA
from regard.training.optimizers import make_optimizer
from regard.training.step import TrainingStep

LINES = 64  # held-out sentences or prompts, decoded over and over
PIECES = 20  # of a made-up text
Progress = Callable[[int], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainingSpeed:
    """What updates of this run cost. Rates are of real target tokens: fill and padding earn nothing."""

    step: str  # how updates are made: plain, captured, compiled
    updates: int
    seconds: float  # an update
    tokens: float  # an update
    tokens_per_second: float
    flops_per_second: float
    matrix_rate: float  # what the device reaches on one large product in this precision
    precision: str
    waiting: float  # share of the time in which an update waited for its batches
    idle: float | None  # share of the time in which a GPU did nothing; None without one
    packing: float  # target tokens a second that the token cache is packed at
    peak_bytes: int  # on a GPU of its memory, on a CPU of the whole process

    @property
    def share(self) -> float:
        """Of the device's matrix rate."""
        return self.flops_per_second / self.matrix_rate

    @property
    def packing_ahead(self) -> float:
        """How many times as fast batches are packed as they are trained on."""
        return self.packing / self.tokens_per_second


@dataclass(frozen=True)
class DecodingSpeed:
    """What using this run costs, in sentences (prompts, texts) and output tokens a second."""

    what: str
    sentences_per_second: float
    tokens_per_second: float | None  # None where nothing is written


def matrix_rate(device: torch.device, precision: str) -> float:
    """FLOP a second of one large matrix product, in the precision that training would use: the median of several."""
    size = 8192 if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device) for _ in range(2))
    seconds = []
    with devices.autocast(precision, device):
        if torch.is_autocast_enabled(device.type):
            one, other = (matrix.to(torch.get_autocast_dtype(device.type)) for matrix in (one, other))
        for _ in range(6):
            _finish(device)
            begin = time.perf_counter()
            one @ other
            _finish(device)
            seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / median(seconds[1:])


def training_speed(
    run: RunDir,
    recipe: Recipe,
    device: torch.device,
    *,
    steps: int,
    seconds: float,
    progress: Progress,
    say: Say,
) -> TrainingSpeed:
    """Train for so many updates, or so many seconds if that is less, as `regard train` would here.

    `recipe` is the run's own, but for where its files are looked up.
    """
    settings = recipe.training
    task = tasks.of(recipe)
    model = _weights(run, device).train()
    how, static = setup.plan_updates(run, model, device)
    batches = task.stream(run, task.dataset(run), static)
    how, shape = setup.choose_backend(how, batches, model, settings, device, say)
    average = EMA(model, settings.ema) if settings.ema else None
    update = captured_step.make_step(model, make_optimizer(model, run), average, settings, device, shape, say)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with devices.held_memory(device), Prefetched(batches.shares(accumulate=settings.accumulate)) as stream:
        loop = _Loop(run, update, stream, device)
        loop.go(
            2 if shape is None else captured_step.WARMUP_STEPS + 2, float("inf")
        )  # what allocates, and what is recorded, first
        loop.forget()
        loop.go(steps, seconds, progress)
        idle = loop.idle() if device.type == "cuda" else None
    return TrainingSpeed(
        step=how,
        updates=loop.updates,
        seconds=loop.seconds / loop.updates,
        tokens=loop.tokens / loop.updates,
        tokens_per_second=loop.tokens / loop.seconds,
        flops_per_second=loop.work / loop.seconds,
        matrix_rate=matrix_rate(device, settings.precision),
        precision="bf16" if devices.in_bf16(settings.precision, device) else "fp32",
        waiting=loop.waited / loop.seconds,
        idle=idle,
        packing=packing_speed(batches),
        peak_bytes=_peak(device),
    )


class _Loop:
    """Updates one after the other, and what they took."""

    def __init__(
        self,
        run: RunDir,
        update: TrainingStep,
        stream: Prefetched[BatchShare],
        device: torch.device,
    ) -> None:
        self.run, self.update, self.stream, self.device = run, update, stream, device
        self.vocabulary = len(run.tokenizers[1])
        self.number = 0
        self.forget()

    def forget(self) -> None:
        self.updates, self.tokens, self.work, self.seconds, self.waited = 0, 0, 0, 0.0, 0.0

    def go(self, steps: int, seconds: float, progress: Progress = lambda more: None) -> None:
        _finish(self.device)
        begin, waited = time.perf_counter(), self.stream.waited
        while self.updates < steps and (not self.updates or time.perf_counter() - begin < seconds):
            group = next(self.stream).batches
            self.number += 1
            self.tokens += self.update(group, self.number, 0.0)
            readings = 2 if self.run.recipe.training.r_drop else 1
            self.work += readings * sum(
                flops.update(self.run.recipe.model, batch, self.vocabulary) for batch in group.values()
            )
            self.updates += 1
            progress(1)
        _finish(self.device)
        self.seconds = time.perf_counter() - begin
        self.waited = self.stream.waited - waited

    def idle(self, seconds: float = 2.0) -> float:
        """As `idle_share` has it, of updates for about so long."""

        def made(steps: int) -> float:
            loop = _Loop(self.run, self.update, self.stream, self.device)
            loop.go(steps, float("inf"))
            return loop.seconds

        return idle_share(made, max(round(seconds * self.updates / self.seconds), 5))


def idle_share(made: Callable[[int], float], steps: int) -> float:
    """Share of the time in which a GPU runs no kernel while updates are `made`, so many, in the seconds that it says.

    By the profiler's times of the kernels alone: under it the gaps are longer. Updates are timed first and kernels
    right after, without a rest: a GPU that has just rested is quicker than one at work.
    """
    from torch.profiler import ProfilerActivity, profile

    usual = made(steps) / steps
    profiled = min(steps, 100)  # more kernels than that are slow to count
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        made(profiled)
    busy = sum(event.self_device_time_total for event in seen.key_averages()) / 1e6 / profiled
    return max(0.0, 1 - busy / usual)


def packing_speed(batches: BatchStream, seconds: float = 0.5) -> float:
    """Target tokens a second of the token cache packed into batches, by one thread that does nothing else."""
    stream = batches.batches()
    next(stream)  # the plan of an epoch is made with its first batch
    tokens, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        tokens += sum(batch.num_targets for batch, _ in islice(stream, 4))
    return tokens / spent


def decoding_speed(
    run: RunDir, recipe: Recipe, device: torch.device, *, seconds: float, progress: Progress
) -> DecodingSpeed:
    """Decode held-out lines as the recipe says, again and again for so many seconds."""
    texts, model = _texts(run, recipe), _weights(run, device).eval()
    accelerate.for_inference(model)  # as for every loaded run
    what, decode = tasks.of(recipe).workload(run, model, texts)
    decode()  # what allocates comes first
    _finish(device)
    done, tokens, begin = 0, 0, time.perf_counter()
    while not done or time.perf_counter() - begin < seconds:
        tokens += decode()
        done += len(texts)
        progress(len(texts))
    _finish(device)
    spent = time.perf_counter() - begin
    return DecodingSpeed(what, done / spent, tokens / spent if tokens else None)


def _texts(run: RunDir, recipe: Recipe) -> list[str]:
    """The first held-out texts; of an imported run, which came without, random pieces of its vocabulary."""
    if recipe.data.imported is not None:
        random, tokenizer = Random(1), run.tokenizers[0]
        pieces = range(tokenizer.first, len(tokenizer))
        return [tokenizer.decode([random.choice(pieces) for _ in range(PIECES)]) for _ in range(LINES)]
    task = tasks.of(recipe)
    texts = [source if task.has_source else target for source, target in task.held_out("valid")[:LINES]]
    return [text[:400] for text in texts]


def _weights(run: RunDir, device: torch.device) -> SequenceModel:
    """The run's best weights, or fresh ones while there are none: the speed is the same."""
    return run.model(device) if run.best.exists() else run.fresh_model().to(device)


def _finish(device: torch.device) -> None:
    """Wait until the device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    """The most memory that was held at once, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
