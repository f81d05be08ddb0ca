"""regard plan"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regard.cli.plan import scaling_limits
from regard.planning import HARDWARE, Plan

Command = Callable[..., Any]


def test_the_command_prints_tables_json_and_pictures(regard: Command, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    recipe = tmp_path / "mine.toml"
    model = '[model]\nsize = "tiny"\nencoder_layers = 1\ndecoder_layers = 1\n'
    recipe.write_text(f'extends = "en-es"\n{model}[training]\nbatch_tokens = 512\n', encoding="utf-8")
    done = regard("plan", str(recipe), "--gpus", "2", "--price", "3", "--out", str(tmp_path / "plot.svg"))
    assert done.status == 0
    for part in ("GB on each GPU", "ddp: fits", "tokens/s", "scaling pays", "training.accumulate=2", "not compared"):
        assert part in done.out
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
    entry = json.loads(regard("plan", str(recipe), "--json", "--bench", str(bench_file(tmp_path))).out)
    assert entry["weak_scaling"][0]["tokens_per_second"] == pytest.approx(1234.0)
    assert entry["hardware"]["matmul_rate"] == 5e12


def bench_file(folder: Path) -> Path:
    path = folder / "bench.json"
    path.write_text(json.dumps({"training": {"matrix_rate": 5e12, "tokens_per_second": 1234.0}}))
    return path


def test_bad_input_is_one_line(regard: Command, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for given, message in (
        (["--out", "a.gif"], "only be written as .svg or .png"),
        (["--bench", str(tmp_path / "none.json")], "cannot read"),
        (["--bench", str(other)], "is not what `regard bench RUN --json` prints"),
        (["--gpu", "tpu"], "tpu"),
        (["--gpus", "0"], "must be greater than or equal to 1"),
        (["--set", "model.width=1000000000"], "model.width = 1000000000: a model of"),
        (["--set", "model.decoder_layers=1000000"], "model.decoder_layers = 1000000: the planner knows at most 2,000"),
        (["--set", "training.batch_tokens=1000000000000"], "the planner knows at most 1,048,576"),
    ):
        done = regard("plan", "en-es", *given)
        assert done.status == 2 and message in done.err and done.err.count("regard: ") == 1


@pytest.mark.parametrize(
    ("limit", "words"), [(512, "up to 512 GPUs with"), (1024, "1,024 GPUs, the most that are planned,")]
)
def test_a_limit_at_the_end_of_the_plan_is_not_said_to_be_one_of_scaling(limit: int, words: str) -> None:
    plan = Plan(HARDWARE["h100"], 16, 8, "plain", 1, 1.0, 1.0, [], [], [], limit, 2)
    assert words in scaling_limits(plan)
