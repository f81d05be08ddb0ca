"""Plan a training: memory of each rank, time of a step, and how both change with the number of GPUs."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch

from regard import devices
from regard.errors import UserError
from regard.models import sizes
from regard.planning import speed
from regard.planning.hardware import EFFICIENCY, HARDWARE, Hardware
from regard.planning.speed import Cluster, Compute, StepTime
from regard.planning.trace import BLOCK, StepTrace, trace
from regard.recipes.schema import Recipe

MAX_RANKS = 1024
MIN_EFFICIENCY = 0.8  # throughput per GPU, relative to one GPU, from which more GPUs are worth their cost
MIN_RANK_TOKENS = 256  # a step is not divided into smaller shares
MAX_TOKENS = 2**20  # largest batch that is considered
MAX_LAYERS = 2000
MISTAKE = 100  # a model that would not fit even on this many times the GPUs is not planned
MAX_TRACED_TOKENS = 2**16  # largest batch that is traced
SCHEMES = ("plain", "ddp", "fsdp")


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. The peak is less than the sum: activations are freed while gradients are allocated."""

    scheme: str
    weights: int
    optimizer: int
    copies: int  # bf16 copies of weights, and weights that FSDP has gathered
    gradients: int
    activations: int
    logits: int
    buffers: int  # buffers of communication and of cuBLAS
    peak: int
    fits: bool
    largest_batch: int  # training.batch_tokens that fits; 0: none


@dataclass(frozen=True)
class ScalingPoint:
    """A number of GPUs: `batch_tokens` and `accumulate` of the recipe, and what they give."""

    gpus: int
    scheme: str
    batch_tokens: int
    accumulate: int
    seconds: float  # per step
    waiting: float  # share of the step spent waiting for other ranks
    sent: float  # bytes that each rank sends per step
    tokens_per_second: float
    efficiency: float  # throughput per GPU, over that of one GPU
    hours: float  # for as many tokens as the recipe trains on
    cost: float | None


@dataclass(frozen=True)
class Plan:
    """The result of `regard plan`."""

    hardware: Hardware
    gpus: int
    per_node: int
    backend: str
    parameters: int
    flops: float  # FLOPs of a step on one device, by formula
    targets: float  # mean number of target tokens of a step on one device
    memory: list[RankMemory]
    weak_scaling: list[ScalingPoint]  # every GPU has a batch of the recipe's size: the step grows
    strong_scaling: list[ScalingPoint]  # the recipe's step, divided among the GPUs
    weak_scaling_limit: int  # the largest number of GPUs that is efficient
    strong_scaling_limit: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def chosen(self) -> ScalingPoint:
        """The requested number of GPUs."""
        return next(point for point in self.weak_scaling if point.gpus == self.gpus)


def make_plan(
    recipe: Recipe,
    hardware: Hardware,
    *,
    gpus: int = 1,
    per_node: int = 8,
    length: int | None = None,
    price: float | None = None,
    speed_up: float = 1.0,
) -> Plan:
    """Plan a recipe on `gpus` devices in nodes of `per_node`.

    `price` is that of a GPU for an hour; `speed_up` is measured over planned speed, where it was measured.
    """
    _refuse_too_large(recipe, hardware, gpus)
    planner = _Planner(recipe, hardware, per_node, length, price, speed_up)
    traced = planner.trace(recipe.training.batch_tokens)
    memory = [planner.memory(scheme, gpus) for scheme in SCHEMES if scheme == "plain" or gpus > 1]
    if not any(each.largest_batch for each in memory):
        raise UserError(_does_not_fit(recipe, hardware, gpus, memory))
    counts = sorted({2**i for i in range(MAX_RANKS.bit_length())} | {gpus})
    weak = [planner.weak_scaling(count) for count in counts]
    strong = [planner.strong_scaling(count) for count in counts if planner.can_divide(count) and count <= max(gpus, 8)]
    shown = [point for point in weak if point.gpus <= max(gpus, 8)]
    return Plan(
        hardware,
        gpus,
        per_node,
        traced.backend,
        traced.parameters,
        traced.model_flops,
        traced.targets,
        memory,
        weak if gpus > 8 else shown,
        strong if gpus > 8 else [point for point in strong if point.gpus <= 8],
        _efficient_up_to(weak),
        _efficient_up_to(strong),
    )


