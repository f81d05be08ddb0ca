"""Training and decoding speed of a run on this machine, compared with the peak rate of the device.

The run directory is only read: updates apply to a copy of its weights in memory, with a learning rate of zero.
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
from regard.data.prefetch import Prefetched
from regard.data.stream import BatchShare, BatchStream
from regard.models import SequenceModel, flops
from regard.precision import autocast, in_bf16
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.training import captured_step, setup
from regard.training.checkpoint import EMA
from regard.training.optimizers import make_optimizer
from regard.training.step import TrainingStep

LINES = 64  # held-out inputs, decoded repeatedly
RANDOM_TOKENS = 20  # length of a random text
Progress = Callable[[int], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainingSpeed:
    """The speed of training updates. Rates count real target tokens, without padding."""

    step: str  # the backend of an update: plain, captured, compiled
    updates: int
    seconds: float  # per update
    tokens: float  # per update
    tokens_per_second: float
    flops_per_second: float
    matrix_rate: float  # FLOP/s of one large matmul in this precision
    precision: str
    waiting: float  # share of the time spent waiting for batches
    idle: float | None  # share of the time without a running kernel; None on a CPU
    packing: float  # target tokens packed per second
    peak_bytes: int  # peak GPU memory; on a CPU, peak memory of the process

    @property
    def share(self) -> float:
        """The share of the device's matmul rate."""
        return self.flops_per_second / self.matrix_rate

    @property
    def packing_ahead(self) -> float:
        """The speed of packing batches, as a multiple of the speed of training on them."""
        return self.packing / self.tokens_per_second


@dataclass(frozen=True)
class DecodingSpeed:
    """The speed of inference, in inputs and output tokens per second."""

    what: str
    sentences_per_second: float
    tokens_per_second: float | None  # None if the task writes no tokens


