"""Confidence is what the formulas say, and calibrated confidence is how often words are right."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.cli import run as run_command
from regard.decoding import Hypothesis
from regard.errors import UserError
from regard.metrics.calibration import (
    CalibrationCurve,
    correct_words,
    expected_calibration_error,
    isotonic,
    reliability,
)
from regard.tasks.confidence import FILE, Calibration, confidence, observations
from regard.tasks.translator import Answer
from regard.text import train
from tiny_runs import make_run

# --- formulas -------------------------------------------------------------------------------------------------------


def test_the_expected_calibration_error_of_a_table() -> None:
    # bin (0.5, 0.6]: two of mean .6, half right: .1; bin (0.8, 0.9]: two of mean .9, all right: .1
    assert expected_calibration_error([0.6, 0.6, 0.9, 0.9], [1, 0, 1, 1]) == pytest.approx(0.5 * 0.1 + 0.5 * 0.1)
    assert [(b.count, b.accuracy) for b in reliability([0.0, 0.05, 0.1, 0.11, 1.0], [0, 1, 0, 1, 1])] == [
        (3, pytest.approx(1 / 3)),
        (1, 1.0),
        (1, 1.0),
    ]
    assert expected_calibration_error([], []) == 0


def brute_force_isotonic(ys: list[float]) -> list[float]:
    """The least-squares non-decreasing fit by the max-min formula (Robertson et al. 1988, section 1.4)."""
    n = len(ys)
    return [max(min(np.mean(ys[i : j + 1]) for j in range(k, n)) for i in range(k + 1)) for k in range(n)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=9))
def test_isotonic_regression_is_the_least_squares_fit(ys: list[float]) -> None:
    curve = isotonic([k / 10 for k in range(len(ys))], ys)
    levels = sorted({round(level, 6) for level in brute_force_isotonic(ys)})
    assert list(curve.y) == pytest.approx(levels, abs=1e-6)
    assert list(curve.x) == sorted(curve.x)


def test_equal_confidences_are_one_observation() -> None:
    assert isotonic([0.5, 0.5, 0.9], [0, 1, 1]) == CalibrationCurve((0.5, 0.9), (0.5, 1.0))
    assert isotonic([0.5, 0.5, 0.9], [0, 1, 1])(0.7) == pytest.approx(0.75)


def test_right_words_are_those_in_a_longest_common_subsequence() -> None:
    assert correct_words(["a", "b", "c"], ["a", "b", "c"]) == [True] * 3
    assert correct_words(["a", "x", "c"], ["a", "b", "c"]) == [True, False, True]
    assert correct_words(["b", "a"], ["a", "b"]).count(True) == 1
    assert correct_words([], ["a"]) == [] and correct_words(["a"], []) == [False]


# --- words of a hypothesis ------------------------------------------------------------------------------------------


def test_a_word_s_probability_is_the_product_of_its_tokens() -> None:
    tokenizer = train(["ab cd é"], "char", 300)
    tokens = tokenizer.encode("ab é")
    logprobs = [math.log(p) for p in (0.5, 0.5, 0.8, 0.25, 0.9)]  # a, b, space, é, EOS
    hypothesis = Hypothesis.of(tokens, logprobs, 0.6, finished=True)
    found = confidence(Answer(("ab é",), (hypothesis,), (1,)), tokenizer)
    assert [word.text for word in found.words] == ["ab", "é"] and not found.calibrated
    assert [word.confidence for word in found.words] == pytest.approx([0.25, 0.2])
    assert found.sentence == pytest.approx((0.5 * 0.5 * 0.8 * 0.25 * 0.9) ** (1 / 5))
    halved = confidence(
        Answer(("ab é",), (hypothesis,), (1,)),
        tokenizer,
        Calibration(CalibrationCurve((0, 1), (0, 0.5)), CalibrationCurve((0, 1), (1, 1))),
    )
    assert [word.confidence for word in halved.words] == pytest.approx([0.125, 0.1]) and halved.sentence == 1
    assert confidence(Answer(), tokenizer).sentence == 1.0


def test_calibration_finds_how_often_overconfident_words_are_right() -> None:
    """A model that says .9 and is right in 60 % of the cases, and says .3 and is right in 20 %."""
    tokenizer, draw = train(["ab cd"], "word", 300), random.Random(2)
    answers, references = [], []
    for n in range(4000):
        stated, truth = (0.9, 0.6) if n % 2 else (0.3, 0.2)
        hypothesis = Hypothesis.of(tokenizer.encode("ab"), [math.log(stated), 0.0], 0.6, finished=True)
        answers.append(Answer(("ab",), (hypothesis,), (1,)))
        references.append("ab" if draw.random() < truth else "cd")
    fitted = Calibration.fit(answers, references, tokenizer)
    assert (fitted.words(0.9), fitted.words(0.3)) == (pytest.approx(0.6, abs=0.03), pytest.approx(0.2, abs=0.03))
    raw, _ = observations(answers, references, tokenizer)
    after, _ = observations(answers, references, tokenizer, fitted)
    assert expected_calibration_error(*raw) == pytest.approx(0.2, abs=0.03)  # the mean of .3 and .1
    assert expected_calibration_error(*after) < 1e-6


# --- the command ----------------------------------------------------------------------------------------------------


def test_calibrate_writes_what_translations_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "tiny", "transformer")
    lines = [f"this cat is {word}" for word in ("large", "small", "old", "very large", "black")] * 8
    for name in ("source", "reference"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "reference")]
    picture = tmp_path / "reliability.svg"
    command = ["calibrate", str(run.path), *given, "--json", "--quiet", "--picture", str(picture)]
    assert run_command(command, debug=False) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"file", "pairs", "words", "sentences"} and "calibrated" in picture.read_text("utf-8")
    translation = regard.load(run.path).translate("this cat is large")
    assert translation.confidence.calibrated
    arguments = ["translate", str(run.path), "--format", "jsonl", "--confidence", "this cat is large"]
    assert run_command(arguments, debug=False) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["calibrated"] and line["confidence"] == pytest.approx(translation.confidence.sentence, abs=1e-4)
    assert " ".join(word["text"] for word in line["words"]).split() == line["text"].split()
    (run.path / FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="calibrate again"):
        _ = regard.load(run.path).translate("a").confidence
    assert run_command([*arguments[:2], "--confidence", "a"], debug=False) == 2
    assert "--confidence needs --format jsonl" in capsys.readouterr().err
