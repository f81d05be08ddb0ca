"""An attention map: the weights and the tokens on its two axes. `svg.draw` and `terminal.draw` draw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from regard.text.display import looks_special, space_at
from regard.text.tokenizers import join_tokens


@dataclass(frozen=True, eq=False)
class Map:
    """One attention matrix with its tokens: `weights[q, k]` is how much query token q looks at key token k.

    `weights` is [Q, K], every row sums to one (or is all zero, where a query looks at nothing). For cross-attention
    the queries are the target tokens and the keys the source tokens. `words`: the tokens are whole words.

        Map(np.eye(2), ("el", " gato"), ("the", " cat"), "cross-attention, layer 2, mean of 4 heads")
    """

    weights: np.ndarray
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    title: str = ""
    words: bool = False

    def __post_init__(self) -> None:
        weights = np.array(self.weights, dtype=np.float64)  # a copy of our own: a picture must not change later
        weights.setflags(write=False)
        for field, value in (("weights", weights), ("queries", tuple(self.queries)), ("keys", tuple(self.keys))):
            object.__setattr__(self, field, value)
        if weights.shape != (len(self.queries), len(self.keys)):
            raise ValueError(f"weights of shape {weights.shape} for {len(self.queries)} queries, {len(self.keys)} keys")
        if weights.size == 0:
            raise ValueError("a map needs at least one query and one key")
        if not (np.isfinite(weights).all() and weights.min() >= 0.0 and weights.max() <= 1.001):
            raise ValueError("attention weights lie between 0 and 1")

    def to_words(self, is_mark: Callable[[str], bool] = looks_special) -> Map:
        """Merge the pieces of each word, on both axes.

        A piece begins a word if it is the first one, begins with white space, is a special mark or follows one;
        its pieces are joined by `join_tokens`. The weight a query gives to a word is the SUM over the word's key pieces
        (what was given to any of them was given to the word); the row of a word is the MEAN over its query pieces (each
        piece had one unit to give). So rows that summed to one still do. Text without spaces stays one word.
        """
        return self.merged(_words(self.queries, is_mark), _words(self.keys, is_mark))

    def merged(self, query_words: Sequence[Sequence[int]], key_words: Sequence[Sequence[int]]) -> Map:
        """As `to_words`, with the places of each word's pieces given: `map.merged([[0], [1, 2]], [[0, 1]])`."""
        into = np.zeros((len(self.keys), len(key_words)))  # [K, words]: one where the piece belongs to the word
        for word, pieces in enumerate(key_words):
            into[pieces, word] = 1.0
        mean = np.zeros((len(query_words), len(self.queries)))  # [words, Q]: one over the number of pieces
        for word, pieces in enumerate(query_words):
            mean[word, pieces] = 1.0 / len(pieces)
        return Map(
            np.minimum(mean @ self.weights @ into, 1.0),
            tuple(join_tokens([self.queries[i] for i in pieces]) for pieces in query_words),
            tuple(join_tokens([self.keys[i] for i in pieces]) for pieces in key_words),
            self.title,
            words=True,
        )


def _words(pieces: Sequence[str], is_mark: Callable[[str], bool]) -> list[list[int]]:
    """The positions of the pieces of each word, in order."""
    words: list[list[int]] = []
    after_mark = True  # so that the first piece begins a word
    for i, piece in enumerate(pieces):
        mark = is_mark(piece)
        if after_mark or mark or space_at(pieces, i):
            words.append([])
        words[-1].append(i)
        after_mark = mark
    return words
