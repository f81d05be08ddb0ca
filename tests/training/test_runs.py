"""Complete runs: saved weights, stopping, resuming, starting from another run, and logs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import (
    HELD_OUT,
    content,
    current_weights,
    equal,
    interrupt,
    metrics,
    script_validations,
    small,
    tensors,
    train_run,
)
from torch import Tensor

from regard import taps, tensor_io
from regard.api import Model
from regard.data.stream import BatchShare
from regard.errors import UserError
from regard.packed import SeqBatch
from regard.recipes.schema import Recipe
from regard.recipes.to_toml import shown
from regard.run_dir import RunDir, kept_snapshots
from regard.tasks.validator import Validation
from regard.text import BOS
from regard.training.loop import LOG_EVERY, Interrupted, Trainer
from regard.training.progress import PlainReporter
from regard.training.schedule import rate

# -- saved weights -----------------------------------------------------------------------------------------------------


def test_the_mean_of_snapshots_is_the_arithmetic_mean(tmp_path: Path) -> None:
    run = train_run(small(tmp_path, save_every=4, average=3, model={"norm": "batch"}), tmp_path / "run")
    files = list(run.snapshots().values())
    assert [file.name for file in files] == [f"step-{step:08d}.safetensors" for step in (4, 8, 12)]
    mean = tensor_io.mean(files)
    four, eight, twelve = map(tensors, files)
    assert mean.keys() == four.keys()
    for name, tensor in mean.items():
        expected = torch.stack([part[name].double() for part in (four, eight, twelve)]).mean(0)
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected.float()), name


@pytest.mark.parametrize(("value", "kept"), [(0.7, "average of 2"), (0.8, "step"), (0.85, "step")])
def test_the_average_is_kept_only_if_its_validation_is_better(
    value: float, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = script_validations(monkeypatch, [Validation(1.0), Validation(0.9), Validation(0.8), Validation(value)])
    run = train_run(small(tmp_path, average=2), tmp_path / "run")
    assert next(remaining, None) is None
    validations = [(line["step"], line["weights"], line["loss"], line["better"]) for line in metrics(run.path, "valid")]
    expected = [(4, "step", 1.0, True), (8, "step", 0.9, True), (12, "step", 0.8, True)]
    assert validations == [*expected, (12, "average of 2", value, kept != "step")]
    last = list(run.snapshots().values())[-2:]
    assert equal(tensors(run.best), tensors(last[1]) if kept == "step" else tensor_io.mean(last))


def test_weights_are_selected_by_name(tmp_path: Path) -> None:
    run = train_run(small(tmp_path, steps=14, average=2), tmp_path / "run")
    four, eight, twelve = (tensors(run.snapshot(step)) for step in (4, 8, 12))
    mean = tensor_io.mean([run.snapshot(8), run.snapshot(12)])
    last = {name.removeprefix("model."): t for name, t in tensors(run.resume).items() if name.startswith("model.")}
    expected = {"best": (tensors(run.best), None), "last": (last, 14), "average": (mean, 12), "step-4": (four, 4)}
    expected |= {"step-00000008": (eight, 8), str(run.snapshot(12)): (twelve, 12)}
    for name, (weights, step) in expected.items():
        assert equal(tensor_io.model_tensors(run.model(weights=name)), weights), name
        assert step is None or run.checkpoint(name).step == step
    assert not equal(last, twelve) and not equal(mean, twelve)
    with pytest.raises(
        UserError, match=r"run has no weights step-5; .*has best, last, average, step-4, step-8, step-12"
    ):
        run.model(weights="step-5")
    run.resume.unlink()  # as if the run had been copied without it
    assert equal(run.checkpoint("last").load(), twelve)
    run.snapshot(8).unlink()
    run.snapshot(4).unlink()
    with pytest.raises(UserError, match=r"has no weights average; .*has best, last, step-12; an average needs"):
        run.model(weights="average")


@pytest.mark.parametrize(
    ("steps", "every", "average", "kept"),
    [
        ([10], 10, 5, {10}),
        ([10, 20, 30], 10, 0, {10, 20, 30}),  # the 1st, the 2nd, and always the last
        (list(range(10, 110, 10)), 10, 0, {10, 20, 40, 80, 100}),
        (list(range(10, 110, 10)), 10, 3, {10, 20, 40, 80, 90, 100}),
        ([500, 1000, 2000, 4000, 4500, 5000], 500, 2, {500, 1000, 2000, 4000, 4500, 5000}),
        ([10, 20, 40, 45, 60], 15, 1, {60}),  # save_every changed: 45 is the 3rd of 15, 60 the 4th and last
    ],
)
def test_the_policy_selects_snapshots(steps: list[int], every: int, average: int, kept: set[int]) -> None:
    assert kept_snapshots(steps, every, average) == kept


def test_a_run_keeps_the_snapshots_of_the_policy(tmp_path: Path) -> None:
    run = train_run(small(tmp_path, steps=22, save_every=2, average=2, validate_every=22), tmp_path / "run")
    assert list(run.snapshots()) == [2, 4, 8, 16, 20, 22]


def test_files_that_are_not_named_like_snapshots_are_ignored(tmp_path: Path) -> None:
    run = train_run(small(tmp_path, steps=8, average=2), tmp_path / "run")
    strays = [run.snapshot(4).with_name(name) for name in ("step-00000004 (1).safetensors", "step-best.safetensors")]
    for stray in strays:
        stray.write_bytes(run.snapshot(4).read_bytes())
    assert list(run.snapshots()) == [4, 8]
    train_run(small(tmp_path, steps=16, average=2), run.path)
    assert list(run.snapshots()) == [4, 8, 12, 16] and all(stray.exists() for stray in strays)


@pytest.mark.parametrize(("best", "step"), [("loss", 12), ("bleu", 8)])
def test_the_recipe_chooses_the_metric_of_the_best_weights(
    best: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_validations(
        monkeypatch, [Validation(1.0, 10.0, 0.0, 0.0), Validation(0.9, 30.0, 0.0, 0.0), Validation(0.8, 20.0, 0.0, 0.0)]
    )
    run = train_run(small(tmp_path, best=best, validate_lines=1), tmp_path / "run")
    assert equal(tensors(run.best), tensors(run.snapshot(step)))
    others = [s for s in (4, 8, 12) if s != step]
    assert not any(equal(tensors(run.best), tensors(run.snapshot(other))) for other in others)


# -- when a run stops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [None, 0.5, 1.5])  # none; better than every validation; worse than all
def test_patience_ends_a_run_and_is_logged(
    average: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [1.0, 0.9, 0.95, 0.9]  # an equal loss is not better
    remaining = script_validations(
        monkeypatch, [Validation(loss) for loss in [*losses, *([] if average is None else [average])]]
    )
    recipe = small(tmp_path, steps=100, validate_every=2, save_every=2, patience=2, average=2 if average else 0)
    run = train_run(recipe, tmp_path / "run")
    assert next(remaining, None) is None  # exactly these validations ran
    stop = {"step": 8, "kind": "stop", "validations": 2, "best_step": 8 if average == 0.5 else 4}
    assert metrics(run.path)[-1] == stop
    assert tensors(run.resume).keys() and max(run.snapshots()) == 8
    before = content(run.path)
    train_run(recipe, run.path, quiet=False)  # the same command again: nothing to do, no validation runs
    assert content(run.path) == before
    printed = capsys.readouterr().err
    assert "already trained to step 8; raise training.patience to go on" in printed and "resuming" not in printed


def test_more_patience_lets_a_stopped_run_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remaining = script_validations(monkeypatch, [Validation(loss) for loss in (1.0, 2.0, 2.0, 0.5, 0.6, 0.7)])
    settings = {"steps": 12, "validate_every": 2, "save_every": 2}
    train_run(small(tmp_path, patience=2, **settings), tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["kind"] == "stop"
    run = train_run(small(tmp_path, patience=3, **settings), tmp_path / "run")
    assert next(remaining, None) is None
    assert [line["step"] for line in metrics(run.path, "valid")] == [2, 4, 6, 8, 10, 12]
    assert equal(tensors(run.best), tensors(run.snapshot(8)))


@pytest.mark.parametrize("steps", [3, 2])
def test_a_run_interrupted_before_its_first_validation_is_validated_when_it_ends(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, at=3)
    with pytest.raises(Interrupted):
        train_run(small(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()
    monkeypatch.undo()
    run = train_run(small(tmp_path, steps=steps), tmp_path / "run")
    uninterrupted = train_run(small(tmp_path, steps=3), tmp_path / "whole")
    assert equal(tensors(run.best), tensors(uninterrupted.best)) and Model(run, "cpu").step == 3
    seen, expected = ([(line["step"], line["loss"]) for line in metrics(r.path, "valid")] for r in (run, uninterrupted))
    assert seen == expected


def test_a_finished_run_has_weights_even_if_no_validation_was_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_validations(monkeypatch, [Validation(float("nan")), Validation(float("nan"))])
    run = train_run(small(tmp_path, steps=8), tmp_path / "run")
    assert equal(tensors(run.best), tensors(run.snapshot(8)))
    run.best.unlink()
    train_run(small(tmp_path, steps=8), tmp_path / "run")  # also if they were removed afterwards
    assert equal(tensors(run.best), tensors(run.snapshot(8)))


def test_a_run_that_reaches_its_last_step_logs_no_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script_validations(monkeypatch, [Validation(1.0), Validation(2.0), Validation(3.0)])
    run = train_run(small(tmp_path, patience=2), tmp_path / "run")
    assert not metrics(run.path, "stop")


def test_the_reporter_reports_that_patience_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    PlainReporter().measured(8, "stop", {"validations": 2, "best_step": 4})
    assert capsys.readouterr().err == "stopped after step 8: nothing better in 2 validations on the held-out pairs\n"


@pytest.mark.parametrize(
    ("members", "numbers", "words"),
    [
        ("pairs", {"bleu": 20.0}, "held-out pairs after step 8: loss 1.000, BLEU 20.00, exact 50.0 %"),
        ("documents", {}, "held-out text after step 8: loss 1.000, accuracy 50.0 %"),
        ("nodes", {}, "held-out nodes after step 8: loss 1.000, accuracy 50.0 %"),
    ],
)
def test_the_reporter_names_what_was_measured(
    members: str, numbers: dict[str, float], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = PlainReporter()
    reporter.members = members
    reporter.measured(8, "valid", {"loss": 1.0, "exact": 50.0, **numbers, "weights": "step", "better": False})
    assert capsys.readouterr().err == words + "\n"


def test_no_pace_is_reported_after_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 30))  # seconds: every reading is 30 s after the last one
    monkeypatch.setattr("regard.training.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    reporter = PlainReporter()
    reporter.start(0, 100)
    reporter.step(1, 5_000)
    assert capsys.readouterr().err == ""
    reporter.step(2, 10_000)
    assert capsys.readouterr().err.startswith("step 2 of 100  ")


@pytest.mark.parametrize(("steps", "warned"), [(4, True), (5, False)])
def test_a_run_that_ends_during_warm_up_causes_a_warning(
    steps: int, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_run(small(tmp_path, steps=steps, warmup=4), tmp_path / "run", quiet=False)
    assert ("the learning rate rises to the last of 4 steps" in capsys.readouterr().err) is warned


# -- resuming a run ----------------------------------------------------------------------------------------------------


def test_a_finished_run_continues_when_given_more_steps(tmp_path: Path) -> None:
    run = train_run(small(tmp_path), tmp_path / "run")
    before = content(run.path)
    train_run(small(tmp_path), run.path)
    assert content(run.path) == before
    train_run(small(tmp_path, steps=20), run.path)
    assert [line["step"] for line in metrics(run.path, "valid")] == [4, 8, 12, 16, 20]
    assert RunDir(run.path).recipe.training.steps == 20
    assert not equal(tensors(run.snapshot(16)), tensors(run.snapshot(20)))


@pytest.mark.parametrize(
    "changes",
    [
        {"validate_every": 3},
        {"save_every": 5},
        {"precision": "bf16"},
        {"patience": 9},
        {"validate_lines": 1},
        {"backend": "plain"},
        {"checkpoint_activations": True},
        {"tensorboard": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_that_may_change_when_a_run_is_resumed(changes: dict[str, Any], tmp_path: Path) -> None:
    run = train_run(small(tmp_path, steps=4), tmp_path / "run")
    recipe = small(tmp_path, steps=8, **changes)
    train_run(recipe, run.path)
    assert RunDir(run.path).recipe == recipe
    assert metrics(run.path, "valid")[-1]["step"] == 8


@pytest.mark.parametrize(
    ("section", "key", "old", "new"),
    [
        ("training", "seed", 1, 2),
        ("training", "batch_tokens", 64, 80),
        ("training", "learning_rate", None, 0.5),
        ("model", "width", 8, 12),
        ("data", "count", 40, 39),
        ("text", "shared", True, False),
    ],
)
def test_other_settings_may_not_change(section: str, key: str, old: Any, new: Any, tmp_path: Path) -> None:
    recipe = small(tmp_path, steps=4)
    run = train_run(recipe, tmp_path / "run")
    before = content(run.path)
    plain = recipe.model_dump()
    plain[section][key] = new
    with pytest.raises(UserError) as caught:
        train_run(Recipe.model_validate(plain), run.path)
    before_and_now = f"{section}.{key} was {shown(old)} and is now {shown(new)}"
    assert before_and_now in str(caught.value) and "--out" in str(caught.value) and "None" not in str(caught.value)
    assert content(run.path) == before


@pytest.mark.parametrize(("file", "what"), [("pairs.tsv", "training data"), ("held-out.target", "held-out data")])
def test_a_run_is_not_resumed_with_other_data(file: str, what: str, tmp_path: Path) -> None:
    """Rewritten files with the same content are accepted; changed content is not."""
    pairs, changed = tmp_path / "pairs.tsv", tmp_path / file
    pairs.write_text("".join(f"{a} {b}\t{b} {a}\n" for a in "abcd" for b in "efgh"))
    short, long = (small(tmp_path, data={"pairs": str(pairs)}, steps=steps) for steps in (4, 8))
    run = train_run(short, tmp_path / "run")
    before, kept = tensors(run.resume), changed.read_text()
    changed.write_text(kept.replace("c", "d"))
    with pytest.raises(UserError, match=f"the {what} are no longer those that .*run was trained with"):
        train_run(long, run.path)
    assert equal(tensors(run.resume), before)
    changed.write_text(kept)
    assert metrics(train_run(long, run.path).path, "valid")[-1]["step"] == 8


def test_a_run_is_resumed_with_the_same_files_in_another_folder(tmp_path: Path) -> None:
    def recipe(folder: Path, steps: int) -> Recipe:
        folder.mkdir(exist_ok=True)
        (folder / "pairs.tsv").write_text("".join(f"{a} {b}\t{b} {a}\n" for a in "abcd" for b in "efgh"))
        plain = small(folder, data={"pairs": "pairs.tsv", "folder": str(folder)}, steps=steps).model_dump()
        plain["data"]["valid"] = ["held-out.source", "held-out.target"]
        return Recipe.model_validate(plain)

    uninterrupted = train_run(recipe(tmp_path / "here", 8), tmp_path / "whole")
    train_run(recipe(tmp_path / "here", 4), tmp_path / "run")
    run = train_run(recipe(tmp_path / "there", 8), tmp_path / "run")
    assert equal(tensors(run.resume), tensors(uninterrupted.resume))
    assert RunDir(run.path).recipe.data.folder == str(tmp_path / "there")


def test_equal_runs_write_identical_files(tmp_path: Path) -> None:
    one, other = (train_run(small(tmp_path, steps=4), tmp_path / name) for name in ("one", "other"))
    for name in ("model.safetensors", "snapshots/step-00000004.safetensors"):
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


def test_a_run_that_never_started_may_still_change(tmp_path: Path) -> None:
    """A first attempt that fails on its data must not block a corrected second one."""
    recipe = small(tmp_path, steps=4)
    plain = recipe.model_dump()
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a b c\tx y z\n" * 20)
    plain["data"] |= {"corpus": None, "count": None, "pairs": str(pairs), "valid": None}
    with pytest.raises(UserError, match=r"set data\.valid"):
        train_run(Recipe.model_validate(plain), tmp_path / "run")
    train_run(recipe, tmp_path / "run")
    train_run(recipe, tmp_path / "other")
    for name in ("recipe.toml", "tokenizer.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
    assert equal(tensors(tmp_path / "run" / "resume.safetensors"), tensors(tmp_path / "other" / "resume.safetensors"))


@pytest.mark.parametrize("change", [{"steps": 8}, {"seed": 2}])
def test_a_run_that_is_being_trained_is_not_changed_by_a_second_command(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even before its first weights are saved, when the recipe could otherwise still change."""
    update, tried = Trainer._take_step, []

    def train_twice(self: Trainer, share: BatchShare) -> None:
        if not tried:
            tried.append(self.progress.step)
            before = content(tmp_path / "run")
            with pytest.raises(UserError, match="another process is training there"):
                train_run(small(tmp_path, **change), tmp_path / "run")
            assert content(tmp_path / "run") == before
        update(self, share)

    monkeypatch.setattr(Trainer, "_take_step", train_twice)
    train_run(small(tmp_path), tmp_path / "run")
    assert tried == [1]


