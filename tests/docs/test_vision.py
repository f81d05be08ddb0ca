"""The page about images says what the code does, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from blocks import chapters, run, settled

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "vision.md"


def test_what_the_page_prints_is_what_stands_in_it() -> None:
    blocks = [block for chapter in chapters(PAGE.read_text(encoding="utf-8")).values() for block in chapter]
    assert blocks
    for block, printed in zip(blocks, run(blocks, PAGE), strict=True):
        assert settled(printed) == settled(block.printed), f"the block at docs/vision.md:{block.line} prints\n{printed}"


def test_links_and_pictures_of_the_page_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    links = re.findall(r"\[[^\]]+\]\((?!https?:|#)([^)#]+)", text) + re.findall(r'src="([^"]+)"', text)
    assert len(links) > 2
    for target in links:
        assert (DOCS / target).exists(), target
