"""Single flipped bits in the files of a run, and their consequences.

    with flipped(file, bit):
        outcome = observe(...)

A flipped bit may be refused with a `UserError`, or be named in a warning or a progress line, or change nothing. It must
never change a result silently, or end in another exception.
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
    """Choose `count` bits to flip, in each file in turn, so that small ones are hit as often as large ones.

    Half of the bits are in the first 2,000 bytes, where headers are.
    """
    random, chosen = Random(seed), []
    for number in range(count):
        file = files[number % len(files)]
        size = file.stat().st_size
        chosen.append((file, random.randrange(8 * (min(size, 2000) if (number // len(files)) % 2 else size))))
    return chosen


@contextlib.contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """Flip one bit of a file within the context."""
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
    """The result of an action, or the error that refused it, and its warnings."""

    result: Any = None
    refused: str = ""
    warnings: tuple[str, ...] = ()

    def silent_change(self, expected: Any) -> bool:
        """Return whether the result differs without a warning."""
        return not self.refused and not self.warnings and self.result != expected


def observe(act: Callable[[list[str]], Any]) -> Outcome:
    """Run an action, which gets a list for progress lines; any error but `UserError` propagates."""
    news: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RegardWarning)
        try:
            result = act(news)
        except UserError as error:
            return Outcome(refused=str(error))
    ours = [str(entry.message) for entry in caught if issubclass(entry.category, RegardWarning)]
    return Outcome(result, warnings=(*news, *ours))