# -- starting from another run -----------------------------------------------------------------------------------------


def test_a_run_may_start_from_the_weights_and_the_vocabulary_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = train_run(small(tmp_path, steps=8), tmp_path / "origin")
    first: list[dict[str, Tensor]] = []
    begin = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self: (first.append(current_weights(self)), begin(self))[1])
    pairs = tmp_path / "other.tsv"
    pairs.write_text("".join(f"{word} a b\t{word} b a\n" for word in ("one", "two", "three")))
    recipe = small(tmp_path, steps=4, seed=7, data={"pairs": str(pairs)})
    run = train_run(recipe, tmp_path / "run", start_from=origin.path)
    assert equal(first[0], tensors(origin.best))
    assert (run.path / "tokenizer.json").read_bytes() == (origin.path / "tokenizer.json").read_bytes()
    assert "one" not in (run.path / "tokenizer.json").read_text()
    assert not equal(tensors(run.snapshot(4)), tensors(origin.best))
    before = content(run.path)
    train_run(recipe, run.path, start_from=origin.path)  # the same command again starts nothing anew
    assert content(run.path) == before


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"width": 12, "dropout": 0.2, "size": "base"},
         r'not fit this model: model\.size is "small" there and "base" here, model\.width is 8 there and 12 here; set'),
        ({"decoder_layers": 2}, r"origin do not fit this model: model\.decoder_layers is 1 there and 2 here; set them"),
        ({"tie_embeddings": False}, r"do not fit this model: model\.tie_embeddings is true there and false here;"),
        ({"family": "recurrent", "width": 8, "heads": 2}, r"model\.family is transformer there and recurrent here"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_with_all_settings_that_differ(
    model: dict[str, Any], words: str, tmp_path: Path
) -> None:
    origin = train_run(small(tmp_path, steps=4), tmp_path / "origin")
    plain = small(tmp_path).model_dump()
    plain["model"] = model if "family" in model else {**plain["model"], **model}
    with pytest.raises(UserError, match=words):
        train_run(Recipe.model_validate(plain), tmp_path / "run", start_from=origin.path)
    refused = RunDir(tmp_path / "run")  # the next call, which may not name the other run, begins with fresh weights
    assert refused.origin is None and not refused.has_tokenizers()


def test_weights_that_fit_but_were_trained_with_other_settings_cause_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = train_run(small(tmp_path, steps=4), tmp_path / "origin")
    other = small(tmp_path, steps=4, model={"heads": 4, "dropout": 0.3})
    train_run(other, tmp_path / "run", start_from=origin.path, quiet=False)
    printed = capsys.readouterr().err
    assert "origin were trained with other settings: model.heads is 2 there and 4 here\n" in printed


def write_pairs(file: Path, *words: str) -> str:
    file.write_text("".join(f"{word} a b\t{word} b a\n" for word in words))
    return str(file)


def test_held_out_files_of_the_old_data_cause_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (write_pairs(tmp_path / f"{name}.tsv", "one", "two", "three") for name in ("old", "new"))
    origin = train_run(small(tmp_path, steps=4, data={"pairs": old, "test": [old]}), tmp_path / "origin")

    def warning(name: str, recipe: Recipe) -> str:
        capsys.readouterr()
        train_run(recipe, tmp_path / name, start_from=origin.path, quiet=False)
        return "\n".join(line for line in capsys.readouterr().err.splitlines() if "old data" in line)

    valid = f"data.valid ({tmp_path}/held-out.source, {tmp_path}/held-out.target)"
    both = warning("a", small(tmp_path, steps=4, data={"pairs": new, "test": [old]}))
    assert both.startswith(
        f"warning: the training data are not those of {origin.path}, but {valid} and data.test ({old})"
    )
    assert both.endswith("the best weights are chosen on the old data; set data.valid and data.test as well")
    one = warning("b", small(tmp_path, steps=4, data={"pairs": new, "test": [new]}))
    assert valid in one and "data.test" not in one
    assert warning("c", small(tmp_path, steps=4, data={"pairs": old, "test": [old]})) == ""
    changed = small(tmp_path, steps=4, data={"pairs": new, "test": [new]}).model_dump()
    changed["data"]["valid"] = [new]
    assert warning("d", Recipe.model_validate(changed)) == ""


def test_the_weights_a_run_starts_from_are_validated_and_may_stay_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = train_run(small(tmp_path, steps=4), tmp_path / "origin")
    assert metrics(origin.path, "valid")[0]["step"] == 4  # fresh weights are not validated
    script_validations(monkeypatch, [Validation(1.0), Validation(1.5), Validation(1.4)])
    run = train_run(small(tmp_path, steps=8, seed=2), tmp_path / "run", start_from=origin.path, quiet=False)
    validations = [(line["step"], line["loss"], line["better"]) for line in metrics(run.path, "valid")]
    assert validations == [(0, 1.0, True), (4, 1.5, False), (8, 1.4, False)]
    assert equal(tensors(run.best), tensors(origin.best)) and run.checkpoint().step == 0
    printed = capsys.readouterr().err
    assert "before training (step 0): loss 1.000" in printed
    assert "kept as best: the starting weights, step 0 (loss 1.000), by the lowest loss" in printed
    assert f"warning: training made nothing better: model.safetensors holds the weights of {origin.path}" in printed


def test_a_run_that_only_validated_its_start_may_still_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = train_run(small(tmp_path, steps=4), tmp_path / "origin")

    def fail(self: Trainer, share: BatchShare) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Trainer, "_take_step", fail)
        train_run(small(tmp_path, steps=4), tmp_path / "run", start_from=origin.path)
    run = train_run(small(tmp_path, steps=4, batch_tokens=32), tmp_path / "run", start_from=origin.path)
    assert [line["step"] for line in metrics(run.path, "valid")] == [0, 4]