def _refuse_too_large(recipe: Recipe, hardware: Hardware, gpus: int) -> None:
    """Refuse settings that are surely mistakes, and would take hours or more memory than there is to trace."""
    settings, model = recipe.training, recipe.model
    if settings.batch_tokens > MAX_TOKENS:
        raise UserError(f"training.batch_tokens = {settings.batch_tokens}: the planner knows at most {MAX_TOKENS:,}")
    for name, value in model:
        if name.endswith("layers") and isinstance(value, int) and value > MAX_LAYERS:
            raise UserError(f"model.{name} = {value}: the planner knows at most {MAX_LAYERS:,}")
    text, memory = recipe.text, int(MISTAKE * gpus * hardware.memory)
    where = f"even {MISTAKE * gpus:,} x {hardware.name} are too few"
    sizes.refuse_too_large(model, (text.vocabulary, text.vocabulary), text.shared, memory, 1, where)


def _efficient_up_to(points: list[ScalingPoint]) -> int:
    """The largest number of GPUs up to which all are efficient."""
    last = 1
    for point in points:
        if point.efficiency < MIN_EFFICIENCY:
            break
        last = point.gpus
    return last


def _does_not_fit(recipe: Recipe, hardware: Hardware, gpus: int, memory: list[RankMemory]) -> str:
    least = min(memory, key=lambda each: each.peak)
    state = least.weights + least.optimizer + least.gradients
    advice = ["more GPUs (--gpus, --nodes)", "a smaller model.size"]
    if not recipe.training.checkpoint_activations:
        advice.insert(0, "training.checkpoint_activations = true")
    return (
        f"the model does not fit: {least.scheme} on {gpus} x {hardware.name} needs {least.peak / 1e9:,.0f} GB on each, "
        f"{state / 1e9:,.0f} GB of it for weights, optimizer and gradients, and each has {hardware.memory / 1e9:,.0f} "
        f"GB: try {', '.join(advice[:-1])} or {advice[-1]}"
    )


