"""The benchmarks' own arithmetic and inputs: ratios by hand, and the same work for every system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
if not (ROOT / "bench" / "cpu.py").exists():
    pytest.skip("the benchmarks are not part of an installed package", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from bench import cpu_training, machine  # noqa: E402
from bench.tables import Comparison, Measured, table  # noqa: E402
from bench.turns import Worker  # noqa: E402


def test_medians_and_spreads_by_hand() -> None:
    measured = Measured("ours", [90.0, 100.0, 130.0])
    assert measured.median == 100 and measured.spread == pytest.approx(0.2)  # half of 130 - 90, of 100


def test_the_ratio_is_to_the_best_peer_repeat_by_repeat() -> None:
    ours = Measured("regard", [120.0, 60.0, 100.0])  # the machine was slow in the second repeat, for all
    line = Comparison("x", "tokens/s", ours, [Measured("a", [50.0, 25.0, 40.0]), Measured("b", [100.0, 50.0, 100.0])])
    assert line.best.name == "b"
    assert list(line.ratio.values) == [1.2, 1.2, 1.0]
    assert "1.20 ± 0.10" in table([line])


def test_where_less_is_better_a_ratio_above_one_is_still_in_our_favour() -> None:
    line = Comparison("x", "s", Measured("regard", [2.0]), [Measured("a", [3.0]), Measured("b", [9.0])], True)
    assert line.best.name == "a" and line.ratio.median == 1.5


def test_a_line_without_peers_has_no_ratio() -> None:
    last = table([Comparison("packing", "tokens/s", Measured("regard", [30_000_000.0]), [])]).splitlines()[-1]
    assert [cell.strip() for cell in last.strip("|").split("|")] == ["packing", "tokens/s", "30,000,000", "-", "-"]


def test_machine_versions_and_commit_are_printed() -> None:
    facts = machine.about(threads=2)
    assert next(iter(facts)) == "machine" and {"threads", "versions", "commit"} <= facts.keys()
    assert f"torch {torch.__version__}" in facts["versions"]


def test_sentences_are_about_27_tokens_long_and_batches_are_well_filled() -> None:
    store = cpu_training.pairs(5000)
    for side in (store.source, store.target):
        assert 25 < side.lengths().mean() < 29
        assert (side.ids[side.offsets[1:] - 1] == 2).all()  # every sentence ends with the end mark
    for batch in cpu_training.batches(3):
        rows = batch.inputs.layout
        assert rows.tokens > 0.95 * cpu_training.BUDGET
        assert rows.tokens > 0.9 * len(rows) * rows.max_len  # peers are not made to compute on padding


def test_peers_get_the_very_same_tokens() -> None:
    batch = cpu_training.batches(1)[0]
    source, inputs, labels, here, there = cpu_training.padded(batch)
    assert torch.equal(source[here], batch.source.ids) and torch.equal(inputs[there], batch.inputs.ids)
    assert torch.equal(labels[labels != -100], batch.labels)


def test_our_loss_and_the_peer_formula_agree_on_the_same_logits() -> None:
    """So that both measure an update of the same kind: the mean over real target tokens, smoothed alike."""
    batch = cpu_training.batches(1)[0]
    torch.manual_seed(1)
    model = cpu_training.Ours().eval()
    with torch.no_grad():
        mine = model(batch)
        rows = batch.inputs.layout
        theirs = cpu_training.smoothed(rows.pad(model.body.logits(batch)), cpu_training.padded(batch)[2])
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_a_worker_answers_in_turn_and_ends_when_nobody_asks() -> None:
    with Worker("bench.turns", threads=1) as worker:  # run by itself, it repeats what it is asked
        assert worker.ask([1, 2]) == [1, 2]
        assert worker.ask("again") == "again"
    assert worker.process.returncode == 0


def test_the_command_says_which_parts_there_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.cpu", "--only", "nothing"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "training, decoding, packing, start-up" in done.stderr