@pytest.mark.parametrize("shared", [True, False])
def test_new_tags_get_new_embeddings(shared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tagged(**tags: str) -> Recipe:
        plain = small(tmp_path, steps=2, model={"tie_embeddings": False}, data={"corpus": "copy", "count": 40, **tags})
        return Recipe.model_validate({**plain.model_dump(), "text": {"unit": "word", "shared": shared}})

    origin = train_run(tagged(target_tag="<old>"), tmp_path / "origin")
    settings = tagged(target_tag="<new>", source_tag="<old>")
    first: list[dict[str, Tensor]] = []
    begin = Trainer.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", lambda self: (first.append(current_weights(self)), begin(self))[1])
        run = train_run(settings, tmp_path / "run", start_from=origin.path, quiet=False)
    assert "new tags: <new> (a new tag starts as the mean" in capsys.readouterr().err
    (source, target), (_, before) = run.tokenizers, origin.tokenizers
    assert target.tags == ("<old>", "<new>") and target.words == before.words
    assert source.tags == (("<old>", "<new>") if shared else ("<old>",))
    there, here = tensors(origin.best), first[0]
    for name in ("target_embedding.table" if not shared else "source_embedding.table", "output"):
        old, new, at = there[name], here[name], before.first
        assert torch.equal(torch.cat([new[:at], new[at + 1 :]]), old)
        assert torch.equal(new[at], old.mean(0))
    assert all(torch.equal(there[n], here[n]) for n in there if "embedding" not in n and n != "output")
    assert run.model()  # it loads again, with all embeddings


def test_the_vocabulary_of_another_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    origin = train_run(small(tmp_path, steps=2), tmp_path / "origin")
    plain = small(tmp_path, steps=2).model_dump()
    plain["text"] |= {"vocabulary": 300, "unit": "char"}
    train_run(Recipe.model_validate(plain), tmp_path / "run", start_from=origin.path, quiet=False)
    printed = capsys.readouterr().err
    assert (
        f'vocabulary: that of {origin.path} (24 tokens, word); text.unit = "char" and text.vocabulary = 300' in printed
    )


def test_a_missing_test_file_is_reported_before_training(tmp_path: Path) -> None:
    recipe = small(tmp_path, data={"corpus": "copy", "count": 40, "test": [str(tmp_path / "none.tsv")]})
    with pytest.raises(UserError, match=r"data\.test: no such file: .*none\.tsv .*data\.test = \[\] trains without"):
        train_run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train_run(small(tmp_path, steps=1, data={"corpus": "copy", "count": 40, "test": []}), tmp_path / "run")


def test_an_average_that_is_not_kept_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script_validations(
        monkeypatch, [Validation(1.0, 10.0), Validation(0.9, 11.0), Validation(0.95, 10.5), Validation(0.91, 12.0)]
    )
    train_run(small(tmp_path, average=2), tmp_path / "run", quiet=False)
    *_, kept, lost = capsys.readouterr().err.splitlines()
    assert kept == "kept as best: step 8 (loss 0.900, BLEU 11.00), by the lowest loss on the held-out data"
    assert lost.startswith("not kept: the average of the last 2 snapshots (loss 0.910, BLEU 12.00); its BLEU is higher")
    assert lost.endswith("--weights average uses it")
    train_run(small(tmp_path, average=2), tmp_path / "run", quiet=False)
    assert capsys.readouterr().err.splitlines()[-1] == kept


def test_a_run_that_crashed_before_its_first_save_starts_from_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (train_run(small(tmp_path, steps=4, seed=seed), tmp_path / f"from-{seed}") for seed in (1, 2))
    recipe = small(tmp_path, steps=4, seed=7)
    begin, first = Trainer.train, []

    def fail(self: Trainer) -> None:
        raise KeyError("power")

    def crash(run: str, **options: Any) -> None:
        monkeypatch.setattr(Trainer, "train", fail)
        with pytest.raises(KeyError):
            train_run(recipe, tmp_path / run, **options)
        monkeypatch.setattr(Trainer, "train", lambda self: (first.append(current_weights(self)), begin(self))[1])

    crash("a", start_from=one.path)
    train_run(recipe, tmp_path / "a", quiet=False)
    assert equal(first.pop(), tensors(one.best)) and f"beginning with {one.path}" in capsys.readouterr().err
    before = content(tmp_path / "a")
    train_run(recipe, tmp_path / "a")  # it has its own resume state now
    train_run(recipe, tmp_path / "a", start_from=one.path)
    assert content(tmp_path / "a") == before

    crash("b", start_from=one.path)
    train_run(
        recipe, tmp_path / "b", start_from=other.path
    )  # nothing was saved yet, so it may start from other weights
    assert equal(first[-1], tensors(other.best))
    crash("c")
    train_run(recipe, tmp_path / "c", start_from=other.path)
    assert equal(first[-1], tensors(other.best))


def test_a_trained_run_cannot_start_from_other_weights(tmp_path: Path) -> None:
    origin, run = (train_run(small(tmp_path, steps=4), tmp_path / name) for name in ("origin", "run"))
    with pytest.raises(UserError, match=r"run began with fresh weights, not with .*origin: choose another --out"):
        train_run(small(tmp_path, steps=4), run.path, start_from=origin.path)


# -- logs --------------------------------------------------------------------------------------------------------------


def test_metrics_have_one_object_per_line(tmp_path: Path) -> None:
    recipe = small(tmp_path, steps=60, validate_every=20, validate_lines=3, accumulate=2)
    run = train_run(recipe, tmp_path / "run")
    train, valid = metrics(run.path, "train"), metrics(run.path, "valid")
    assert [line["step"] for line in train] == [LOG_EVERY, 60] and [line["step"] for line in valid] == [20, 40, 60]
    assert len(metrics(run.path)) == 5
    for line in train:
        assert line.keys() == {"step", "kind", "loss", "learning_rate", "gradient", "tokens", "seconds"}
        assert line["learning_rate"] == rate(recipe.training, 8, line["step"])
        assert 0 < line["loss"] < 10 and line["gradient"] > 0
    assert 0 < train[0]["tokens"] < train[1]["tokens"] <= 60 * 2 * 64
    for line in valid:
        assert {"loss", "perplexity", "bleu", "chrf", "exact", "weights", "better", "seconds"} <= line.keys()
        assert line["perplexity"] == pytest.approx(2.718281828 ** line["loss"], rel=1e-4)
    times = [line["seconds"] for line in metrics(run.path)]
    assert times == sorted(times)


def test_the_logged_loss_is_the_mean_per_token_since_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, int]] = []
    update = Trainer._take_step

    def record_loss(self: Trainer, share: BatchShare) -> None:
        before = self.training_step.loss.item()
        update(self, share)
        seen.append(
            (self.training_step.loss.item() - before, sum(batch.num_targets for batch in share.batches.values()))
        )

    monkeypatch.setattr(Trainer, "_take_step", record_loss)
    run = train_run(small(tmp_path, steps=60, save_every=7, validate_every=60, accumulate=2), tmp_path / "run")
    for line, part in zip(metrics(run.path, "train"), (seen[:50], seen[50:]), strict=True):
        losses, tokens = zip(*part, strict=True)
        assert line["loss"] == pytest.approx(sum(losses) / sum(tokens), rel=1e-5)
    assert metrics(run.path, "train")[-1]["tokens"] == sum(tokens for _, tokens in seen)


