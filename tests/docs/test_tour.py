"""The tour says what the code does: every block is run, what it prints is what stands below it, every picture is made.

A chapter (a heading of two signs) is one namespace.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from blocks import chapters, run, settled

DOCS = Path(__file__).parents[2] / "docs"
TOUR = DOCS / "tour.md"
PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]+)\)")


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
    for block, printed in zip(blocks, run(blocks, TOUR), strict=True):
        assert settled(printed) == settled(block.printed), f"the block at docs/tour.md:{block.line} prints\n{printed}"


def test_every_picture_of_the_tour_exists_and_is_made_by_the_script_or_a_command() -> None:
    made: dict[str, Callable[[], str]] = pictures().PICTURES
    named = {Path(picture["path"]) for picture in NAMED}
    commands = re.findall(r"^    regard draw .* --out (\S+)$", TOUR.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 5
    drawn = {Path("pictures/inputs") / name for name in commands}
    assert named == {Path("pictures/tour") / f"{name}.svg" for name in made} | drawn
    for path in named:
        assert (DOCS / path).read_text(encoding="utf-8").startswith("<svg"), path


def test_every_picture_says_in_words_what_it_shows() -> None:
    for picture in NAMED:
        assert len(picture["alt"].split()) >= 8, picture["path"]


def test_links_of_the_tour_lead_somewhere() -> None:
    for target in re.findall(r"(?<!!)\[[^\]]+\]\((?!https?:|#)([^)#]+)", TOUR.read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target
