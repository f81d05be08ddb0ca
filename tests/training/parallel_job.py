"""One process of a job that takes a few training steps in float64, for every family; run by test_parallel.py."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "invariants"))

from families import FAMILIES, Case, make

from regard import accelerate, distributed, sharding, tensor_io
from regard.accelerate.overlapped_sums import OverlappedSums
from regard.data.stream import START, BatchShare, BatchStream, PlannedBatch, StreamPosition
from regard.models import SequenceModel
from regard.models.bert import TextClassBatch
from regard.models.graph import GraphBatch
from regard.nn.lora import TARGETS, add_adapters
from regard.nn.norms import BatchNorm
from regard.packed import LinkTargets, SeqBatch
from regard.recipes.schema import TrainingSettings
from regard.registry import OPTIMIZERS
from regard.training.captured_step import make_step
from regard.training.checkpoint import EMA
from regard.training.parallel_step import ParallelTrainingStep
from regard.training.step import TrainingStep

CPU = torch.device("cpu")
STEPS = 3
KINDS = ("ddp", "fsdp", "ddp captured")  # the last sums gradients as captured steps do, on a CPU
SEEDS = {"transformer": (0, 2)}  # the second has batch norm
# (accumulate, optimizer, checkpoint_activations, reshard), for each family; with 1 micro-batch, shares are empty
SETTINGS = {
    "few": ((3, "muon", True, True),),
    "all": ((1, "adamw", False, True), (3, "muon", True, True), (3, "adamw", True, False), (5, "muon", False, False)),
}
# what else changes a step, for one set of settings each: of the training, of the model, and of the batches
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "R-Drop": ("transformer", {"r_drop": 2.0}, {}),
    "R-Drop of masked tokens": ("bert (fill)", {"r_drop": 2.0}, {}),
    "R-Drop of a GPT": ("gpt", {"r_drop": 2.0, "max_grad_norm": 0.0}, {}),
    "guided alignment": ("transformer", {}, {"norm_first": True}),
    "guided alignment and R-Drop": ("transformer", {"r_drop": 2.0}, {}),
    "adapters": ("transformer", {"adapter": "lora"}, {}),
    "adapters of a GPT": ("gpt", {"adapter": "lora"}, {}),
    "adapters of a classifier": ("bert", {"adapter": "lora"}, {}),
    "numbers of texts": ("bert", {}, {"task": "regress"}),
    "numbers of graphs": ("graph", {}, {"block": "transformer", "pooling": "mean-sum", "score": "scaled-dot"}),
    "separate embeddings": ("transformer", {}, {"tie_embeddings": False}),
    "Adam": ("gpt", {"optimizer": "adam"}, {"tie_embeddings": False}),
}


class GivenBatches(BatchStream):
    """The same micro-batches of very different sizes, again and again."""

    def __init__(self, batches: list[Any]) -> None:
        self.given = batches

    def plan(self, position: StreamPosition = START) -> Iterator[PlannedBatch]:
        for number, batch in enumerate(cycle(self.given), 1):
            if number > position.batch:
                yield PlannedBatch(lambda batch=batch: batch, batch.num_targets, StreamPosition(0, number))


def cases(which: str) -> dict[str, tuple[str, int, TrainingSettings, str]]:
    """What is trained, by name: family, seed, settings and variant."""
    found = {
        f"{family} {seed}, {accumulate} micro-batches, {optimizer}": (
            family,
            seed,
            TrainingSettings(
                accumulate=accumulate,
                optimizer=optimizer,
                checkpoint_activations=recompute,
                reshard=reshard,
                ema=0.5,
                max_grad_norm=0.5,
                weight_decay=0.1,
            ),
            "",
        )
        for family in FAMILIES
        for seed in SEEDS.get(family, (0,))
        for accumulate, optimizer, recompute, reshard in SETTINGS[which]
    }
    for number, (variant, (family, training, _)) in enumerate(VARIANTS.items()):
        accumulate, optimizer, recompute, reshard = SETTINGS[which][number % len(SETTINGS[which])]
        chosen: dict[str, Any] = {"accumulate": accumulate, "optimizer": optimizer, "reshard": reshard, "ema": 0.5}
        chosen |= {"checkpoint_activations": recompute, "max_grad_norm": 0.5, "weight_decay": 0.1, **training}
        found[variant] = (family, 0, TrainingSettings(**chosen), variant)
    return found


def given_batch(case: Case, only: list[int], variant: str) -> Any:
    """A batch of some examples, with links or with numbers for labels if the variant needs them."""
    batch = case.cast(case.batch(only=only), torch.float64)
    if variant.startswith("guided"):  # each target token has a link to the first or the second source token
        assert isinstance(batch, SeqBatch)
        layout = batch.inputs.layout
        columns = layout.position % batch.source.layout.length[layout.segment_ids].clamp(max=2)
        weights = torch.full(layout.position.shape, 0.5)
        return replace(batch, links=LinkTargets(layout.segment_ids, layout.position, columns, weights))
    if variant.startswith("numbers"):
        numbers = torch.tensor([[i % 3 - 0.1 * n for n in range(case.vocabulary)] for i in only], dtype=torch.float64)
        if isinstance(batch, TextClassBatch):
            return replace(batch, class_ids=numbers)
        assert isinstance(batch, GraphBatch)
        return replace(batch, labels=numbers)
    return batch


def updates(family: str, seed: int, settings: TrainingSettings, variant: str = "", kind: str = "") -> dict[str, Tensor]:
    """Take a few steps on this process's shares; return losses, gradient norms, weights and moving averages.

    `kind` is one of `KINDS`, or "" for a single process.
    """
    settings = settings.model_copy(update={"parallel": kind.split()[0] if kind else "auto"})
    changes = VARIANTS[variant][2] if variant else {}
    case = make(family, seed, pairs=8, dropout=0.2, **changes)
    model = case.model.double()
    if settings.adapter == "lora":
        torch.manual_seed(1)
        add_adapters(model, 2, 4.0, TARGETS)
    for norm in model.modules():
        if isinstance(norm, BatchNorm):  # which computes its statistics in float32 always
            norm.running_mean, norm.running_variance = norm.running_mean.float(), norm.running_variance.float()
    chosen = [[0, 1, 2, 3, 4], [5], [6, 7], [2], [3, 5, 0]]
    batches = [given_batch(case, only, variant) for only in chosen]
    step = step_of(model, settings, kind)
    shares = shares_of(batches, step)
    results: dict[str, Tensor] = {}
    for number, share in enumerate(islice(shares, STEPS), 1):
        step.loss.zero_()
        results[f"targets {number}"] = torch.tensor(step(share.batches, number, 1e-2, share.idle))
        results[f"loss {number}"] = torch.tensor(distributed.all_sum(step.loss.item()), dtype=torch.float64)
        results[f"norm {number}"] = step.norm.clone()
        assert not step.nonfinite
    for name, tensor in tensor_io.model_tensors(model).items():
        results[f"weight {name}"] = sharding.whole(tensor).clone()
    for name, tensor in step.ema.tensors.items():  # type: ignore[union-attr]
        results[f"ema {name}"] = sharding.whole(tensor).clone()
    return results


def not_finite(kind: str, fault: str) -> dict[str, Tensor]:
    """Take a step, and then one in which a gradient or a loss of one process alone is not finite."""
    settings = TrainingSettings(accumulate=2, parallel=kind.split()[0] if kind else "auto")
    step = step_of(make("transformer", 0).model, settings, kind)
    batch = make("transformer", 0).batch()
    share = next(shares_of([batch], step))
    step(share.batches, 1, 1e-2, share.idle)
    results = {name: sharding.whole(t).clone() for name, t in tensor_io.model_tensors(step.model).items()}
    if distributed.rank() == distributed.world_size() - 1:
        if fault == "gradient":
            step._weighted = lambda loss: loss * math.nan  # type: ignore[method-assign]
        else:
            step.loss.fill_(math.inf)
    for number in (2, 3):
        step(share.batches, number, 1e-2, share.idle)
    assert step.nonfinite == 1 and step.nonfinite_step == 2
    for name, tensor in tensor_io.model_tensors(step.model).items():
        assert torch.equal(sharding.whole(tensor), results[name]), name
    return results


def shares_of(batches: list[Any], step: TrainingStep) -> Iterator[BatchShare]:
    """This process's shares of the batches of steps."""
    equal = isinstance(step, ParallelTrainingStep) and step.parallel is not None and step.parallel.equal_passes
    ranks = distributed.rank(), distributed.world_size()
    return GivenBatches(batches).shares(START, step.settings.accumulate, *ranks, equal)


def step_of(model: SequenceModel, settings: TrainingSettings, kind: str) -> TrainingStep:
    """The step of a model as `kind` takes it."""
    backend = accelerate.for_training(model, settings, CPU, say=lambda line: None)
    parallel: Any = OverlappedSums(model, None, bucket_bytes=3000) if kind == "ddp captured" else None  # many buckets
    if parallel is None:
        parallel = accelerate.data_parallel(model, settings, CPU, backend)
    optimizer = OPTIMIZERS[settings.optimizer](model, settings)
    ema = EMA(model, settings.ema) if settings.ema else None
    return make_step(model, optimizer, ema, settings, CPU, parallel=parallel)


def main(which: str, folder: Path) -> None:
    torch.set_num_threads(1)
    with distributed.joined(CPU, timeout=1800):
        for kind, fault in product(KINDS, ("gradient", "loss")):
            not_finite(kind, fault)
        results = {(kind, name): updates(*case, kind=kind) for name, case in cases(which).items() for kind in KINDS}
        if distributed.is_main():
            torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