def test_samples_with_unicode_line_breaks_survive_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [f"one{sign}two" for sign in "\u2028\u0085\x0c\r"]
    samples = [{"source": text, "reference": text, "output": text} for text in odd]
    script_validations(monkeypatch, [Validation(1.0, samples=samples), Validation(0.9)])
    train_run(small(tmp_path, steps=4), tmp_path / "run")
    before = (tmp_path / "run" / "samples.jsonl").read_bytes()
    assert [json.loads(line)["source"] for line in before.decode().split("\n")[:-1]] == odd
    train_run(small(tmp_path, steps=8), tmp_path / "run")
    assert (tmp_path / "run" / "samples.jsonl").read_bytes() == before


def test_the_samples_are_held_out_lines(tmp_path: Path) -> None:
    run = train_run(small(tmp_path, validate_lines=4), tmp_path / "run")
    lines = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["source"], line["reference"]) for line in lines] == [
        (step, text, text) for step in (4, 8, 12) for text in HELD_OUT[:3]
    ]
    assert all(line.keys() == {"step", "source", "reference", "output"} for line in lines)
    assert all(isinstance(line["output"], str) for line in lines)


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train_run(small(tmp_path, tensorboard=True, validate_lines=2), tmp_path / "run")
    accumulator = events.EventAccumulator(str(run.path / "tensorboard"))
    accumulator.Reload()
    for kind, key in (("valid", "loss"), ("valid", "bleu"), ("train", "loss"), ("train", "learning_rate")):
        logged = [(event.step, event.value) for event in accumulator.Scalars(f"{kind}/{key}")]
        written = [(line["step"], line[key]) for line in metrics(run.path, kind)]
        assert written and [step for step, _ in logged] == [step for step, _ in written]
        assert [value for _, value in logged] == pytest.approx([value for _, value in written], rel=1e-6)
    assert not (train_run(small(tmp_path), tmp_path / "plain").path / "tensorboard").exists()


