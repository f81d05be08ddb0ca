"""Invariants of training: weights do not depend on interruptions or on how batches are accumulated."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SEEDS, Case
from small_training import assert_same_runs, measured
from torch import Tensor

from regard import tensor_io
from regard.data.packing import Packer
from regard.data.stream import START, BatchShare
from regard.packed import SeqBatch
from regard.run_dir import RunDir
from regard.training.loop import Interrupted, Trainer
from regard.training.setup import train


class Crash(Exception):
    pass


STOPS = ["crash", "SIGTERM", "SIGINT"]
EVERYDAY_CASES = [*zip(range(3), STOPS, strict=True)]
SLOW_CASES = [(seed, how) for seed in range(3) for how in STOPS if (seed, how) not in EVERYDAY_CASES]


@pytest.mark.invariant("resumed = uninterrupted")
@pytest.mark.parametrize(
    ("seed", "how"), [*EVERYDAY_CASES, *(pytest.param(*o, marks=pytest.mark.slow) for o in SLOW_CASES)]
)
def test_an_interrupted_run_equals_an_uninterrupted_one(
    recipe: Any, seed: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe(seed)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(settings, whole, device="cpu", quiet=True)
    assert len(measured(whole)) > 5
    update, stops = Trainer._take_step, [2, 7, 8, 11]  # before the first save, between saves, at one, before the end

    def stopping(self: Trainer, share: BatchShare) -> None:
        update(self, share)
        if stops and self.progress.step == stops[0]:
            stops.pop(0)
            if how == "crash":
                raise Crash
            os.kill(os.getpid(), getattr(signal, how))

    monkeypatch.setattr(Trainer, "_take_step", stopping)
    sessions = 0
    while True:
        sessions += 1
        try:
            train(settings, parts, device="cpu", quiet=True)
            break
        except (Crash, Interrupted):
            assert sessions < 9
    assert sessions == 5 and not stops
    assert_same_runs(whole, parts)


@pytest.mark.invariant("resumed = uninterrupted")
def test_more_steps_continue_a_finished_run(recipe: Any, tmp_path: Path) -> None:
    """A run that finished at 8 steps and was continued to 12 has the weights of a run of 12 steps."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(recipe(0), whole, device="cpu", quiet=True)
    train(recipe(0, steps=8), parts, device="cpu", quiet=True)
    train(recipe(0), parts, device="cpu", quiet=True)
    one, other = (tensor_io.load(run / "resume.safetensors")[0] for run in (whole, parts))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.invariant("resumed = uninterrupted")
def test_a_finished_run_is_not_changed(recipe: Any, tmp_path: Path) -> None:
    train(recipe(0), tmp_path / "run", device="cpu", quiet=True)
    before = {file: file.read_bytes() for file in sorted((tmp_path / "run").rglob("*")) if file.is_file()}
    train(recipe(0), tmp_path / "run", device="cpu", quiet=True)
    assert {file: file.read_bytes() for file in sorted((tmp_path / "run").rglob("*")) if file.is_file()} == before


@pytest.mark.invariant("accumulated = one big batch")
@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed % 3 != 2])  # batch norm depends on the batch
def test_accumulated_batches_give_the_gradients_of_one_large_batch(
    case: Any, recipe: Any, seed: int, tmp_path: Path
) -> None:
    """In float64: in float32 the order of the sums changes the small gradients of large sums by more than 1e-5."""
    made: Case = case(seed, pairs=9)
    made.model.double()
    run = RunDir.create(tmp_path / "run", recipe(seed, max_grad_norm=0.0, label_smoothing=0.1))

    def gradients(batches: list[SeqBatch]) -> dict[str, Tensor]:
        """Return the gradients that the optimizer gets for these batches."""
        trainer = Trainer(run, made.model, None, None, None, torch.device("cpu"))  # type: ignore[arg-type]
        given: dict[str, Tensor] = {}

        def read_grads(*_: Any) -> None:
            given.update({name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None})

        trainer.optimizer.step = read_grads  # type: ignore[method-assign]
        exact = [made.cast(batch, torch.float64) for batch in batches]
        trainer._take_step(BatchShare(dict(enumerate(exact)), START))
        return given

    large = gradients([made.batch()])
    small = gradients([made.batch(only=[0, 1, 2, 3]), made.batch(only=[4]), made.batch(spare=3, only=[5, 6, 7, 8])])
    assert large.keys() == small.keys() and any(g.abs().max() > 1e-3 for g in large.values())
    for name, tensor in large.items():
        torch.testing.assert_close(small[name], tensor, atol=1e-11, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.invariant("accumulated = one big batch")
def test_each_update_gets_the_next_batches_of_the_stream(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Update s of k batches gets batches (s - 1) k ... s k - 1 of the stream."""
    seen: list[list[list[int]]] = []
    monkeypatch.setattr(
        Trainer,
        "_take_step",
        lambda self, share: seen.append([batch.labels.tolist() for batch in share.batches.values()]),
    )
    monkeypatch.setattr(Trainer, "_save", lambda self: None)
    packers: list[Packer] = []
    start = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self: (packers.append(self.stream), start(self)))
    train(
        recipe(0, accumulate=3, steps=4, average=0, patience=0, save_every=50),
        tmp_path / "run",
        device="cpu",
        quiet=True,
    )
    expected = [packers[0].batch_at(n).labels.tolist() for n in range(12)]
    assert seen == [expected[n : n + 3] for n in range(0, 12, 3)]


def test_each_step_of_each_seed_draws_its_own_dropout(
    recipe: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[float, ...]] = []
    update = Trainer._take_step

    def listening(self: Trainer, share: BatchShare) -> None:
        loss = self.model.forward

        def drawing(*arguments: Any) -> Tensor:
            state = torch.random.get_rng_state()
            drawn.append(tuple(torch.rand(4).tolist()))  # the numbers that dropout would draw
            torch.random.set_rng_state(state)
            return loss(*arguments)

        monkeypatch.setattr(self.model, "forward", drawing)
        update(self, share)
        monkeypatch.setattr(self.model, "forward", loss)

    monkeypatch.setattr(Trainer, "_take_step", listening)
    for seed in (0, 1):
        train(recipe(seed, steps=5, accumulate=2), tmp_path / str(seed), device="cpu", quiet=True)
    assert len(drawn) == len(set(drawn)) == 2 * 5 * 2  # seeds, steps, and batches of one step
