"""Scores of predicted numbers: root mean squared error, mean absolute error, R2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NumberScores:
    """Errors in the units of the data; `r2` is the share of the variance that is predicted (1: all, 0: none).

    >>> scores = NumberScores.of([1.0, 2.0, 6.0], [1.0, 3.0, 5.0])
    >>> round(scores.rmse, 4), round(scores.mae, 4), scores.r2
    (0.8165, 0.6667, 0.75)
    """

    rmse: float
    mae: float
    r2: float

    @classmethod
    def of(cls, predicted: Sequence[float], references: Sequence[float]) -> NumberScores:
        errors = [p - r for p, r in zip(predicted, references, strict=True)]
        squared, mean = sum(e * e for e in errors), sum(references) / len(references)
        spread = sum((r - mean) ** 2 for r in references)
        r2 = 1 - squared / spread if spread else math.nan
        return cls(math.sqrt(squared / len(errors)), sum(map(abs, errors)) / len(errors), r2)

    @classmethod
    def mean(cls, scores: Sequence[NumberScores]) -> NumberScores:
        """The means of the scores of several numbers."""
        count = len(scores)
        return cls(
            sum(s.rmse for s in scores) / count, sum(s.mae for s in scores) / count, sum(s.r2 for s in scores) / count
        )
