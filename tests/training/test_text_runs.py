"""Runs on plain text: a GPT on documents and on a stream, a masked LM, and a classifier that starts from it."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import CPU, current_weights, equal, metrics, tensors, train_run

from regard import tasks, tensor_io
from regard.api import load
from regard.data.labelled import ClassIds
from regard.data.token_cache import build
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.tasks.text import pair_batches
from regard.tasks.validator import Validation, Validator
from regard.text.encode import MASK
from regard.text.tokenizers import WordPieceTokenizer
from regard.training.loop import Trainer
from regard.training.progress import PlainReporter

LINES = [f"the {a} {b} the {c} ." for a in ("cat", "dog", "fox") for b in ("saw", "bit") for c in ("hen", "pig", "cow")]
GPT = {"family": "gpt", "size": "nano", "width": 8, "heads": 2, "ffn_width": 16, "layers": 1, "max_positions": 8}
BERT = {"family": "bert", "size": "tiny", "width": 8, "heads": 2, "ffn_width": 16, "layers": 1, "max_positions": 12}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def small(folder: Path, model: dict[str, Any], data: dict[str, Any] | None = None, **training: Any) -> Recipe:
    (folder / "a.txt").write_text("".join(f"{line}\n" for line in LINES))
    (folder / "a.tsv").write_text("".join(f"{line}\t{line.split()[1]}\n" for line in LINES))
    texts = {"text": "a.txt", "documents": "line", "held_out": 0.25}
    plain = data is None or "pairs" not in data
    return Recipe.model_validate(
        {
            "data": {"folder": str(folder), **(texts if plain else {}), **(data or {})},
            "text": {"unit": "word", "vocabulary": 260},
            "model": model,
            "training": {
                "steps": 8,
                "batch_tokens": 32,
                "warmup": 4,
                "average": 0,
                "validate_every": 4,
                "validate_lines": 3,
                "save_every": 4,
                **training,
            },
        }
    )


def classes(folder: Path, **training: Any) -> Recipe:
    data = {"pairs": "a.tsv", "valid": ["a.tsv"]}
    return small(folder, {**BERT, "task": "classify"}, data, best="exact", **training)


def samples(run: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("documents", "unit"), [("line", "documents"), ("stream", "lines")])
def test_a_gpt_is_validated_by_loss_and_continues_held_out_text(
    tmp_path: Path, documents: str, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small(tmp_path, GPT, {"documents": documents})
    train_run(recipe, tmp_path / "run", quiet=False)
    printed = capsys.readouterr().err
    assert f" {unit}" in printed.split("data: ")[1].splitlines()[0] and "held-out text after step 8: loss" in printed
    for validation in metrics(tmp_path / "run", "valid"):
        assert (
            validation["perplexity"] == pytest.approx(math.exp(validation["loss"]), rel=1e-4)
            and validation["bits_per_byte"] > 0
        )
        assert "bleu" not in validation
    for sample in samples(tmp_path / "run"):
        assert sample["source"] and sample.keys() == {"step", "source", "reference", "output"}
    if documents == "line":
        first = samples(tmp_path / "run")[0]
        assert first["source"] + first["reference"] == LINES[int(0.75 * len(LINES))]


@pytest.mark.parametrize("kind", ["documents", "stream", "masked"])
def test_resumed_equals_uninterrupted(tmp_path: Path, kind: str) -> None:
    model = BERT if kind == "masked" else GPT
    data = {"documents": "stream"} if kind == "stream" else {}

    def run(name: str, steps: int) -> dict[str, torch.Tensor]:
        train_run(small(tmp_path, model, data, steps=steps, schedule="constant"), tmp_path / name)
        return tensors(tmp_path / name / "resume.safetensors")

    uninterrupted = run("whole", 8)
    run("parts", 3)
    assert equal(run("parts", 8), uninterrupted)


@pytest.mark.parametrize("kind", ["gpt", "stream", "bert"])
def test_validation_draws_no_random_numbers_and_is_deterministic(tmp_path: Path, kind: str) -> None:
    recipe = small(tmp_path, BERT if kind == "bert" else GPT, {"documents": "stream"} if kind == "stream" else {})
    run = train_run(recipe, tmp_path / "run")
    model = run.model()
    model.train()
    task = tasks.of(recipe)
    texts = task.held_out("valid")
    before = torch.get_rng_state()
    validations = [task.validator(run, texts, CPU).validate(model) for _ in range(2)]
    assert validations[0] == validations[1] and model.training and torch.equal(torch.get_rng_state(), before)
    assert len(validations[0].samples) == 3


def test_accuracy_on_masked_tokens_is_that_of_the_predictions(tmp_path: Path) -> None:
    """An oracle predicts all masked tokens."""
    recipe = small(tmp_path, BERT)
    run = train_run(recipe, tmp_path / "run")
    task = tasks.of(recipe)
    validator = task.validator(run, task.held_out("valid"), CPU)

    class Oracle(SequenceModel):
        def logits(self, batch: SeqBatch) -> torch.Tensor:
            return torch.nn.functional.one_hot(batch.labels, 30).float() * 100

    validation = validator.validate(Oracle())
    assert validation.exact == 100 and validation.loss == pytest.approx(0, abs=1e-6)
    for sample in validation.samples:
        assert sample["output"] == sample["reference"] in LINES


def test_the_loss_and_the_accuracy_of_a_classifier_are_those_of_its_predictions(tmp_path: Path) -> None:
    recipe = classes(tmp_path, label_smoothing=0.0, validate_lines=4)
    run = train_run(recipe, tmp_path / "run")
    task = tasks.of(recipe)
    pairs = task.held_out("valid")
    validation = task.validator(run, pairs, CPU).validate(run.model())
    predictions = load(run.path, device="cpu").predict([text for text, _ in pairs])
    losses = [-math.log(p.probabilities[name]) for p, (_, name) in zip(predictions, pairs, strict=True)]
    assert validation.loss == pytest.approx(sum(losses) / len(pairs), rel=1e-5) and validation.bleu is None
    right = sum(p.label == name for p, (_, name) in zip(predictions, pairs, strict=True))
    assert validation.exact == pytest.approx(100 * right / len(pairs)) and len(validation.samples) == 3


def test_every_epoch_visits_every_text_once_with_its_class(tmp_path: Path) -> None:
    recipe = classes(tmp_path)
    run = train_run(recipe, tmp_path / "run")
    task = tasks.of(recipe)
    for static in (False, True):
        stream = task.stream(run, task.dataset(run), static)
        seen: list[tuple[str, str]] = []
        for batch, after in stream.batches():
            if after.epoch:
                break
            seen += [(shown["text"], shown["class"]) for shown in task.describe_batch(run, batch)]
            assert batch.num_targets == len(batch.labels) and batch.source.layout.tokens <= 32
        assert sorted(seen) == sorted((line, line.split()[1]) for line in LINES)
        again = list(islice(stream.batches(), 4))[3][0]
        assert torch.equal(stream.batch_at(3).labels, again.labels)


def test_a_classifier_takes_vocabulary_and_body_of_its_starting_run(tmp_path: Path) -> None:
    first = train_run(small(tmp_path, BERT), tmp_path / "first")
    second = train_run(classes(tmp_path), tmp_path / "second", start_from=tmp_path / "first")
    assert second.tokenizers[0].to_json() == first.tokenizers[0].to_json()
    assert second.classes == ("cat", "dog", "fox")
    assert metrics(tmp_path / "second", "valid")[-1].keys() >= {"exact", "loss"}


@pytest.fixture
def initial_weights(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Collect the initial weights of each run."""
    found: list[dict[str, torch.Tensor]] = []
    plain_train = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self: (found.append(current_weights(self)), plain_train(self))[1])
    return found


