"""One process of a job that takes a few training steps in float64, for every family; run by test_parallel.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "invariants"))

from families import FAMILIES, make

from regard import accelerate, distributed, sharding, tensor_io
from regard.accelerate.overlapped_sums import OverlappedSums
from regard.data.stream import START, BatchStream, PlannedBatch, StreamPosition
from regard.nn.norms import BatchNorm
from regard.recipes.schema import TrainingSettings
from regard.registry import OPTIMIZERS
from regard.training.captured_step import make_step
from regard.training.checkpoint import EMA

CPU = torch.device("cpu")
STEPS = 3
KINDS = ("ddp", "fsdp", "ddp captured")  # the last sums gradients as captured steps do, on a CPU
SEEDS = {"transformer": (0, 2)}  # the second has batch norm
# (accumulate, optimizer, checkpoint_activations, reshard), for each family; with 1 micro-batch, shares are empty
SETTINGS = {
    "few": ((3, "muon", True, True),),
    "all": ((1, "adamw", False, True), (3, "muon", True, True), (3, "adamw", True, False), (5, "muon", False, False)),
}


class GivenBatches(BatchStream):
    """The same micro-batches of very different sizes, again and again."""

    def __init__(self, batches: list[Any]) -> None:
        self.given = batches

    def plan(self, position: StreamPosition = START) -> Iterator[PlannedBatch]:
        for number, batch in enumerate(cycle(self.given), 1):
            if number > position.batch:
                yield PlannedBatch(lambda batch=batch: batch, batch.num_targets, StreamPosition(0, number))


def cases(which: str) -> dict[str, tuple[str, int, TrainingSettings]]:
    """What is trained, by name."""
    return {
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
        )
        for family in FAMILIES
        for seed in SEEDS.get(family, (0,))
        for accumulate, optimizer, recompute, reshard in SETTINGS[which]
    }


def updates(family: str, seed: int, settings: TrainingSettings, kind: str = "") -> dict[str, Tensor]:
    """Take a few steps on this process's shares; return losses, gradient norms, weights and moving averages.

    `kind` is one of `KINDS`, or "" for a single process.
    """
    settings = settings.model_copy(update={"parallel": kind.split()[0] if kind else "auto"})
    case = make(family, seed, pairs=8, dropout=0.2)
    model = case.model.double()
    for norm in model.modules():
        if isinstance(norm, BatchNorm):  # which computes its statistics in float32 always
            norm.running_mean, norm.running_variance = norm.running_mean.float(), norm.running_variance.float()
    chosen = [[0, 1, 2, 3, 4], [5], [6, 7], [2], [3, 5, 0]]
    batches = [case.cast(case.batch(only=only), torch.float64) for only in chosen]
    backend = accelerate.for_training(model, settings, CPU, say=lambda line: None)
    parallel: Any = OverlappedSums(model, None, bucket_bytes=3000) if kind == "ddp captured" else None  # many buckets
    if parallel is None:
        parallel = accelerate.data_parallel(model, settings, CPU, backend)
    optimizer = OPTIMIZERS[settings.optimizer](model, settings)
    step = make_step(model, optimizer, EMA(model, settings.ema), settings, CPU, parallel=parallel)
    equal = parallel is not None and parallel.equal_passes
    ranks = distributed.rank(), distributed.world_size()
    shares = GivenBatches(batches).shares(START, settings.accumulate, *ranks, equal)
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


def main(which: str, folder: Path) -> None:
    torch.set_num_threads(1)
    with distributed.joined(CPU, timeout=300):
        results = {(kind, name): updates(*case, kind) for name, case in cases(which).items() for kind in KINDS}
        if distributed.is_main():
            torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
