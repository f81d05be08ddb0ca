"""Gold alignment of one sentence, where its corpus has one, and the alignment error rate of each head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from regard.data.builtin import Pair, pairs
from regard.data.corpora import corpora
from regard.interpret.trace.stats import significant
from regard.metrics.alignment import AlignmentScore
from regard.recipes.schema import Recipe
from regard.tasks.aligner import linked, word_weights
from regard.text.words import WordTokens

SPLITS = ("test", "valid")
ALIGNED = ("en-es", "copy", "reverse", "sort")  # built-in corpora with word alignments


def has_gold(recipe: Recipe) -> bool:
    """Whether the run was trained on a built-in corpus with word alignments."""
    return any(corpus.corpus in ALIGNED for corpus in corpora(recipe.data))


def pair_of(recipe: Recipe, source: str) -> Pair | None:
    """Find the held-out pair with this source in the recipe's aligned corpora."""
    words = " ".join(source.split())
    for corpus in corpora(recipe.data):
        if corpus.corpus in ALIGNED and words in (by_source := _held_out(corpus.corpus)):
            return by_source[words]
    return None


@cache
def _held_out(corpus: str) -> dict[str, Pair]:
    """The held-out pairs of a corpus by their source; the first of those that share one."""
    by_source: dict[str, Pair] = {}
    for split in SPLITS:
        for pair in pairs(corpus, split):
            by_source.setdefault(pair.source, pair)
    return by_source


def measured(
    pair: Pair, cross: Mapping[str, np.ndarray], source: Sequence[int], target: Sequence[int]
) -> dict[str, Any] | None:
    """Compute the links and the alignment error rate of every head, of each layer's mean, and of the mean of all.

    `cross` holds weights [H, T, S] by name; `source` and `target` give the word of each token (-1: a special token). A
    word's rows are those that predict it. None if the words are not those of the pair.
    """
    counts = (len(pair.source.split()), len(pair.target.split()))
    if (max(source, default=-1) + 1, max(target, default=-1) + 1) != counts:
        return None
    sides = (_word_tokens(source, counts[0]), _word_tokens(target, counts[1]))
    words = {name: word_weights(weights[None], *sides)[0, 0] for name, weights in cross.items()}  # [H, J, I]
    gold = np.zeros(counts[::-1], dtype=bool)
    for i, j in pair.alignment:
        gold[j, i] = True
    return {
        "links": sorted([j, i] for i, j in pair.alignment),
        "aer": {name: [_aer(head, gold) for head in weights] for name, weights in words.items()},
        "mean": {name: _aer(weights.mean(0), gold) for name, weights in words.items()},
        "all": _aer(np.concatenate(list(words.values())).mean(0), gold) if words else None,
    }


def _word_tokens(words: Sequence[int], count: int) -> WordTokens:
    return WordTokens([0] * len(words), list(words), count, False)


def _aer(weights: np.ndarray, gold: np.ndarray) -> float:
    links = linked(weights)
    correct = int((links & gold).sum())
    return significant(AlignmentScore.of(int(links.sum()), correct, correct, int(gold.sum())).aer)
