"""Calibration: how far stated confidences are from how often they are right, and a curve that corrects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BINS = 10


@dataclass(frozen=True)
class CalibrationCurve:
    """A non-decreasing, piecewise linear function: calibrated confidence of a raw one."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __call__(self, raw: float) -> float:
        return float(np.interp(raw, self.x, self.y))


@dataclass(frozen=True)
class ReliabilityBin:
    """Predictions of similar confidence: their number, mean confidence, and how many of them are right."""

    count: int
    confidence: float
    accuracy: float


def isotonic(raw: Sequence[float], correct: Sequence[float]) -> CalibrationCurve:
    """Fit the non-decreasing step function with the least squared error (pool adjacent violators), then join the steps.

    Each step is represented by its mean raw confidence; between them the curve is linear. Confidences that are equal
    are one observation.

    >>> isotonic([0.1, 0.2, 0.3, 0.4], [0, 1, 0, 1])
    CalibrationCurve(x=(0.1, 0.25, 0.4), y=(0.0, 0.5, 1.0))
    """
    xs, inverse = np.unique(np.asarray(raw, np.float64), return_inverse=True)
    weights = np.bincount(inverse).astype(np.float64)
    means = np.bincount(inverse, np.asarray(correct, np.float64)) / weights
    blocks: list[list[float]] = []  # weight, mean of y, mean of x
    for x, y, weight in zip(xs, means, weights, strict=True):
        blocks.append([weight, y, x])
        while len(blocks) > 1 and blocks[-2][1] >= blocks[-1][1]:
            w, mean_y, mean_x = blocks.pop()
            before = blocks[-1]
            both = before[0] + w
            before[1:] = [(before[0] * a + w * b) / both for a, b in zip(before[1:], (mean_y, mean_x), strict=True)]
            before[0] = both
    return CalibrationCurve(*(tuple(round(float(block[k]), 6) for block in blocks) for k in (2, 1)))


def reliability(confidence: Sequence[float], correct: Sequence[float], bins: int = BINS) -> list[ReliabilityBin]:
    """Divide predictions into bins of equal width in confidence, (0, 0.1], (0.1, 0.2], ...; empty bins are left out."""
    stated, right = np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
    index = np.clip(np.ceil(stated * bins).astype(int) - 1, 0, bins - 1)
    members = [np.flatnonzero(index == b) for b in range(bins)]
    return [ReliabilityBin(len(m), float(stated[m].mean()), float(right[m].mean())) for m in members if len(m)]


def expected_calibration_error(confidence: Sequence[float], correct: Sequence[float], bins: int = BINS) -> float:
    """Sum over bins of n_b / n * |accuracy_b - confidence_b| (Naeini et al. 2015)."""
    occupied = reliability(confidence, correct, bins)
    return sum(b.count * abs(b.accuracy - b.confidence) for b in occupied) / max(len(confidence), 1)


def correct_words(output: Sequence[str], reference: Sequence[str]) -> list[bool]:
    """Whether each word of an output is in a longest common subsequence with the reference.

    >>> correct_words("el gato negro ve".split(), "un gato ve".split())
    [False, True, False, True]
    """
    common = np.zeros((len(output) + 1, len(reference) + 1), np.int64)  # common words from (i, j) on
    for i in range(len(output) - 1, -1, -1):
        for j in range(len(reference) - 1, -1, -1):
            same = output[i] == reference[j]
            common[i, j] = common[i + 1, j + 1] + 1 if same else max(common[i + 1, j], common[i, j + 1])
    kept, i, j = [False] * len(output), 0, 0
    while i < len(output) and j < len(reference):
        kept[i] = output[i] == reference[j]
        if kept[i]:
            i, j = i + 1, j + 1
        elif common[i + 1, j] >= common[i, j + 1]:
            i += 1
        else:
            j += 1
    return kept
