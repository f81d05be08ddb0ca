"""A loss or gradient that is not finite: weights stay unchanged, saved states survive, and the batch is reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import content, current_weights, equal, metrics, small, tensors, train_run
from torch import Tensor

from regard.cli import main
from regard.data.stream import BatchShare
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.recipes import load, to_toml
from regard.training.loop import CHECK_EVERY, Trainer


class InfiniteGrad(torch.autograd.Function):
    """x -> x, with a gradient of infinity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full_like(gradient, math.inf)


FAULTS = {
    "loss of NaN": lambda loss: loss * math.nan,
    "loss of infinity": lambda loss: loss + math.inf,
    "gradient of infinity": InfiniteGrad.apply,
}
kinds = pytest.mark.parametrize("kind", list(FAULTS))


class FaultInjector:
    """Makes the last loss of one update non-finite, and records all updates."""

    def __init__(self, patch: pytest.MonkeyPatch, step: int, kind: str) -> None:
        self.weights: list[dict[str, Tensor]] = []  # after each update
        self.moments: list[dict[str, Tensor]] = []
        self.batches: list[list[SeqBatch]] = []
        update, loss = Trainer._take_step, SequenceModel.forward

        def record_update(trainer: Trainer, share: BatchShare) -> None:
            calls = 0

            def faulty_forward(model: SequenceModel, batch: SeqBatch, *arguments: float) -> Tensor:
                nonlocal calls
                calls += 1
                plain = loss(model, batch, *arguments)
                return FAULTS[kind](plain) if trainer.progress.step == step and calls == len(share.batches) else plain

            with patch.context() as inner:
                inner.setattr(SequenceModel, "forward", faulty_forward)
                update(trainer, share)
            self.batches.append(list(share.batches.values()))
            self.weights.append(current_weights(trainer))
            states = [trainer.optimizer.state[p] for p in trainer.model.parameters()]
            self.moments.append({f"{i} {k}": v.clone() for i, s in enumerate(states) for k, v in s.items()})

        patch.setattr(Trainer, "_take_step", record_update)


@kinds
@pytest.mark.parametrize("step", [1, 7, 10])
def test_no_weights_change_at_a_non_finite_step_or_after_it(
    kind: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    injector = FaultInjector(monkeypatch, step, kind)
    recipe = small(tmp_path, steps=50, save_every=50, validate_every=50, accumulate=2)
    with pytest.raises(UserError, match=rf"not finite at step {step};"):
        train_run(recipe, tmp_path / "run")
    num_updates = len(injector.weights)
    assert step <= num_updates < step + CHECK_EVERY
    for later in range(step, num_updates):  # updates are counted from 1
        assert equal(injector.weights[later], injector.weights[step - 1])
    if step > 1:
        assert equal(injector.weights[step - 1], injector.weights[step - 2])
        assert all(equal(moments, injector.moments[step - 2]) for moments in injector.moments[step - 1 :])
        assert not equal(injector.weights[0], injector.weights[step - 2])
    assert all(torch.isfinite(tensor).all() for tensor in injector.weights[-1].values())
    assert not (tmp_path / "run" / "resume.safetensors").exists()


@kinds
def test_the_batch_is_saved_and_the_resume_state_is_unchanged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(small(tmp_path, steps=20, save_every=5, validate_every=5, accumulate=2)))
    recipe = load(str(file))
    uninterrupted = train_run(recipe, tmp_path / "whole")
    train_run(load(str(file), ["training.steps=5"]), tmp_path / "run")
    saved = content(tmp_path / "run")
    with monkeypatch.context() as patch:
        injector = FaultInjector(patch, 7, kind)
        with pytest.raises(SystemExit) as exited:
            main(["train", str(file), "--out", str(tmp_path / "run"), "--device", "cpu", "--quiet"])
    assert exited.value.code == 2
    message = capsys.readouterr().err
    batch = tmp_path / "run" / "not-finite-7.json"
    assert message.startswith("regard: the loss or its gradient was not finite at step 7;") and str(batch) in message
    assert "training.learning_rate" in message and len(message.splitlines()) == 1

    written = json.loads(batch.read_text())
    words = json.loads((tmp_path / "run" / "tokenizer.json").read_text())["words"]
    first = len(uninterrupted.tokenizers[0]) - len(words)

    def text(ids: Tensor) -> str:
        return " ".join(words[i - first] for i in ids.tolist()[:-1])  # without EOS

    pairs = [
        {"source": text(source), "target": text(target)}
        for batch in injector.batches[1]  # the second update after resuming at step 5
        for source, target in zip(
            batch.source.layout.split(batch.source.ids), batch.inputs.layout.split(batch.labels), strict=True
        )
    ]
    assert written == {"step": 7, "examples": pairs} and len(pairs) > 4
    assert all(pair["source"] == pair["target"] for pair in pairs)  # it is the copy task

    after = content(tmp_path / "run")
    # recipe.toml, and its copy in run.json: there, steps went from 5 to 20
    unchanged = [path for path in saved if path.name not in ("recipe.toml", "run.json")]
    assert {path: after[path] for path in unchanged} == {path: saved[path] for path in unchanged}
    assert all(torch.isfinite(tensor).all() for tensor in tensors(tmp_path / "run" / "resume.safetensors").values())

    train_run(recipe, tmp_path / "run")  # without the fault, training continues as if there had been none
    assert equal(tensors(tmp_path / "run" / "resume.safetensors"), tensors(uninterrupted.resume))
    assert [line["step"] for line in metrics(tmp_path / "run", "valid")] == [5, 10, 15, 20]


def test_a_non_finite_step_is_detected_before_anything_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is not finite, and step 4 would save, long before the next periodic check."""
    FaultInjector(monkeypatch, 3, "loss of NaN")
    with pytest.raises(UserError, match="at step 3;"):
        train_run(small(tmp_path, steps=50, save_every=4, validate_every=50), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.safetensors"))
