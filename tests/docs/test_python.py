"""The page about Python says what the code does: its blocks are run in order, in one namespace and an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from blocks import chapters, run, settled

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "python.md"


def test_what_the_page_prints_is_what_stands_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    blocks = [block for chapter in chapters(PAGE.read_text(encoding="utf-8")).values() for block in chapter]
    assert len(blocks) > 6
    for block, printed in zip(blocks, run(blocks, PAGE), strict=True):
        assert settled(printed) == settled(block.printed), f"the block at docs/python.md:{block.line} prints\n{printed}"


def test_links_of_the_page_lead_somewhere() -> None:
    for target in re.findall(r"(?<!!)\[[^\]]+\]\((?!https?:|#)([^)#]+)", PAGE.read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target
