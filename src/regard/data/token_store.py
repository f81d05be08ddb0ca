"""Tokenized corpora: concatenated token ids and where each sequence begins, in memory or mapped from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Ragged:
    """Concatenated sequences: `ids` [T] and `offsets` [n + 1]; sequence i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: Array
    offsets: Array

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], dtype: str = "uint32") -> Ragged:
        """Concatenate lists of ids in memory.

        >>> Ragged.of([[5, 6, 2], [7, 2]]).offsets.tolist()
        [0, 3, 5]
        """
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        offsets = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        return cls(np.fromiter(chain.from_iterable(sequences), dtype, offsets[-1]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Array:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self) -> Array:
        """The length of each sequence, [n] int32, in memory."""
        return np.diff(self.offsets).astype(np.int32)

    def gather(self, indices: Array) -> Array:
        """Concatenate the tokens of the sequences `indices` [k], without a loop over sequences."""
        starts = self.offsets[indices]
        lengths = self.offsets[indices + 1] - starts
        ends = lengths.cumsum()
        positions = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
        return self.ids[positions]


LINK_BITS = 16  # for the position in the target; the position in the source has the others of 32


def join_link(source: int, target: int) -> int:
    """A link between two tokens, given by their positions, as one number."""
    return source << LINK_BITS | target


def split_links(links: Array) -> tuple[Array, Array]:
    """The source and target positions of links.

    >>> split_links(np.array([join_link(3, 5)]))
    (array([3]), array([5]))
    """
    return links >> LINK_BITS, links & ((1 << LINK_BITS) - 1)


@dataclass(frozen=True)
class CorpusReport:
    """Statistics of a tokenized corpus. Token counts include special tokens and tags.

    For plain text, `pairs` is the number of chunks its documents were split into.
    """

    pairs: int
    dropped_empty: int
    dropped_long: int
    source_tokens: int
    target_tokens: int
    documents: int = 0  # plain text only; the number of lines of a stream

    @property
    def read(self) -> int:
        """The number of pairs in the corpus."""
        return self.pairs + self.dropped_empty + self.dropped_long


@dataclass(frozen=True)
class TokenStore:
    """The tokens of n pairs; each sequence starts with the tag of its corpus, if there is one, and ends with EOS.

    `links` between the tokens of each pair, if there are any, are numbers: `join_link(source, target)`.
    """

    source: Ragged
    target: Ragged
    report: CorpusReport
    digest: str = ""  # of the arrays; a resumed run must find the same
    links: Ragged | None = None

    @classmethod
    def of(cls, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> TokenStore:
        """Build a store in memory from token lists that already include their special tokens."""
        return cls.of_ragged(Ragged.of(sources), Ragged.of(targets))

    @classmethod
    def of_ragged(cls, source: Ragged, target: Ragged) -> TokenStore:
        """A store of these tokens, from which no pair was dropped."""
        return cls(source, target, CorpusReport(len(source), 0, 0, len(source.ids), len(target.ids)))

    def __len__(self) -> int:
        return len(self.source)
