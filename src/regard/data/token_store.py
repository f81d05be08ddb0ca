"""Tokenized corpora: concatenated token ids and where each sequence begins, in memory or mapped from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class ChunkedArray:
    """An array in several pieces, all of the same length except for the last: what is looked up is copied."""

    ndim = 1

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts, self._each = list(parts), len(parts[0])
        self.shape, self.dtype = (sum(map(len, parts)),), parts[0].dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            which = np.arange(*which.indices(len(self)))
        positions = np.where(np.asarray(which) < 0, np.asarray(which) + len(self), which)
        pieces, found = positions // self._each, np.empty(positions.shape, self.dtype)
        for index in np.unique(pieces):
            found[pieces == index] = self._parts[index][positions[pieces == index] - index * self._each]
        return found if found.ndim else found[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.concatenate(self._parts).astype(dtype or self.dtype)


@dataclass(frozen=True)
class Ragged:
    """Concatenated sequences: `ids` [T] and `offsets` [n + 1]; sequence i is `ids[offsets[i]:offsets[i + 1]]`.

    Instead of token ids, there may be rows of features, [T, F].
    """

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

    @classmethod
    def of_rows(cls, sequences: Sequence[Array]) -> Ragged:
        """Concatenate arrays [n, F], one at least, in memory."""
        return cls(np.concatenate(sequences), np.cumsum([0, *map(len, sequences)]))

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


class Lengths:
    """The lengths of sequences, numbered through several sides, read from their offsets when they are looked up."""

    def __init__(self, sides: Sequence[Ragged]) -> None:
        self._sides = sides
        self._first = np.cumsum([0, *map(len, sides)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, members: Array | slice) -> Array:
        """[k] int32"""
        if isinstance(members, slice):
            begin, end, step = members.indices(len(self))
            if step == 1:
                return self._range(begin, end)
            members = np.arange(begin, end, step)
        sides, lengths = np.searchsorted(self._first, members, "right") - 1, np.empty(len(members), np.int32)
        for index in np.unique(sides):
            chosen, offsets = members[sides == index] - self._first[index], self._sides[index].offsets
            lengths[sides == index] = offsets[chosen + 1] - offsets[chosen]
        return lengths

    def _range(self, begin: int, end: int) -> Array:
        """Consecutive lengths, whose offsets are read once."""
        parts = [np.zeros(0, np.int32)]
        for first, side in zip(self._first, self._sides, strict=False):
            low, high = max(begin - int(first), 0), min(end - int(first), len(side))
            if low < high:
                parts.append(np.diff(side.offsets[low : high + 1]).astype(np.int32))
        return np.concatenate(parts)


def lengths_of(sides: Sequence[Ragged], most: int) -> Array | Lengths:
    """The lengths of all sequences: in memory if there are at most `most` of them."""
    lengths = Lengths(sides)
    return np.concatenate([side.lengths() for side in sides]) if len(lengths) <= most else lengths


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
    digest: str = ""  # digest of the arrays; a resumed run must find the same
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