def matrix_rate(device: torch.device, precision: str) -> float:
    """Measure FLOP/s of one large matmul in the precision of training: the median of several."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    seconds = []
    with autocast(precision, device):
        if torch.is_autocast_enabled(device.type):
            a, b = (matrix.to(torch.get_autocast_dtype(device.type)) for matrix in (a, b))
        for _ in range(6):
            _synchronize(device)
            start = time.perf_counter()
            a @ b
            _synchronize(device)
            seconds.append(time.perf_counter() - start)
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
    """Measure updates as `regard train` makes them, for `steps` updates or `seconds`, whichever ends first.

    `recipe` is that of the run, except for the folder of its files.
    """
    settings = recipe.training
    task = tasks.of(recipe)
    model = _load_weights(run, device).train()
    backend, static = setup.plan_updates(run, model, device)
    batches = task.stream(run, task.dataset(run), static)
    backend, shape = setup.choose_backend(backend, batches, model, settings, device, say)
    average = EMA(model, settings.ema) if settings.ema else None
    update = captured_step.make_step(model, make_optimizer(model, run), average, settings, device, shape, say)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with devices.held_memory(device), Prefetched(batches.shares(accumulate=settings.accumulate)) as stream:
        loop = _TimedLoop(run, update, stream, device)
        warmup = 2 if shape is None else captured_step.WARMUP_STEPS + 2  # allocation and graph capture
        loop.run_updates(warmup, float("inf"))
        loop.reset()
        loop.run_updates(steps, seconds, progress)
        idle = loop.idle() if device.type == "cuda" else None
    return TrainingSpeed(
        step=backend,
        updates=loop.updates,
        seconds=loop.seconds / loop.updates,
        tokens=loop.tokens / loop.updates,
        tokens_per_second=loop.tokens / loop.seconds,
        flops_per_second=loop.flop / loop.seconds,
        matrix_rate=matrix_rate(device, settings.precision),
        precision="bf16" if in_bf16(settings.precision, device) else "fp32",
        waiting=loop.waited / loop.seconds,
        idle=idle,
        packing=packing_speed(batches),
        peak_bytes=_peak_bytes(device),
    )


class _TimedLoop:
    """Runs updates and measures their time, tokens and FLOP."""

    def __init__(
        self,
        run: RunDir,
        update: TrainingStep,
        stream: Prefetched[BatchShare],
        device: torch.device,
    ) -> None:
        self.run, self.update, self.stream, self.device = run, update, stream, device
        self.vocabulary = run.vocabulary_sizes[1]
        self.number = 0
        self.reset()

    def reset(self) -> None:
        self.updates, self.tokens, self.flop, self.seconds, self.waited = 0, 0, 0, 0.0, 0.0

    def run_updates(self, steps: int, seconds: float, progress: Progress = lambda more: None) -> None:
        _synchronize(self.device)
        start, waited = time.perf_counter(), self.stream.waited
        while self.updates < steps and (not self.updates or time.perf_counter() - start < seconds):
            group = next(self.stream).batches
            self.number += 1
            self.tokens += self.update(group, self.number, 0.0)
            passes = 2 if self.run.recipe.training.r_drop else 1
            self.flop += passes * sum(
                flops.update(self.run.recipe.model, batch, self.vocabulary) for batch in group.values()
            )
            self.updates += 1
            progress(1)
        _synchronize(self.device)
        self.seconds = time.perf_counter() - start
        self.waited = self.stream.waited - waited

    def idle(self, seconds: float = 2.0) -> float:
        """Measure `idle_share` for about this many seconds."""

        def time_updates(steps: int) -> float:
            loop = _TimedLoop(self.run, self.update, self.stream, self.device)
            loop.run_updates(steps, float("inf"))
            return loop.seconds

        return idle_share(time_updates, max(round(seconds * self.updates / self.seconds), 5))


def idle_share(time_updates: Callable[[int], float], steps: int) -> float:
    """Measure the share of the time in which a GPU runs no kernel; `time_updates` runs updates and returns seconds.

    The time of the kernels comes from the profiler, the total time from a run without it, since profiling adds idle
    time. Both follow each other at once: a GPU that was idle runs faster at first.
    """
    from torch.profiler import ProfilerActivity, profile

    seconds = time_updates(steps) / steps
    profiled = min(steps, 100)  # summing up the events of more is slow
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        time_updates(profiled)
    busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6 / profiled
    return max(0.0, 1 - busy / seconds)


def packing_speed(batches: BatchStream, seconds: float = 0.5) -> float:
    """Measure the target tokens per second that one thread packs into batches."""
    stream = batches.batches()
    next(stream)  # the first batch includes planning the epoch
    tokens, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        tokens += sum(batch.num_targets for batch, _ in islice(stream, 4))
    return tokens / elapsed


def decoding_speed(
    run: RunDir, recipe: Recipe, device: torch.device, *, seconds: float, progress: Progress
) -> DecodingSpeed:
    """Measure decoding of held-out inputs with the recipe's settings, repeated for `seconds`."""
    texts, model = _texts(run, recipe), _load_weights(run, device).eval()
    accelerate.for_inference(model)  # as for every loaded run
    what, decode = tasks.of(recipe).workload(run, model, texts)
    decode()  # warm-up
    _synchronize(device)
    done, tokens, start = 0, 0, time.perf_counter()
    while not done or time.perf_counter() - start < seconds:
        tokens += decode()
        done += len(texts)
        progress(len(texts))
    _synchronize(device)
    elapsed = time.perf_counter() - start
    return DecodingSpeed(what, done / elapsed, tokens / elapsed if tokens else None)


def _texts(run: RunDir, recipe: Recipe) -> list[str]:
    """The first held-out inputs; for an imported run, which has no data, random tokens."""
    if recipe.data.imported is not None:
        random, tokenizer = Random(1), run.tokenizers[0]
        ids = range(tokenizer.first, len(tokenizer))
        return [tokenizer.decode([random.choice(ids) for _ in range(RANDOM_TOKENS)]) for _ in range(LINES)]
    task = tasks.of(recipe)
    texts = [source if task.has_source else target for source, target in task.held_out("valid")[:LINES]]
    return [text[:400] for text in texts]


def _load_weights(run: RunDir, device: torch.device) -> SequenceModel:
    """Load the best weights, or new ones if there are none yet: the speed is the same."""
    return run.model(device) if run.best.exists() else run.fresh_model().to(device)


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(device: torch.device) -> int:
    """The peak memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
