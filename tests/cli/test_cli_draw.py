"""regard draw: views, files and errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from regard.interpret.trace import Trace
from tiny_runs import make_run

if TYPE_CHECKING:
    from conftest import Command

VIEWS = ("align", "maps", "heads", "walk")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("draw") / "gpt", "gpt").path


@pytest.fixture(scope="module")
def lstm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("draw") / "lstm", "recurrent (no attention)").path


def test_every_view_in_the_terminal(regard: Command, trained: Path) -> None:
    for view in (*VIEWS, "positions", "curves"):
        result = regard("draw", trained, "a b c", "--view", view)
        assert result.status == 0 and result.err == "" and len(result.out.splitlines()) > 8, view
        assert "\x1b" not in result.out


def test_every_kind_of_file(regard: Command, trained: Path, tmp_path: Path) -> None:
    kinds = [".svg", ".html", ".json", ".safetensors", ".png", ".pdf"]
    if os.environ.get("CI") != "true":
        pytest.importorskip("matplotlib")
    begins = {
        ".svg": b"<svg",
        ".html": b"<!doctype html",
        ".png": b"\x89PNG",
        ".pdf": b"%PDF",
        ".json": b'{"view": "heads"',
    }
    for kind in kinds:
        file = tmp_path / f"cat{kind}"
        result = regard("draw", trained, "a b c", "--view", "heads", "--out", file)
        assert (result.status, result.out) == (0, "") and result.err.startswith(f"{file}: ")
        assert file.read_bytes().startswith(begins.get(kind, b""))
    header = Trace.load(tmp_path / "cat.safetensors").header
    assert header == json.loads((tmp_path / "cat.json").read_text())["trace"]
    assert header["text"]["source"] == "a b c"


def test_views_without_a_text(regard: Command, trained: Path, copied: Path, tmp_path: Path) -> None:
    for view in ("positions", "curves"):
        for name in ("one.svg", "one.json", "one.html"):
            assert regard("draw", trained, "--view", view, "--out", tmp_path / name).err == f"{tmp_path / name}\n"
        ElementTree.parse(tmp_path / "one.svg")
        assert json.loads((tmp_path / "one.json").read_text())["view"] == view
        said = regard("draw", trained, "--view", view, "--out", tmp_path / "one.safetensors").error
        assert "no text and so no trace" in said
    named = regard("draw", trained, "--view", "positions", "--kind", "fraction").out
    assert named.startswith("Fraction positions") and "same distance  no" in named
    both = regard("draw", trained, "--view", "curves", "--beside", copied).out
    assert "run, training" in both and "copied, training" in both


def test_the_first_view_that_a_model_has_is_drawn(regard: Command, trained: Path, gpt: Path, lstm: Path) -> None:
    assert regard("draw", trained, "a b").out.startswith("Cross-attention")
    assert regard("draw", gpt, "Once upon").out.startswith("Self-attention, mean of 2 layers, mean of 2 heads")
    assert regard("draw", lstm, "this cat").out.startswith("Gates over the source")
    assert regard("draw", trained, "a b", "--part", "encoder").out.startswith("Encoder self-attention")
    assert regard("draw", trained, "a b", "--out", "-").out == regard("draw", trained, "a b").out


def test_errors_name_the_possible_values(regard: Command, trained: Path, gpt: Path, lstm: Path) -> None:
    cases = [
        ([trained], ["TEXT is missing"]),
        ([trained, "a b", "--view", "gates"], ["--view gates", "without gates", "align, maps, heads, walk"]),
        ([gpt, "a b", "--view", "align"], ["without cross-attention", "maps, heads, walk"]),
        ([trained, "a b", "--head", "wide"], ["--head wide", "best"]),
        ([trained, "a b", "--head", "0"], ["--head 0", "number from 1"]),
        ([gpt, "a b", "--head", "best"], ["--head best", "cross-attention"]),
        ([trained, "a b", "--part", "tail"], ["--part", "cross"]),
        ([lstm, "--view", "positions"], ["adds no positions", "--kind"]),
        ([trained, "--view", "positions", "--kind", "rotary"], ["'rotary' positions add no vectors", "sinusoidal"]),
        ([gpt, "--view", "curves"], ["metrics.jsonl"]),
        ([trained, "a b", "--theme", "blue"], ["--theme", "light"]),
        ([trained, "a b", "--view", "walk", "--head", 1], ["--head has no effect on --view walk", "align and maps"]),
        ([trained, "a b", "--beside", trained], ["--beside has no effect", "curves"]),
    ]
    for words, said in cases:
        error = regard("draw", *words).error
        assert all(part in error for part in said), error


def test_the_theme_is_applied(regard: Command, trained: Path, tmp_path: Path) -> None:
    regard("draw", trained, "a b", "--theme", "dark", "--out", tmp_path / "dark.svg")
    drawn = (tmp_path / "dark.svg").read_text()
    assert 'fill="#14171c"' in drawn and "prefers-color-scheme" not in drawn
