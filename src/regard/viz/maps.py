"""One attention map: the weights and the tokens of both axes. `grid.draw` and `terminal.draw` show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from regard.text.display import labels, looks_special, space_at
from regard.text.tokenizers import join_tokens


@dataclass(frozen=True, eq=False)
class Map:
    """One attention matrix with its tokens: `weights[q, k]` is the weight of query token q on key token k.

    `weights` is [Q, K]; every row sums to one (or is all zero, if a query may attend to nothing). In cross-attention
    the queries are the target tokens and the keys the source tokens. `words`: the tokens are whole words. `named`: they
    are names of patches, steps or nodes, which are shown as they are.

        Map(np.eye(2), ("el", " gato"), ("the", " cat"), "cross-attention, layer 2, mean of 4 heads")
    """

    weights: np.ndarray
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    title: str = ""
    words: bool = False
    named: bool = False

    def __post_init__(self) -> None:
        weights = np.array(self.weights, dtype=np.float64)  # a copy, so that the map never changes
        weights.setflags(write=False)
        for field, value in (("weights", weights), ("queries", tuple(self.queries)), ("keys", tuple(self.keys))):
            object.__setattr__(self, field, value)
        if weights.shape != (len(self.queries), len(self.keys)):
            raise ValueError(f"weights of shape {weights.shape} for {len(self.queries)} queries, {len(self.keys)} keys")
        if weights.size == 0:
            raise ValueError("a map needs at least one query and one key")
        if not (np.isfinite(weights).all() and weights.min() >= 0.0 and weights.max() <= 1.001):
            raise ValueError("attention weights must be between 0 and 1")

    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The labels of queries and keys in a picture."""
        if self.named:
            return tuple(map(str.strip, self.queries)), tuple(map(str.strip, self.keys))
        return labels(self.queries, self.words), labels(self.keys, self.words)

    def to_words(self, is_special: Callable[[str], bool] = looks_special) -> Map:
        """Merge the tokens of each word, on both axes.

        A token begins a word if it is the first one, begins with white space, is a special token or follows one.
        Columns are summed over the key tokens of a word, rows are averaged over its query tokens, so that rows still
        sum to one. Text without spaces stays one word.
        """
        return self.merged(_words(self.queries, is_special), _words(self.keys, is_special))

    def merged(
        self, query_words: Sequence[Sequence[int]], key_words: Sequence[Sequence[int]], reading: Sequence[bool] = ()
    ) -> Map:
        """Merge as `to_words`, given the token positions of each word: `map.merged([[0], [1, 2]], [[0, 1]])`.

        `reading` [Q]: rows are averaged over these tokens only, in words that have any.
        """
        into = np.zeros((len(self.keys), len(key_words)))  # [K, words]: 1 if the token belongs to the word
        for word, tokens in enumerate(key_words):
            into[tokens, word] = 1.0
        mean = np.zeros((len(query_words), len(self.queries)))  # [words, Q]: 1 / number of tokens of the word
        for word, tokens in enumerate(query_words):
            averaged = [token for token in tokens if not reading or reading[token]] or list(tokens)
            mean[word, averaged] = 1.0 / len(averaged)
        return Map(
            np.minimum(mean @ self.weights @ into, 1.0),
            tuple(join_tokens([self.queries[i] for i in tokens]) for tokens in query_words),
            tuple(join_tokens([self.keys[i] for i in tokens]) for tokens in key_words),
            self.title,
            words=True,
            named=self.named,
        )


def _words(tokens: Sequence[str], is_special: Callable[[str], bool]) -> list[list[int]]:
    """Return the token positions of each word, in order."""
    words: list[list[int]] = []
    after_special = True  # so that the first token begins a word
    for i, token in enumerate(tokens):
        special = is_special(token)
        if after_special or special or space_at(tokens, i):
            words.append([])
        words[-1].append(i)
        after_special = special
    return words
