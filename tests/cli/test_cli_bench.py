"""regard bench: every family is measured, and the run is not changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]  # the fixture `regard`


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


QUICK = ["--steps", "3", "--seconds", "0.2", "--device", "cpu"]
SMALL = [
    "model.width=16",
    "model.dropout=0",
    "training.steps=2",
    "training.validate_lines=2",
    "training.batch_tokens=256",
]
BLOCKS = ["model.heads=2", "model.ffn_width=32"]
FAMILIES = {
    "recurrent": ["copy", *sets(*SMALL, "data.count=200", "model.family=recurrent", "model.size=tiny")],
    "gpt": ["stories", *sets(*SMALL, *BLOCKS, "data.count=200", "model.layers=1", "text.vocabulary=300")],
    "bert": ["stories-bert", *sets(*SMALL, *BLOCKS, "data.count=200", "model.layers=1", "text.vocabulary=300")],
}


def digests(run: Path) -> dict[str, str]:
    files = [file for file in run.rglob("*") if file.is_file()]
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_bench_prints_units_and_does_not_change_the_run(regard: Command, trained: Path) -> None:
    before = digests(trained)
    shown = regard("bench", trained, *QUICK)
    assert shown.status == 0, shown.err
    names = [line.split()[0] for line in shown.out.splitlines()[1:]]
    assert names[:6] == ["training", "arithmetic", "waiting", "packing", "memory", "decoding"]
    for unit in ("target tokens/s", "GFLOP/s in fp32", "GiB", "per second: sentences, beam 2", "output tokens/s"):
        assert unit in shown.out
    assert digests(trained) == before


def test_json_output(regard: Command, trained: Path) -> None:
    found = json.loads(regard("bench", trained, "--json", *QUICK).out)
    training, decoding = found["training"], found["decoding"]
    assert found["device"] == "cpu" and training["step"] == "plain" and training["precision"] == "fp32"
    assert 1 <= training["updates"] <= 3
    assert training["tokens_per_second"] == pytest.approx(training["tokens"] / training["seconds"])
    assert training["share"] == pytest.approx(training["flops_per_second"] / training["matrix_rate"])
    assert 0 < training["share"] < 1.5 and 0 <= training["waiting"] <= 1
    assert training["idle"] is None  # there is no GPU to be idle
    assert training["packing_ahead"] == pytest.approx(training["packing"] / training["tokens_per_second"])
    assert training["peak_bytes"] > 2**20
    assert decoding["sentences_per_second"] > 0 and decoding["tokens_per_second"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_measured(regard: Command, tmp_path: Path, family: str) -> None:
    made = regard("train", *FAMILIES[family], "--quiet", "--device", "cpu", "--out", tmp_path / "run")
    assert made.status == 0, made.err
    found = json.loads(regard("bench", tmp_path / "run", "--json", *QUICK).out)
    assert found["training"]["tokens_per_second"] > 0 and found["decoding"]["sentences_per_second"] > 0
    assert (found["decoding"]["tokens_per_second"] is None) == (family == "bert")  # which writes nothing


def test_a_missing_run_is_an_error_that_says_how_to_make_one(regard: Command, tmp_path: Path) -> None:
    assert "does not exist" in regard("bench", tmp_path / "nothing").error


def test_an_imported_run_is_not_trained_and_decodes_random_text(regard: Command, copied: Path) -> None:
    recipe = copied / "recipe.toml"
    kept = [line for line in recipe.read_text().splitlines() if not line.startswith(("corpus =", "count ="))]
    recipe.write_text("\n".join('[data]\nimported = "pairs"' if line == "[data]" else line for line in kept) + "\n")
    shown = regard("bench", copied, "--json", *QUICK)
    assert "without training data" in shown.err
    found = json.loads(shown.out)
    assert found["training"] is None and found["decoding"]["sentences_per_second"] > 0


def test_files_that_moved_are_found_with_data(regard: Command, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    for name in ("s", "t"):
        (old / name).write_text("a b c\nd e f g\n" * 30)
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[data]\nsource = "s"\ntarget = "t"\nvalid = ["s", "t"]\n[text]\nunit = "word"\n')
    settings = [*SMALL, *BLOCKS, "model.encoder_layers=1", "model.decoder_layers=1"]
    made = regard("train", recipe, "--data", old, *sets(*settings), "-q", "--device", "cpu", "--out", tmp_path / "run")
    assert made.status == 0, made.err
    old.rename(new)
    assert "--data" in regard("bench", tmp_path / "run", *QUICK).error
    assert regard("bench", tmp_path / "run", "--data", new, *QUICK).status == 0


def test_idle_is_the_time_of_the_steps_without_kernels(monkeypatch):
    """600 steps of 10 ms; 100 of them are profiled, with 9.7 ms of kernels each, however long they take then."""
    import torch.profiler

    from regard.benchmark import idle_share

    made = []

    class Seen:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def key_averages(self):
            kernel = type("Kernel", (), {"self_device_time_total": 9700 * made[-1] / 2})
            return [kernel(), kernel()]

    monkeypatch.setattr(torch.profiler, "profile", Seen)

    def go(steps):
        made.append(steps)
        return steps * 0.010 * len(made)  # the second time, under the profiler, slower

    assert idle_share(go, 600) == pytest.approx(0.03)
    assert made == [600, 100]