def other_classes(folder: Path, names: list[str]) -> Recipe:
    """Return the recipe of `classes` with other class names."""
    recipe = classes(folder)
    (folder / "a.tsv").write_text("".join(f"{line}\t{names[n % len(names)]}\n" for n, line in enumerate(LINES)))
    return recipe


def test_a_classifier_of_other_classes_learns_them_with_a_fresh_head(
    tmp_path: Path, initial_weights: list[dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    first = train_run(classes(tmp_path), tmp_path / "first")
    for names in (["good", "bad"], ["cat", "dog", "hen"]):
        second = train_run(other_classes(tmp_path, names), tmp_path / names[1], start_from=first.path, quiet=False)
        assert "the classifier head is initialised anew" in capsys.readouterr().err
        assert second.classes == tuple(sorted(names))
        [store] = build(second.recipe, second.tokenizers[0], ClassIds(second.classes))
        assert set(store.target.ids.tolist()) == {*range(len(names))}
        for name, tensor in tensors(first.best).items():
            same = initial_weights[-1][name].shape == tensor.shape and torch.equal(initial_weights[-1][name], tensor)
            # biases start at zero and may have stayed there
            assert same or name.startswith("classifier."), name
            assert not same or name not in ("classifier.pooler.weight", "classifier.out.weight"), name


def test_a_classifier_of_the_same_classes_takes_the_head_whatever_their_order(
    tmp_path: Path, initial_weights: list[dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    """An imported model has its classes in an order of its own."""
    first = train_run(classes(tmp_path), tmp_path / "first")
    first.save_classes(["fox", "cat", "dog"])
    second = train_run(classes(tmp_path), tmp_path / "second", start_from=first.path, quiet=False)
    assert second.classes == ("fox", "cat", "dog")
    assert equal(initial_weights[-1], tensors(first.best)) and "anew" not in capsys.readouterr().err


def test_an_imported_vocabulary_is_kept_and_only_the_classes_are_learnt(tmp_path: Path) -> None:
    recipe = small(tmp_path, BERT)
    imported = Recipe.model_validate({**recipe.model_dump(), "text": {"unit": "wordpiece"}})
    run = RunDir.create(tmp_path / "imported", imported)
    tokenizer = WordPieceTokenizer([MASK], sorted({word for line in LINES for word in line.split()}), True, None, True)
    run.save_tokenizers(tokenizer, tokenizer)
    tensor_io.save(run.best, tensor_io.model_tensors(run.fresh_model()), {})
    text = {"unit": "wordpiece"}
    second = train_run(
        Recipe.model_validate({**classes(tmp_path).model_dump(), "text": text}),
        tmp_path / "second",
        start_from=run.path,
    )
    assert second.tokenizers[0].to_json() == tokenizer.to_json() and second.classes == ("cat", "dog", "fox")


# -- pairs in one context ----------------------------------------------------------------------------------------------


def test_a_gpt_trains_on_the_pairs_that_its_context_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # sources of 7 tokens with EOS, targets of 2 and 7: 9 and 14 of 12 positions
    lines = [f"{line}\t{line if n % 3 == 0 else 'x'}\n" for n, line in enumerate(LINES)]
    recipe = small(tmp_path, {**GPT, "max_positions": 12}, {"pairs": "a.tsv", "valid": ["a.tsv"]})
    (tmp_path / "a.tsv").write_text("".join(lines))
    run = train_run(recipe, tmp_path / "run", quiet=False)
    assert "12 pairs, 0 empty and 6 over-long dropped" in capsys.readouterr().err
    assert len(metrics(run.path, "valid")) == 2
    pairs = [(line, line) for line in LINES] + [("the " * 40, "cat " * 40), ("cat", "dog " * 40)]
    for group, batch in pair_batches(pairs, run.tokenizers, recipe):
        both = [s + t for s, t in zip(batch.source.layout.lengths, batch.inputs.layout.lengths, strict=True)]
        assert both == [12] * len(group)


def test_the_best_weights_may_be_chosen_by_exact_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validations = iter([Validation(1.0, exact=50.0), Validation(2.0, exact=60.0), Validation(0.5, exact=55.0)])
    monkeypatch.setattr(Validator, "validate", lambda self, model: next(validations))
    train_run(classes(tmp_path, steps=12), tmp_path / "run")
    assert [validation["better"] for validation in metrics(tmp_path / "run", "valid")] == [True, True, False]


@pytest.mark.parametrize("kind", ["documents", "stream", "masked"])
def test_a_batch_with_a_non_finite_loss_is_saved(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BERT if kind == "masked" else GPT
    recipe = small(tmp_path, model, {"documents": "stream"} if kind == "stream" else {})
    monkeypatch.setattr(SequenceModel, "forward", lambda self, batch, *_: self.logits(batch).sum() * math.nan)
    monkeypatch.setattr("regard.models.bert.Bert.forward", SequenceModel.forward)
    with pytest.raises(UserError, match="not finite at step 1"):
        train_run(recipe, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "not-finite-1.json").read_text())["examples"]
    assert found and all(pair["target"] for pair in found)
    if kind == "documents":
        assert all(pair["source"] == "" and pair["target"] in LINES for pair in found)


def test_no_samples_are_written_when_none_are_requested(tmp_path: Path) -> None:
    train_run(small(tmp_path, GPT, validate_lines=0), tmp_path / "run")
    assert not (tmp_path / "run" / "samples.jsonl").exists()


@pytest.mark.parametrize(
    ("model", "data", "training", "message"),
    [
        (GPT, {}, {"best": "bleu"}, 'for language-modelling: it must be "loss"'),
        (GPT, {}, {"best": "exact"}, 'for language-modelling: it must be "loss"'),
        (BERT, {"documents": "stream"}, {}, "whole documents"),
        (
            {**BERT, "task": "classify"},
            {"pairs": "a.tsv", "valid": ["a.tsv"]},
            {"best": "bleu"},
            "for classification: it must be",
        ),
        (GPT, {"text": None, "corpus": "copy", "held_out": 0.1}, {}, "held_out is for files of plain text, pairs"),
    ],
)
def test_settings_that_do_not_go_together(
    tmp_path: Path, model: dict[str, Any], data: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        small(tmp_path, model, data, **training)


def test_a_plain_report_names_the_kind_of_examples(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = PlainReporter()
    reporter.members, reporter.shown = "documents", -1e9
    reporter.counted("a.txt", 1200)
    assert capsys.readouterr().err == "a.txt: 1,200 documents so far\n"
