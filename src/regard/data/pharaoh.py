"""Word alignments in Pharaoh files: a line for each pair, such as `0-0 1-2`; words are counted from 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from regard.data.lines import read_lines
from regard.errors import UserError

Link = tuple[int, int]  # (source word, target word)


@dataclass(frozen=True)
class PairLinks:
    """The lines of a file from line `first` on, counted from 0: those of one corpus among several."""

    path: Path
    first: int = 0

    def read(self) -> Iterator[list[Link]]:
        """The links of each pair."""
        for number, line in enumerate(islice(read_lines(self.path), self.first, None), self.first + 1):
            try:
                links = [(int(i), int(j)) for i, j in (word.split("-") for word in line.split())]
            except ValueError:
                raise UserError(f"{self.path}, line {number}: expected links such as 0-0 1-2") from None
            yield links

    def check_count(self, pairs: int) -> None:
        """Raise an error if the file does not have a line for each of this many pairs."""
        lines = sum(1 for _ in read_lines(self.path))
        if lines != pairs:
            raise UserError(f"{self.path} has {lines:,} lines, but there are {pairs:,} training pairs")