@dataclass
class _Planner:
    """Memory and speed of a recipe's step, from traces at several batch sizes, one for each size."""

    recipe: Recipe
    hardware: Hardware
    per_node: int
    length: int | None
    price: float | None
    speed_up: float

    def __post_init__(self) -> None:
        self._traces: dict[tuple[int, bool], StepTrace] = {}
        settings = self.recipe.training
        self.step_tokens = settings.batch_tokens * settings.accumulate
        self._one_gpu_rate = 0.0  # tokens per second of one GPU

    def trace(self, batch_tokens: int, scheme: str = "plain") -> StepTrace:
        sharded = scheme == "fsdp"
        if (batch_tokens, sharded) not in self._traces:
            training = self.recipe.training.model_copy(update={"batch_tokens": batch_tokens})
            recipe = self.recipe.model_copy(update={"training": training})
            gpu = not self.hardware.name.startswith("CPU")
            traced = trace(recipe, gpu=gpu, length=self.length, sharded=sharded)
            self._traces[batch_tokens, sharded] = traced
        return self._traces[batch_tokens, sharded]

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self, scheme: str, ranks: int) -> RankMemory:
        usable = EFFICIENCY.usable_memory * self.hardware.memory
        planned = rank_memory(self.trace(self.recipe.training.batch_tokens, scheme), scheme, ranks, self.hardware)
        largest = self._largest(scheme, ranks, usable)
        return replace(planned, fits=planned.peak <= usable, largest_batch=largest)

    def _largest(self, scheme: str, ranks: int, usable: float) -> int:
        """The largest batch that fits, at most `MAX_TOKENS`. Memory grows linearly with the tokens.

        The line goes through the recipe's batch and a batch near the result, so that two traces serve all schemes.
        """
        tokens = self.recipe.training.batch_tokens
        base = self.trace(tokens, scheme)
        held = rank_memory(base, scheme, ranks, self.hardware)
        available = usable - held.peak + base.activations + base.logits  # for activations
        first = min(int(tokens * available / (base.activations + base.logits)), MAX_TOKENS)
        if first < MIN_RANK_TOKENS:
            return 0
        # A power of two, so that schemes share traces
        other = min(max(2 ** (first.bit_length() - 1), MIN_RANK_TOKENS), MAX_TRACED_TOKENS)
        far = self.trace(other, scheme)
        if other == tokens:
            return first
        bytes_per_token = (far.activations + far.logits - base.activations - base.logits) / (other - tokens)
        fitting = min(int(tokens + (available - base.activations - base.logits) / bytes_per_token), MAX_TOKENS)
        return fitting // MIN_RANK_TOKENS * MIN_RANK_TOKENS

    # -- speed --------------------------------------------------------------------------------------------------------

    def scheme(self, batch_tokens: int, ranks: int) -> str:
        """The simplest scheme whose memory suffices, FSDP if none does."""
        usable = EFFICIENCY.usable_memory * self.hardware.memory
        first = "plain" if ranks == 1 else "ddp"
        fits = rank_memory(self.trace(batch_tokens), first, ranks, self.hardware).peak <= usable
        return first if fits or ranks == 1 else "fsdp"

    def weak_scaling(self, ranks: int) -> ScalingPoint:
        """Every rank computes at least one batch of the recipe's size."""
        settings = self.recipe.training
        return self._point(ranks, settings.batch_tokens, -(-settings.accumulate // ranks))

    def can_divide(self, ranks: int) -> bool:
        return self.step_tokens // ranks >= MIN_RANK_TOKENS

    def strong_scaling(self, ranks: int) -> ScalingPoint:
        """The recipe's step in equal shares; one batch each, if that is no larger than the recipe's."""
        settings = self.recipe.training
        each = -(-settings.accumulate // ranks)
        share = settings.batch_tokens if each * ranks <= settings.accumulate else self.step_tokens // ranks
        return self._point(ranks, min(share, settings.batch_tokens), each if share == settings.batch_tokens else 1)

    def _point(self, ranks: int, batch_tokens: int, micro_batches: int) -> ScalingPoint:
        scheme = self.scheme(batch_tokens, ranks)
        traced = self.trace(batch_tokens, scheme)
        time = self.time(traced, scheme, ranks, micro_batches)
        rate = ranks * micro_batches * traced.targets / time.total
        self._one_gpu_rate = rate if ranks == 1 else self._one_gpu_rate
        settings = self.recipe.training
        hours = self._trained_tokens() / rate / 3600
        return ScalingPoint(
            ranks,
            scheme,
            batch_tokens,
            max(settings.accumulate, ranks) if batch_tokens == settings.batch_tokens else ranks,
            time.total,
            time.waiting / time.total,
            time.sent,
            rate,
            rate / ranks / self._one_gpu_rate,
            hours,
            None if self.price is None else self.price * ranks * hours,
        )

    def _trained_tokens(self) -> float:
        settings = self.recipe.training
        return float(self.trace(settings.batch_tokens).targets * settings.accumulate * settings.steps)

    def time(self, traced: StepTrace, scheme: str, ranks: int, micro_batches: int) -> StepTime:
        work = Compute.of(traced, self.hardware)
        work = replace(work, micro_batch=work.micro_batch / self.speed_up, update=work.update / self.speed_up)
        cluster = Cluster(self.hardware, ranks, self.per_node)
        return (speed.fsdp if scheme == "fsdp" else speed.ddp)(work, cluster, micro_batches)


def rank_memory(traced: StepTrace, scheme: str, ranks: int, hardware: Hardware) -> RankMemory:
    """The memory of one of `ranks` ranks, without the decision whether it fits."""
    weights, optimizer, copies = traced.weights, traced.optimizer, traced.copies
    gradients, buffers = traced.gradients, int(hardware.workspace)
    during = traced.activations + traced.logits
    if scheme == "ddp" and traced.micro_batches == 1:
        during += gradients  # buckets stay allocated
    if scheme == "fsdp":
        share = sharded(traced, ranks) / (4 * traced.parameters)
        weights, optimizer, gradients = (int(share * size) for size in (weights, optimizer, gradients))
        units = _units(traced)
        block = max((size for unit, size in units.items() if unit), default=0)
        copies = 4 * units.get("", 0) + 2 * 2 * block  # what is in no block stays, in fp32; and two blocks in bf16
        buffers += 4 * max(units.values())  # gradients on their way
        during += gradients
    peak = max(during, gradients) + weights + optimizer + copies + buffers
    return RankMemory(
        scheme, weights, optimizer, copies, gradients, traced.activations, traced.logits, buffers, peak, False, 0
    )


def fits(recipe: Recipe, device: torch.device, ranks: int) -> bool:
    """Whether each of `ranks` processes can hold all of the model during a step, on a device like this one.

    Processes on a CPU share the memory of their machine.
    """
    gpu = device.type == "cuda"
    memory = devices.memory(device) / (1 if gpu else int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    hardware = replace(HARDWARE["h200" if gpu else "cpu"], memory=memory)
    planned = rank_memory(trace(recipe, gpu=gpu), "ddp", ranks, hardware)
    return planned.peak <= EFFICIENCY.usable_memory * memory


def sharded(traced: StepTrace, ranks: int) -> int:
    """Bytes of the fp32 weights of one rank under FSDP: ceil(rows / ranks) rows of every parameter."""
    return sum(4 * -(-shape[0] // ranks) * prod(shape[1:]) if shape else 4 for shape, _ in traced.shapes)


def _units(traced: StepTrace) -> dict[str, int]:
    """Elements of every part that FSDP gathers at once."""
    sizes: dict[str, int] = {}
    for shape, unit in traced.shapes:
        sizes[unit] = sizes.get(unit, 0) + prod(shape)
    return sizes


__all__ = ["BLOCK", "Plan", "RankMemory", "ScalingPoint", "fits", "make_plan", "rank_memory", "sharded"]
