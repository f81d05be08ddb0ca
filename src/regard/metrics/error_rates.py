"""Word and character error rates: the edits that turn the references into the outputs, per word or character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Edits:
    """Numbers of edits that turn a reference of `length` items into an output; the fewest possible."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    length: int = 0

    def __add__(self, other: Edits) -> Edits:
        return Edits(
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.length + other.length,
        )

    @property
    def rate(self) -> float:
        """Edits per item of the reference, in percent; above 100 if there are more edits than items."""
        return 100 * (self.substitutions + self.deletions + self.insertions) / max(self.length, 1)


def edits(reference: Sequence[object], output: Sequence[object]) -> Edits:
    """The edits of the Levenshtein distance; among equally few, those with the most substitutions.

    >>> edits("a b c d".split(), "a x c d e".split())
    Edits(substitutions=1, deletions=0, insertions=1, length=4)
    """
    # row[j] = (edits, deletions, insertions) that turn reference[:i] into output[:j]; tuples compare by fewest edits
    row = [(j, 0, j) for j in range(len(output) + 1)]
    for i, wanted in enumerate(reference, 1):
        diagonal, row[0] = row[0], (i, i, 0)
        for j, given in enumerate(output, 1):
            above, left = row[j], row[j - 1]
            best = min(
                (diagonal[0] + (wanted != given), *diagonal[1:]),
                (above[0] + 1, above[1] + 1, above[2]),
                (left[0] + 1, left[1], left[2] + 1),
            )
            diagonal, row[j] = above, best
    total, deletions, insertions = row[-1]
    return Edits(total - deletions - insertions, deletions, insertions, len(reference))


@dataclass(frozen=True)
class ErrorRates:
    """Edits in words (separated by white space) and in characters, summed over all texts, and the exact matches."""

    words: Edits
    characters: Edits
    exact: int
    texts: int

    @classmethod
    def of(cls, outputs: Sequence[str], references: Sequence[str]) -> ErrorRates:
        """
        >>> rates = ErrorRates.of(["one too", "three"], ["one two", "three"])
        >>> round(rates.wer, 2), round(rates.cer, 2), rates.accuracy
        (33.33, 8.33, 50.0)
        """
        words = characters = Edits()
        for output, reference in zip(outputs, references, strict=True):
            words += edits(reference.split(), output.split())
            characters += edits(reference, output)
        exact = sum(a.split() == b.split() for a, b in zip(outputs, references, strict=True))
        return cls(words, characters, exact, len(references))

    @property
    def wer(self) -> float:
        """Word error rate, in percent."""
        return self.words.rate

    @property
    def cer(self) -> float:
        """Character error rate, in percent; spaces are characters too."""
        return self.characters.rate

    @property
    def accuracy(self) -> float:
        """The percentage of texts whose words are all right."""
        return 100 * self.exact / max(self.texts, 1)
