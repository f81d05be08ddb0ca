"""Comparing runs: length buckets, confidence intervals and table rows, from outputs written by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import UserError
from regard.evaluation import score_texts
from regard.evaluation.compare import (
    RunScores,
    ScoreInterval,
    TrainingSummary,
    buckets,
    clock,
    distinct_names,
    measure,
    parse_buckets,
    rows,
    wilson,
)
from regard.models.recurrent import RecurrentSettings
from regard.models.transformer_settings import TransformerSettings


def words(*lengths: int) -> list[str]:
    return [" ".join("w" * n) for n in lengths]


def test_buckets_of_about_equal_size_keep_equal_lengths_together() -> None:
    found = buckets(words(1, 2, 2, 2, 3, 9), 2)
    assert [(b.low, b.high, b.lines) for b in found] == [(1, 2, (0, 1, 2, 3)), (3, 9, (4, 5))]
    assert [b.label for b in found] == ["1–2", "3–9"]
    assert found[0].mean == 7 / 4


def test_buckets_end_at_the_given_lengths_and_empty_ones_are_omitted() -> None:
    found = buckets(words(12, 5, 6, 4, 30), (5, 10, 15, 20))
    assert [(b.label, b.lines) for b in found] == [("4–5", (1, 3)), ("6", (2,)), ("12", (0,)), ("30", (4,))]
    assert found[0].of(["a", "b", "c", "d", "e"]) == ["b", "d"]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=80), st.integers(1, 9))
def test_every_line_is_in_one_bucket_and_buckets_do_not_overlap(lengths: list[int], count: int) -> None:
    found = buckets(words(*lengths), count)
    assert sorted(line for b in found for line in b.lines) == list(range(len(lengths)))
    assert len(found) <= count
    assert all(a.high < b.low for a, b in pairwise(found))


def test_invalid_buckets_are_refused() -> None:
    assert parse_buckets("6") == 6
    assert parse_buckets("5,10, 15") == (5, 10, 15)
    for wrong in ("", "0", "six", "-1", "5,4", "5,5", "5,,6", "1.5"):
        with pytest.raises(UserError, match="--buckets"):
            parse_buckets(wrong)


def test_the_interval_of_exact_matches_is_wilsons() -> None:
    # 8 of 10, z = 1.96: (0.8 + 0.19208 ± 1.96 · sqrt(0.016 + 0.009604)) / 1.38416
    found = wilson(8, 10)
    assert found.score == 80.0
    assert (found.low, found.high) == (pytest.approx(49.02, abs=0.01), pytest.approx(94.33, abs=0.01))
    assert wilson(10, 10).high == pytest.approx(100.0) and wilson(0, 10).low == pytest.approx(0.0)
    assert measure("exact", ["a ", "B"], ["a", "b"]).score == 50.0
    assert measure("exact", ["a ", "B"], ["a", "b"], lowercase=True).score == 100.0


def test_a_measure_is_sacrebleus_score_within_its_interval() -> None:
    references = [f"the cat number {i} sat on the old mat" for i in range(30)]
    outputs = [r if i % 3 else r.replace("sat on", "saw") for i, r in enumerate(references)]
    whole = score_texts(outputs, references)
    for metric, score in (("bleu", whole.bleu), ("chrf", whole.chrf)):
        found = measure(metric, outputs, references)  # type: ignore[arg-type]
        assert found.score == pytest.approx(score)
        assert 0 < found.low < score < found.high <= 100
        assert found == measure(metric, outputs, references)  # type: ignore[arg-type]  # the same every time


def test_the_interval_of_one_sentence_is_a_point() -> None:
    found = measure("bleu", ["the cat sat on the mat"], ["the cat sat on the mat"])
    assert (found.low, found.high) == (found.score, found.score) == (pytest.approx(100),) * 2


def test_training_statistics_are_read_from_the_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 50, "kind": "train", "loss": 2.0, "tokens": 1000, "seconds": 2.0},
        {"step": 100, "kind": "train", "loss": 1.0, "tokens": 3000, "seconds": 4.0},
        {"step": 100, "kind": "valid", "loss": 1.1, "seconds": 5.5},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 15', encoding="utf-8")
    assert TrainingSummary.of(file) == TrainingSummary(steps=100, seconds=5.5, tokens_per_second=750.0)
    assert TrainingSummary.of(tmp_path / "none") == TrainingSummary(None, None, None)


def test_short_descriptions_of_models() -> None:
    def recurrent(**given: str) -> str:
        return RecurrentSettings.model_validate({"family": "recurrent", "size": "tiny", **given}).summary()

    assert recurrent(cell="lstm", attention="none") == "LSTM, no attention"
    assert recurrent(cell="gru", attention="none", feed="every") == "GRU, context fed"
    assert recurrent(cell="gru", attention="bahdanau") == "GRU, additive"
    assert recurrent(cell="gru", attention="luong", score="bilinear") == "GRU, bilinear"
    assert recurrent(cell="gru", attention="multihead") == "GRU, multihead"
    assert TransformerSettings.model_validate({}).summary() == "Transformer"


def test_names_are_as_short_as_they_can_be() -> None:
    assert distinct_names([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert distinct_names([Path("one/a"), Path("two/a")]) == ["one/a", "two/a"]
    with pytest.raises(UserError, match="given twice"):
        distinct_names([Path("runs/a"), Path("runs/../runs/a")])


def test_a_row_describes_a_run_and_a_star_marks_incomparable_perplexities() -> None:
    scores = score_texts(["a b c d", "x"], ["a b c d", "y"])
    run = RunScores(
        "r", "GRU, dot", 1_234_567, TrainingSummary(10, 125.0, 8806.4), 1.5, scores, (ScoreInterval(50, 40, 60),)
    )
    heads, (cells,) = rows([run], same_vocabulary=True)
    row = dict(zip(heads, cells, strict=True))
    assert row["parameters"] == "1,234,567" and row["training"] == "2:05" and row["tokens/s"] == "8,806"
    assert row["perplexity"] == "1.500" and row["exact"] == "50.00 %" and "Moses BLEU" not in row
    heads, (cells,) = rows([run], same_vocabulary=False)
    assert dict(zip(heads, cells, strict=True))["perplexity*"] == "1.500*"
    (bucket,) = buckets(["a b c d", "x"], 1)
    entry = run.as_json([bucket])
    assert entry["by_length"] == [
        {"from": 1, "to": 4, "mean_length": 2.5, "sentences": 2, "score": 50, "low": 40, "high": 60}
    ]
    assert entry["tokens_per_second"] == 8806.4


def test_times_are_minutes_and_seconds() -> None:
    assert [clock(s) for s in (None, 5, 125.4, 3600)] == ["–", "0:05", "2:05", "1:00:00"]
