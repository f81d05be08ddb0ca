"""Sizes of batches of pairs: how many source tokens and how many pairs come with a number of target tokens."""

from __future__ import annotations

import math

from regard.data.token_store import Array

# How much larger the source budget is than a batch's expected source tokens, which differ from batch to batch:
SLACK = 1.1  # this factor for batches of pairs sorted by length;
DEVIATIONS = 3.0  # for static batches, which are not sorted, this many standard deviations
SOURCE_MULTIPLE = 64  # static source budgets are multiples of this many tokens, which suits the kernels


def source_budget(sources: Array, targets: Array, longest: int, ratio: float, target_budget: int, static: bool) -> int:
    """The source tokens that come with `target_budget` target tokens, at least the longest source of a pair that fits.

    `sources` and `targets` are the lengths of all pairs or of a sample, and `ratio` the source tokens per target token.
    """
    expected = target_budget * ratio * (_static_slack(sources, targets, ratio, target_budget) if static else SLACK)
    budget = max(math.ceil(round(expected, 6)), longest)
    return -(-budget // SOURCE_MULTIPLE) * SOURCE_MULTIPLE if static else budget


def _static_slack(sources: Array, targets: Array, ratio: float, target_budget: int) -> float:
    """The source budget of a batch of random pairs over its expected source tokens: `DEVIATIONS` deviations more.

    A batch with T target tokens has `ratio` T source tokens, give or take sqrt(n) times the deviation of a pair's
    source from `ratio` times its target, n being the number of pairs of a batch.
    """
    pairs = max(target_budget / float(targets.mean()), 1.0)
    deviation = float((sources - ratio * targets).std())
    return 1 + DEVIATIONS * deviation * math.sqrt(pairs) / (ratio * target_budget) if ratio else 1.0


def max_sentences(targets: Array, target_budget: int) -> int:
    """The maximum number of pairs of a static batch: twice `DEVIATIONS` above average, given the targets' lengths."""
    mean = float(targets.mean())
    average = target_budget / mean
    deviation = float(targets.std()) / mean * math.sqrt(average)
    return math.ceil(average + DEVIATIONS * 2 * deviation) + 1
