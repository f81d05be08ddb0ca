"""What the benchmark of quality for time does before it trains: text as the shared task writes it, buckets, rates."""

from __future__ import annotations

import argparse
import os
import re
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
if not (ROOT / "bench" / "quality.py").exists():
    pytest.skip("the benchmarks are not part of an installed package", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from bench import hansards, peers_marian, quality  # noqa: E402


@pytest.mark.parametrize(
    ("raw", "written"),
    [
        ("Mr President, it isn't 1,000.5 euros!", "Mr President , it is not 1,000.5 euros !"),
        ("The Member’s re-election (in 2000).", "The Member 's re - election ( in 2000 ) ."),
    ],
)
def test_english_is_written_as_in_the_hansards(raw: str, written: str) -> None:
    assert hansards.english(raw) == written


@pytest.mark.parametrize(
    ("raw", "written"),
    [
        ("L'opposition n'est qu'au début du débat.", "Le opposition ne est que à le début de le débat ."),
        ("Aujourd'hui, peut-être, des députés.", "Aujourd' hui , peut - être , de les députés ."),
    ],
)
def test_french_is_written_out_as_in_the_hansards(raw: str, written: str) -> None:
    assert hansards.french(raw) == written


def test_every_pair_is_in_one_bucket_padded_to_its_length_and_an_epoch_visits_each_once() -> None:
    lengths = [(3, 5), (8, 2), (9, 9), (20, 17), (4, 4), (30, 31)]
    sources, targets = ([[10 + n] * pair[side] for n, pair in enumerate(lengths)] for side in (0, 1))
    buckets = peers_marian.make_buckets(sources, targets, 3, 16, torch.device("cpu"))
    found = sorted(tuple(row.tolist()) for bucket in buckets for row in bucket.target)
    assert [[token for token in row if token] for row in found] == sorted(targets)
    assert all(table.shape[1] % 8 == 0 for bucket in buckets for table in (bucket.source, bucket.target))
    steps = sum(len(bucket.source) // bucket.rows for bucket in buckets)
    visited = [
        (number, row) for number, rows in islice(peers_marian.batches(buckets, 1), steps) for row in rows.tolist()
    ]
    assert len(set(visited)) == len(visited) == sum(len(b.source) // b.rows * b.rows for b in buckets)


def test_the_peers_rate_warms_up_by_steps_and_ends_at_zero_by_the_clock() -> None:
    given = argparse.Namespace(learning_rate=1.0, warmup=10, cooldown=0.5)
    shares = [(5, 0.0), (10, 0.1), (50, 0.5), (80, 0.75), (99, 1.0)]
    assert [peers_marian.rate(given, *share) for share in shares] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


def test_a_command_s_words_are_logged_with_their_seconds_and_what_it_prints_comes_back(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    talk = "import sys, time; print('loud', file=sys.stderr, flush=True); time.sleep(0.3); sys.stderr.write('late'); "
    assert quality.run([sys.executable, "-c", talk + "print('score')"], dict(os.environ), log) == "score\n"
    _, loud, late = re.findall(r"^ *([\d.]+) s  (.*)$", log.read_text("utf-8"), re.MULTILINE)
    assert loud[1] == "loud" and late[1].startswith("late") and float(late[0]) >= float(loud[0]) + 0.2
    with pytest.raises(SystemExit, match="late"):
        quality.run([sys.executable, "-c", talk + "sys.exit(1)"], dict(os.environ), log)