# -- precision and data ------------------------------------------------------------------------------------------------


def test_bf16_computes_in_bf16_and_keeps_everything_in_float32(tmp_path: Path) -> None:
    kinds: set[torch.dtype] = set()

    def record_dtype(module: torch.nn.Module, name: str, value: taps.Value) -> None:
        if name == "logits" and module.training:
            kinds.add((value if isinstance(value, Tensor) else value()).dtype)

    with taps.listen(record_dtype):
        run = train_run(small(tmp_path, precision="bf16", ema=0.5), tmp_path / "run")
        assert kinds == {torch.bfloat16}
        kinds.clear()
        plain = train_run(small(tmp_path, precision="auto", ema=0.5), tmp_path / "plain")  # on a CPU: fp32
        assert kinds == {torch.float32}
    for file in (run.best, run.resume, run.snapshot(4)):
        assert {tensor.dtype for tensor in tensors(file).values()} == {torch.float32}, file
    one, other = tensors(run.resume), tensors(plain.resume)
    parts = {name.split(".")[0] for name in one}
    assert parts == {"model", "optimizer", "ema"} and not equal(one, other)
    weight = one["model.source_embedding.table"]
    assert not torch.equal(weight, weight.bfloat16().float())  # finer than bf16
    for validation_lines in (metrics(run.path, "valid"), metrics(plain.path, "valid")):
        assert len(validation_lines) == 3
    assert metrics(run.path, "valid")[-1]["loss"] == pytest.approx(metrics(plain.path, "valid")[-1]["loss"], rel=0.02)


