"""regard explain: terminal output, files and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from regard import load
from regard.interpret.explain import Explanation

Command = Callable[..., Any]


def test_the_terminal_shows_bars_a_matrix_and_a_note(regard: Command, trained: Path) -> None:
    result = regard("explain", trained, "a b c", "--target", "a b")
    assert result.status == 0 and result.err == ""
    lines = result.out.splitlines()
    assert lines[0] == "a b c → a b"
    assert "all 8 masks, so exact" in lines[2]
    assert [line.split()[0] for line in lines[4:7]] == ["a", "b", "c"]
    heads = next(i for i, line in enumerate(lines) if line.split() == ["a", "b", "c"])
    assert [line.split()[0] for line in lines[heads + 1 : heads + 4]] == ["a", "b", "</s>"]
    said = " ".join(result.out.split())
    assert "how the output depends on the words when some are hidden (replaced by the unknown token)" in said
    assert "It does not show how the model reasons" in said


def test_the_numbers_are_those_of_the_library(regard: Command, trained: Path) -> None:
    words = ["--random", "--masks", 200, "--seed", 5, "--how", "drop", "--keep", 0.6]
    found = json.loads(regard("explain", trained, "a b c d", "--json", *words).out)
    same: Explanation = load(trained, device="cpu").explain(
        "a b c d", exact=False, masks=200, seed=5, how="drop", keep=0.6
    )
    assert found["importance"] == same.importance.tolist() and found["error"] == same.error.tolist()
    assert found["features"] == ["a", "b", "c", "d"] and found["outputs"] == list(same.outputs)
    assert found["calls"] == 202 and found["exact"] is False and found["text"] == "a b c d"
    assert "curves" not in found
    other = json.loads(regard("explain", trained, "a b c d", "--json", *words, "--seed", 6).out)
    assert other["importance"] != found["importance"]


def test_curves_also_for_random_order_and_attention(regard: Command, trained: Path) -> None:
    found = json.loads(regard("explain", trained, "a b c", "--json", "--curves").out)
    assert [curve["order"] for curve in found["curves"]] == ["importance", "attention", "random order"]
    for curve in found["curves"]:
        deletion, insertion = np.array(curve["deletion"]), np.array(curve["insertion"])
        assert deletion[0] == pytest.approx(found["whole"], abs=1e-4) == insertion[-1]
        assert deletion[-1] == pytest.approx(found["nothing"], abs=1e-4) == insertion[0]
        assert curve["deletion_area"] == pytest.approx(((deletion[:-1] + deletion[1:]) / 2).mean())
    shown = regard("explain", trained, "a b c", "--curves").out
    assert "deletion (lower is better)" in shown and "random order" in shown


def test_out_writes_an_svg_file(regard: Command, trained: Path, tmp_path: Path) -> None:
    result = regard("explain", trained, "a b <&>", "--out", tmp_path / "one.svg")
    assert result.status == 0 and result.out == "" and str(tmp_path / "one.svg") in result.err
    ElementTree.fromstring((tmp_path / "one.svg").read_text(encoding="utf-8"))
    assert regard("explain", trained, "a b c", "--curves", "--out", tmp_path / "all.svg").status == 0
    root = ElementTree.fromstring((tmp_path / "all.svg").read_text(encoding="utf-8"))
    assert len([group for group in root if group.get("class") == "picture"]) == 3


def test_spans_and_tolerance(regard: Command, trained: Path) -> None:
    found = json.loads(regard("explain", trained, "a b c d e", "--json", "--span", 2).out)
    assert [name.replace("␣", " ").strip() for name in found["features"]] == ["a b", "c d", "e"]
    loose = json.loads(regard("explain", trained, "a b c d e", "--json", "--random", "--tolerance", 100).out)
    assert loose["calls"] < 1002


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["  "], "there is nothing to explain: the text is blank"),
        (["a b", "--out", "map.gif"], "map.gif: the name of the picture must end in .svg, .png, .pdf"),
        (["a b", "--out", "map.svg", "--json"], "give only one of them"),
        (["a b", "--keep", "1.0"], "keep = 1.0"),
        (["a b", "--tolerance", "0"], "tolerance = 0.0"),
        (["a b", "--how", "erase"], "--how"),
        (["a " * 13, "--exact"], "13 parts have 2^13 masks: exact only up to 12 parts"),
        (["a b", "--target", "a " * 60], "the target has"),
    ],
)
def test_errors_are_one_line(regard: Command, trained: Path, words: list[str], error: str) -> None:
    assert error in regard("explain", trained, *words).error


def test_a_text_that_is_too_long_is_truncated_with_a_warning(regard: Command, trained: Path) -> None:
    result = regard("explain", trained, "a " * 60, "--masks", 4)
    assert result.status == 0 and "was truncated" in result.err
    assert regard("explain", trained, "a " * 60, "--masks", 4, "--quiet").err == ""
