"""Scores of a classifier: accuracy, F1 and the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClassScores:
    """Counts of examples by class and prediction: `confusion[i][j]` are of class i and predicted as class j.

    >>> scores = ClassScores.of([0, 1, 1, 1], [0, 0, 1, 1], ["cat", "dog"])
    >>> scores.confusion, scores.accuracy
    (((1, 1), (0, 2)), 75.0)
    >>> [round(score, 1) for score in scores.f1], round(scores.macro_f1, 1)
    ([66.7, 80.0], 73.3)
    """

    classes: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, predicted: Sequence[int], labels: Sequence[int], classes: Sequence[str]) -> ClassScores:
        counts = [[0] * len(classes) for _ in classes]
        for label, prediction in zip(labels, predicted, strict=True):
            counts[label][prediction] += 1
        return cls(tuple(classes), tuple(map(tuple, counts)))

    @property
    def examples(self) -> int:
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """The percentage of examples that were predicted right."""
        return 100 * sum(row[i] for i, row in enumerate(self.confusion)) / max(self.examples, 1)

    @property
    def f1(self) -> list[float]:
        """The harmonic mean of precision and recall of each class, from 0 to 100; 0 if nothing of it was right.

        2 · right / (predicted + actual), which is 0 / 0 for a class that neither occurs nor was predicted: 0 too.
        """
        predicted = [sum(column) for column in zip(*self.confusion, strict=True)]
        actual = list(map(sum, self.confusion))
        right = [row[i] for i, row in enumerate(self.confusion)]
        return [200 * r / max(p + a, 1) for r, p, a in zip(right, predicted, actual, strict=True)]

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that occur in the examples or were predicted."""
        counts = zip(self.confusion, zip(*self.confusion, strict=True), self.f1, strict=True)
        present = [f1 for row, column, f1 in counts if any(row) or any(column)]
        return sum(present) / max(len(present), 1)