def test_pairs_that_are_empty_or_too_long_are_dropped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most five tokens with EOS, that is four words."""
    pairs = tmp_path / "pairs.tsv"
    lines = ["a b c d\tb", "a\tb c d a", "a b\tb a"]  # fit, two of them exactly
    lines += ["a b c d a\tb", "a\ta b c d a", "a b c d a b\ta b c d a b"]  # too long: source, target, both
    lines += ["\ta", "a\t", " \t ", "a b\t  "]  # empty: one side has no text or only blanks
    pairs.write_text("\n".join(lines) + "\n")
    recipe = small(tmp_path, steps=2, data={"pairs": str(pairs), "max_length": 5})
    train_run(recipe, tmp_path / "run", quiet=False)
    assert "data: 3 pairs, 4 empty and 3 over-long dropped; vocabulary" in capsys.readouterr().err


def test_tags_are_prepended_in_training_and_in_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[SeqBatch] = []
    update = Trainer._take_step

    def collect(self: Trainer, share: BatchShare) -> None:
        batches.extend(share.batches.values())
        update(self, share)

    monkeypatch.setattr(Trainer, "_take_step", collect)
    data = {"corpus": "copy", "count": 40, "source_tag": "<from>", "target_tag": "<to>"}
    run = train_run(small(tmp_path, data=data, steps=8, validate_lines=2), tmp_path / "run")
    tokenizer = run.tokenizers[0]
    source_tag, target_tag = tokenizer.tag("<from>"), tokenizer.tag("<to>")
    for batch in batches:
        assert {s[0].item() for s in batch.source.layout.split(batch.source.ids)} == {source_tag}
        assert {s[:2].tolist()[-1] for s in batch.inputs.layout.split(batch.inputs.ids)} == {target_tag}
        assert {s[0].item() for s in batch.inputs.layout.split(batch.inputs.ids)} == {BOS}
    found = Model(run, "cpu").translate("a b c")
    assert found.source_tokens[0] == "<from>" and found.tokens[0] == "<to>"
    assert "<" not in found.text
    samples = (run.path / "samples.jsonl").read_text()
    assert samples and "<to>" not in samples and "<from>" not in samples


def test_a_mix_is_sampled_by_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 pairs of weight 2 and 20 of weight 0.5: an epoch has 20 visits of the first, 10 of the second."""
    epochs: list[Counter[int]] = []
    update, last = Trainer._take_step, [-1]

    def count_visits(self: Trainer, share: BatchShare) -> None:
        if self.progress.position.epoch != last[0]:
            last[0] = self.progress.position.epoch
            epochs.append(Counter())
        for batch in share.batches.values():
            epochs[-1].update(sentence[0].item() for sentence in batch.source.layout.split(batch.source.ids))
        update(self, share)

    monkeypatch.setattr(Trainer, "_take_step", count_visits)
    mix = [
        {"corpus": "copy", "count": 10, "weight": 2.0, "source_tag": "<copy>"},
        {"corpus": "reverse", "count": 20, "weight": 0.5, "source_tag": "<reverse>"},
    ]
    run = train_run(small(tmp_path, steps=30, data={"mix": mix}), tmp_path / "run")
    tokenizer = run.tokenizers[0]
    assert len(epochs) > 3
    for epoch in epochs[:-1]:  # the last epoch may be incomplete
        assert epoch == {tokenizer.tag("<copy>"): 20, tokenizer.tag("<reverse>"): 10}
    assert metrics(run.path, "train")[-1]["loss"] > 0
