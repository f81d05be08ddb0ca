"""The tour says what the code does: every block is run, what it prints is what stands below it, every picture is made.

A chapter (a heading of two signs) is one namespace. A python block that prints is followed by a text block with what it
printed; one that is not followed by any prints nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TOUR = DOCS / "tour.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]+)\)")


@dataclass(frozen=True)
class Block:
    """Some python, the line of the tour where it stands, and what it should print."""

    code: str
    line: int
    printed: str


def chapters(text: str) -> dict[str, list[Block]]:
    """The blocks of each chapter, in order."""
    found: dict[str, list[Block]] = {}
    fences = [(match.start(), match[1], match[2]) for match in FENCE.finditer(text)]
    inside = [range(match.start(), match.end()) for match in FENCE.finditer(text)]
    heads = [h for h in re.finditer(r"^## (.+)$", text, re.MULTILINE) if not any(h.start() in span for span in inside)]
    ends = [*(head.start() for head in heads[1:]), len(text)]
    for head, end in zip(heads, ends, strict=True):
        own = [fence for fence in fences if head.start() <= fence[0] < end]
        after = [*own, (end, "", "")][1:]
        found[head[1]] = [
            Block(code, text[:start].count("\n") + 2, following[2] if following[1] == "text" else "")
            for (start, kind, code), following in zip(own, after, strict=True)
            if kind == "python"
        ]
    return {name: blocks for name, blocks in found.items() if blocks}


def run(blocks: list[Block]) -> list[str]:
    """What each block prints, all of them in one namespace."""
    names: dict[str, Any] = {"__name__": "tour"}
    printed = []
    for block in blocks:
        code = compile("\n" * (block.line - 1) + block.code, str(TOUR), "exec")  # tracebacks name the tour's lines
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        printed.append(out.getvalue())
    return printed


def settled(text: str) -> list[str]:
    """Lines without trailing space, and zeros without a sign: -0.00 and 0.00 are the same number."""
    return [re.sub(r"-(0\.?0*)(?![\d.])", r" \1", line).rstrip() for line in text.strip("\n").splitlines()]


def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tour_pictures", DOCS / "pictures" / "tour.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHAPTERS = chapters(TOUR.read_text(encoding="utf-8"))
NAMED = [match.groupdict() for match in PICTURE.finditer(TOUR.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", CHAPTERS)
def test_what_a_chapter_prints_is_what_stands_in_the_tour(name: str) -> None:
    blocks = CHAPTERS[name]
    for block, printed in zip(blocks, run(blocks), strict=True):
        assert settled(printed) == settled(block.printed), f"the block at docs/tour.md:{block.line} prints\n{printed}"


def test_every_picture_of_the_tour_exists_and_is_made_by_the_script() -> None:
    made: dict[str, Callable[[], str]] = pictures().PICTURES
    named = {Path(picture["path"]) for picture in NAMED}
    assert named == {Path("pictures/tour") / f"{name}.svg" for name in made}
    for path in named:
        assert (DOCS / path).read_text(encoding="utf-8").startswith("<svg"), path


def test_every_picture_says_in_words_what_it_shows() -> None:
    for picture in NAMED:
        assert len(picture["alt"].split()) >= 8, picture["path"]


def test_links_of_the_tour_lead_somewhere() -> None:
    for target in re.findall(r"(?<!!)\[[^\]]+\]\((?!https?:|#)([^)#]+)", TOUR.read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target
