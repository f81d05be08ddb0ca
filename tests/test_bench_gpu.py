"""The peers of the GPU benchmark take their steps; how fast is measured where there is a GPU."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import pytest
import torch
from bench import decoding_checks, gpu_gaps, gpu_peers
from bench.gpu_training import CASES, lengths, packed

BUSY = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # how much longer everything takes on a busy machine


def test_made_up_pairs_are_about_27_tokens_long_and_alike_on_both_sides() -> None:
    pairs = lengths(20_000, 1)
    sources, targets = zip(*pairs, strict=True)
    assert 25 < sum(sources) / len(pairs) < 29 and 25 < sum(targets) / len(pairs) < 29
    assert all(0.4 < (s + 1) / (t + 1) < 2.5 for s, t in pairs)


def test_static_batches_are_nearly_full() -> None:
    for batch in packed(2048, 3):
        assert batch.num_targets > 0.95 * 2048 and batch.source.layout.tokens > 0.85 * batch.source.layout.size


def test_buckets_hold_what_fits_them_and_count_real_tokens() -> None:
    batches = gpu_peers.bucketed(lengths(2000, 1), 1000, 300, "cpu")
    assert len({batch.target.shape for batch in batches}) <= len(gpu_peers.LONGEST)
    for batch in batches:
        assert batch.real == int((batch.target != gpu_peers.PAD).sum())
        assert 0.7 * 1000 < batch.real < 1.3 * 1000
        assert batch.source.shape == batch.target.shape


@pytest.mark.parametrize("kind", [gpu_peers.TorchTransformer, gpu_peers.Marian])
def test_a_peers_step_moves_its_weights(kind: type) -> None:
    step, _ = gpu_peers.translator(kind, lengths(20, 1), 100, compiled=False, device="cpu", sizes=gpu_peers.TINY)
    before = [p.detach().clone() for p in step.model.parameters()]
    assert step() > 0
    moved = [bool((a != b).any()) for a, b in zip(before, step.model.parameters(), strict=True)]
    assert sum(moved) > 0.9 * len(moved)


@pytest.mark.parametrize("plain", [True, False])
def test_gpt2_counts_every_token_but_the_last_of_a_window(plain: bool) -> None:
    step = gpu_peers.gpt2(2, plain=plain, compiled=False, device="cpu", sizes=gpu_peers.TINY)
    assert step() == 2 * gpu_peers.TINY.context


def test_gpt2_written_down_plainly_has_as_many_weights() -> None:
    plain, theirs = gpu_peers.PlainGPT(gpu_peers.TINY), gpu_peers.huggingface_gpt2(gpu_peers.TINY)
    counts = [sum(p.numel() for p in model.parameters()) for model in (plain, theirs)]
    assert counts[0] == counts[1]


def test_every_case_says_what_it_is() -> None:
    assert {"transformer-32k", "transformer-8k", "gpt2"} <= CASES.keys()
    assert all(case.flops > 1e8 for case in CASES.values())


def test_every_gap_names_options_that_its_benchmark_has() -> None:
    for name, case in gpu_gaps.CASES.items():
        for command in f"{case.words}; {case.quick}".split("; "):
            module, *options = command.split()
            if module == "regard":
                continue
            source = Path(gpu_gaps.__file__).with_name(module.split(".")[1] + ".py").read_text()
            missing = [word for word in options if word.startswith("--") and f'"{word}"' not in source]
            assert not missing, f"{name}: {module} has no {missing}"
            parts = [word for word in options if word in ("fsdp-774m", "fsdp-base", "base-captured", "gpt2-774m")]
            assert all(f'"{part}"' in source for part in parts)


def test_the_document_lists_the_gaps_in_their_order() -> None:
    text = (Path(__file__).parents[1] / "docs" / "numbers.md").read_text(encoding="utf-8")
    table = text.partition("## GPU measurements that are missing")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [name for cell in cells for name in re.findall("`(.+?)`", cell)] == [*gpu_gaps.CASES]


def test_a_benchmark_that_hangs_is_ended_and_what_it_printed_is_kept() -> None:
    given = argparse.Namespace(device="cpu", data=None, quick=False)
    hangs = gpu_gaps.measure(gpu_gaps.Case("", 9, "http.server 0 --bind 127.0.0.1", ""), 2 * BUSY, given)
    assert hangs["status"] == "time limit" and "Serving HTTP" in hangs["printed"] and hangs["seconds"] < 20 * BUSY
    fails = gpu_gaps.measure(gpu_gaps.Case("", 9, "json.tool --help; json.tool OUT", ""), 60 * BUSY, given)
    assert fails["status"] == 2 and "usage" in fails["printed"] and fails["result"] is None


EVERYDAY = "beams are not reordered", "every step draws the same number"  # the others take seconds


@pytest.mark.parametrize(
    "mistake", [m if m in EVERYDAY else pytest.param(m, marks=pytest.mark.slow) for m in decoding_checks.PLANTS]
)
def test_a_mistake_in_captured_decoding_would_be_found(mistake: str) -> None:
    """Made in the search in fixed shapes alone, and held against the eager search, without a GPU."""
    device = torch.device("cpu")
    name, how, *_ = decoding_checks.PLANTS[mistake]
    assert all(result.verdict == "right" for _, result in decoding_checks.check(name, how, device))
    assert decoding_checks.caught(mistake, device)


def test_a_check_that_decides_nothing_fails() -> None:
    hypotheses = [[]] * 5
    close = decoding_checks.compared((hypotheses, [0.0] * 5), (hypotheses, [0.0] * 5))
    assert close.verdict == "UNDECIDED"
