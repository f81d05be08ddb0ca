"""Single flipped bits: the files of a run that they can hit, and what must follow from each.

    with flipped(file, bit):
        outcome = observe(...)

A flipped bit may be refused with a `UserError`, or named in a warning or a line of news, or change nothing. It must
never change a result without a word, and never end in any other exception.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from regard.errors import RegardWarning, UserError


def places(files: list[Path], count: int, seed: int) -> list[tuple[Path, int]]:
    """Bits to flip, `count` in all: files take turns, so that small ones are hit as often as large ones.

    Every second bit is drawn from the first 2,000 bytes, where headers are.
    """
    random, chosen = Random(seed), []
    for number in range(count):
        file = files[number % len(files)]
        size = file.stat().st_size
        chosen.append((file, random.randrange(8 * (min(size, 2000) if (number // len(files)) % 2 else size))))
    return chosen


@contextlib.contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """The file with one bit flipped while the context lasts; afterwards it is as it was."""
    before = file.read_bytes()
    content = bytearray(before)
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(before)


@dataclass(frozen=True)
class Outcome:
    """What came of an action: its result, or the error that refused it, and all that was said on the way."""

    result: Any = None
    refused: str = ""
    said: tuple[str, ...] = ()

    def silent_change(self, expected: Any) -> bool:
        """Whether the result is another one and nothing was said of it."""
        return not self.refused and not self.said and self.result != expected


def observe(act: Callable[[list[str]], Any]) -> Outcome:
    """The outcome of an action, which is given a list for lines of news; any error but `UserError` passes through."""
    news: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RegardWarning)
        try:
            result = act(news)
        except UserError as error:
            return Outcome(refused=str(error))
    ours = [str(entry.message) for entry in caught if issubclass(entry.category, RegardWarning)]
    return Outcome(result, said=(*news, *ours))
