"""Symmetrisation: tables derived by hand, and the published definition as a slow twin."""

from __future__ import annotations

import random

import pytest

from regard.metrics.alignment import Link
from regard.metrics.symmetrise import METHODS, NEIGHBOURS, pharaoh

# Four source and four target words. Both directions have (0, 0) and (2, 2).
FORWARD = {(0, 0), (1, 0), (2, 2), (0, 3)}
REVERSE = {(0, 0), (2, 2), (3, 1), (2, 1)}
TABLES = {
    "forward": FORWARD,
    "reverse": REVERSE,
    "intersection": {(0, 0), (2, 2)},
    "union": FORWARD | REVERSE,
    # (1, 0) is next to (0, 0) and source 1 is free; (2, 1) is next to (2, 2) and target 1 is free; (3, 1) is next to
    # (2, 2), diagonally, and was free on both sides before. (0, 3) is next to nothing.
    "grow-diagonal": {(0, 0), (2, 2), (1, 0), (2, 1), (3, 1)},
    # Only (3, 1) has two words without a link.
    "grow-diagonal-and": {(0, 0), (2, 2), (3, 1)},
    # (0, 3): source 0 has a link.
    "grow-diagonal-final-and": {(0, 0), (2, 2), (1, 0), (2, 1), (3, 1)},
}


@pytest.mark.parametrize("method", METHODS)
def test_tables_by_hand(method: str) -> None:
    assert METHODS[method](FORWARD, REVERSE) == TABLES[method]


def test_final_and_adds_links_of_two_free_words_forward_first() -> None:
    forward, reverse = {(0, 0), (3, 5), (6, 8)}, {(0, 0), (3, 6), (8, 8)}
    # (3, 5) comes before (3, 6), whose source then has a link; (6, 8) before (8, 8).
    assert METHODS["grow-diagonal-final-and"](forward, reverse) == {(0, 0), (3, 5), (6, 8)}
    assert METHODS["grow-diagonal"](forward, reverse) == {(0, 0)}


def scan(forward: set[Link], reverse: set[Link], both: bool) -> set[Link]:
    """Growing as Koehn et al. (2003) write it: scan the whole table again and again until nothing is added."""
    links, union = forward & reverse, forward | reverse
    added = True
    while added:
        added = False
        for i in range(9):
            for j in range(9):
                for new in [(i + di, j + dj) for di, dj in NEIGHBOURS if (i, j) in links]:
                    free = [new[0] not in {i for i, _ in links}, new[1] not in {j for _, j in links}]
                    if new in union and new not in links and (all(free) if both else any(free)):
                        links.add(new)
                        added = True
    return links


def test_growing_equals_the_scan_of_the_whole_table() -> None:
    drawn = random.Random(1)
    for _ in range(200):
        rows, columns = drawn.randint(1, 9), drawn.randint(1, 9)
        forward = {(drawn.randrange(rows), j) for j in range(columns)}
        reverse = {(i, drawn.randrange(columns)) for i in range(rows)}
        for method, both in (("grow-diagonal", False), ("grow-diagonal-and", True)):
            assert METHODS[method](forward, reverse) == scan(forward, reverse, both)


def test_links_are_written_in_order() -> None:
    assert pharaoh({(10, 0), (2, 1), (2, 0)}) == "2-0 2-1 10-0" and pharaoh([]) == ""
