"""Classification of texts: class names, predictions, scores, and input that is unusual or wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.cli.evaluate_classes import _confusion
from regard.errors import UserError
from regard.metrics.classes import ClassScores
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.training.setup import train

BERT = {"family": "bert", "task": "classify", "width": 16, "heads": 2, "layers": 1, "ffn_width": 16, "dropout": 0.0}
ROWS = [(f"{word} {other}", name) for other in ("film", "book", "day") for word, name in
        [("good", "very good"), ("fine", "very good"), ("bad", "bad"), ("awful", "bad")]]  # fmt: skip
ROWS.append(("so so day", "not sure"))  # a class that occurs once


def recipe(folder: Path, rows: list[tuple[str, str]] | None = None, valid: Any = None, **training: Any) -> Recipe:
    for name, some in (("train", ROWS if rows is None else rows), ("valid", valid or ROWS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in some))
    settings = {"steps": 60, "batch_tokens": 64, "warmup": 5, "learning_rate": 0.01, "schedule": "constant"}
    files = {"pairs": "train.jsonl", "valid": ["valid.jsonl"], "test": ["valid.jsonl"]}
    return Recipe.model_validate(
        {
            "data": {"folder": str(folder), **files},
            "text": {"unit": "word", "vocabulary": 260},
            "model": {**BERT, "max_positions": 8},
            "training": {**settings, "validate_every": 60, "save_every": 60, "average": 0, "best": "exact", **training},
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("classes")
    patch = pytest.MonkeyPatch()
    patch.setenv("REGARD_CACHE", str(folder / "cache"))
    try:
        return train(recipe(folder), folder / "run", device="cpu", quiet=True)
    finally:
        patch.undo()


def call(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> tuple[str, str]:
    from regard.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    assert (left.value.code or 0) == status, printed.err
    return printed.out, printed.err


def test_names_of_classes_may_have_spaces_and_may_occur_once(run: RunDir) -> None:
    assert run.classes == ("bad", "not sure", "very good")
    assert [file.name for file in run.path.glob("*tokenizer.json")] == ["tokenizer.json"]
    assert "very" not in run.tokenizers[0].words  # the vocabulary is of the texts
    model = regard.load(run.path, device="cpu")
    predictions = model.predict([text for text, _ in ROWS])
    assert [prediction.label for prediction in predictions] == [name for _, name in ROWS]
    assert predictions[-1].probabilities.keys() == set(run.classes)
    assert sum(predictions[-1].probabilities.values()) == pytest.approx(1, abs=1e-6)
    alone = model.predict("good film")
    assert alone.label == predictions[0].label and str(predictions[0]) == "very good"
    assert alone.probabilities == pytest.approx(predictions[0].probabilities, abs=1e-6)


def test_the_batch_of_a_text_changes_nothing(run: RunDir) -> None:
    model = regard.load(run.path, device="cpu")
    texts = ["good", "bad bad bad bad", "", "unheard of"]
    for text, together in zip(texts, model.predict(texts), strict=True):
        assert model.predict(text).probabilities == pytest.approx(together.probabilities, abs=1e-5)


def test_n_lines_in_n_lines_out(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("good film\n\nawful day\n" + "bad " * 20 + "\n")
    out, err = call(capsys, "predict", run.path, "-i", tmp_path / "in.txt", "--device", "cpu")
    assert out.splitlines() == ["very good", "", "bad", "bad"]
    assert err == "regard: warning: line 4 has more than 8 tokens and was truncated\n"
    call(capsys, "predict", run.path, "-i", tmp_path / "in.txt", "-o", tmp_path / "out", "--format", "jsonl", "-q")
    entries = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [entry["class"] for entry in entries] == ["very good", None, "bad", "bad"]
    assert [entry["truncated"] for entry in entries] == [False, False, False, True]
    assert entries[0]["probabilities"].keys() == set(run.classes) and entries[1]["probabilities"] == {}
    out, _ = call(capsys, "predict", run.path, "good film", "bad film", "--top", 2, "--device", "cpu")
    for line, first in zip(out.splitlines(), ("very good", "bad"), strict=True):
        (one, p), (_, q) = (cell.rsplit(" ", 1) for cell in line.split("\t"))
        assert one == first and float(p.rstrip("%")) >= float(q.rstrip("%"))


def test_texts_that_are_too_long_are_truncated_with_a_warning(run: RunDir) -> None:
    with pytest.warns(UserWarning, match="longer than the 8 tokens"):
        assert regard.load(run.path, device="cpu").predict("good " * 9).truncated


def test_scores_by_hand() -> None:
    """Of 4 a, 3 are right; of 2 b, 1; c does not occur and is predicted once; d neither."""
    scores = ClassScores.of([0, 0, 0, 2, 1, 0], [0, 0, 0, 0, 1, 1], ["a", "b", "c", "d"])
    assert scores.confusion == ((3, 0, 1, 0), (1, 1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    assert scores.accuracy == pytest.approx(100 * 4 / 6)
    assert scores.f1 == pytest.approx([75.0, 100 * 2 / 3, 0.0, 0.0])  # 2 · 3 / (4 + 4), 2 · 1 / (1 + 2)
    assert scores.macro_f1 == pytest.approx((75 + 100 * 2 / 3 + 0) / 3)  # as scikit-learn: d is left out


def test_evaluate_prints_accuracy_f1_and_the_confusion_matrix(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "evaluate", run.path, "--device", "cpu", "-q")
    assert out.splitlines()[:2] == ["accuracy    100.00 % of 13 texts", "macro-F1    100.00   mean of 3 classes"]
    assert out.splitlines()[-3:] == [
        "bad          6         0          0  100.0",
        "not sure     0         1          0  100.0",
        "very good    0         0          6  100.0",
    ]
    entry = json.loads(call(capsys, "evaluate", run.path, "--json", "--device", "cpu", "-q")[0])
    assert entry["macro_f1"] == 100 and entry["confusion"] == [[6, 0, 0], [0, 1, 0], [0, 0, 6]]


def test_evaluate_and_compare_read_files_of_lines(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").write_text("good film\n\nbad day\n")
    (tmp_path / "classes").write_text("very good\nnot sure\nvery good\n")
    files = ["--source", tmp_path / "texts", "--reference", tmp_path / "classes", "--device", "cpu", "-q", "--json"]
    entry = json.loads(call(capsys, "evaluate", run.path, *files)[0])
    blank = regard.load(run.path, device="cpu").predict("").label  # an empty text has a prediction too
    assert entry["accuracy"] == pytest.approx(100 * (1 + (blank == "not sure")) / 3)
    compared = json.loads(call(capsys, "compare", run.path, *files)[0])
    assert compared["runs"][0]["accuracy"] == entry["accuracy"] and compared["metric"] == "exact"
    (tmp_path / "classes").write_text("very good\nsplendid\nvery good\n")
    for verb in ("evaluate", "compare"):
        _, err = call(capsys, verb, run.path, *files, status=2)
        assert "'splendid' is not a class of this model, which has bad, not sure, very good" in err


def test_compare_draws_accuracy_by_length(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "compare", run.path, "--out", tmp_path / "chart.svg", "--device", "cpu", "-q")
    assert "macro-F1" in out and "BLEU" not in out and "accuracy (%)" in (tmp_path / "chart.svg").read_text()
    _, err = call(capsys, "compare", run.path, "--beam", 4, status=2)
    assert err == "regard: --beam has no effect for classifiers\n"


@pytest.mark.parametrize(
    ("rows", "valid", "message"),
    [
        ([("a", "x"), ("b", "x ")], None, "at least two classes, and all are 'x'"),
        ([("a", ""), ("", "x")], None, "at least two classes, and there is none"),
        (ROWS, [("good", "splendid")], "the held-out data: 'splendid' is not a class of this model"),
        (ROWS, [("good", "")], "the held-out data: '' is not a class of this model"),
    ],
)
def test_unusable_classes_are_reported_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any, valid: Any, message: str
) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=message):
        train(recipe(tmp_path, rows, valid), tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run" / "resume.safetensors").exists()


def test_settings_of_texts_on_both_sides_are_refused(tmp_path: Path) -> None:
    settings = recipe(tmp_path).model_dump()
    for section, change, message in (
        ("text", {"shared": False}, "text.shared must be true"),
        ("data", {"target_tag": "<2en>"}, "target_tag is a tag of texts"),
    ):
        with pytest.raises(ValueError, match=message):
            Recipe.model_validate({**settings, section: {**settings[section], **change}})


def test_other_verbs_name_the_right_one(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("translate", "generate"):
        _, err = call(capsys, verb, run.path, "good film", "--device", "cpu", status=2)
        assert "use `regard predict`" in err and len(err.splitlines()) == 1
    with pytest.raises(UserError, match="gives pairs no log-probabilities"):
        regard.load(run.path, device="cpu").score([("good", "bad")])


def test_an_explanation_and_a_trace_name_classes_with_spaces(run: RunDir) -> None:
    model = regard.load(run.path, device="cpu")
    explanation = model.explain("good bad film", target="not sure")
    assert "not sure" in explanation.outputs and set(explanation.outputs) == set(run.classes)
    trace = model.trace("good film")
    assert trace.header["text"]["target"] == "very good" and trace.array("output.logits").shape == (1, 3)
    assert [token["text"] for token in trace.elements("target")] == ["very good"]
    assert trace.vocabulary == list(run.classes)
    probability = model.predict("good film").probability
    assert trace.header["output"]["p"] == [pytest.approx(probability, rel=1e-4)]
    assert trace.layers[-1]["top"][0][0]["text"] == "very good"
    forced = model.trace("good film", "bad")
    assert forced.header["text"]["target"] == "bad"
    with pytest.raises(UserError, match="'worse' is not a class"):
        model.trace("good film", "worse")
    with pytest.raises(UserError, match="cannot be continued"):
        model.trace("good film", after=[1])


def test_a_confusion_matrix_too_wide_for_the_terminal_numbers_its_classes() -> None:
    names = tuple(f"a long name {n}" for n in range(12))
    scores = ClassScores.of([1, 1], [0, 1], names)
    lines = _confusion(scores).splitlines()
    assert lines[0].split() == ["class", *map(str, range(1, 13)), "F1"] and len(lines) == 13
    assert lines[1].split() == ["1", *names[0].split(), "0", "1", *["0"] * 10, "0.0"]
    assert max(map(len, lines)) <= 80
