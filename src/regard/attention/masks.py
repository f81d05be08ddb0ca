"""Who may look at whom. One convention everywhere: True = may attend.

A mask is a small object that answers for any two places; masks combine with `&`, `|` and `~`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.packed import PackedLayout
from regard.registry import MASKS

NO_POSITION = -1  # the sentence number of padding and fill


@dataclass(frozen=True)
class SegmentPositions:
    """Where tokens stand: place within the sentence and which sentence, both [..., L]; NOWHERE for padding."""

    position: Tensor
    sentence: Tensor

    @classmethod
    def flat(cls, rows: PackedLayout) -> SegmentPositions:
        """The T places of a flat row."""
        return cls(rows.position, torch.where(rows.is_token, rows.segment_ids, NO_POSITION))

    @classmethod
    def padded(cls, rows: PackedLayout) -> SegmentPositions:
        """The [N, L] places of the padded view."""
        position = torch.arange(rows.max_len, device=rows.device).expand(len(rows), -1)
        sentence = torch.arange(len(rows), device=rows.device)[:, None]
        return cls(position, torch.where(rows.padded_is_token, sentence, NO_POSITION))

    def __getitem__(self, index: tuple[object, ...]) -> SegmentPositions:
        return SegmentPositions(self.position[index], self.sentence[index])  # type: ignore[index]


class Mask:
    """Base of all masks: `allows(query, key)` broadcasts over places."""

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        raise NotImplementedError  # each mask's own

    def table(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        """Every query of [..., Q] against every key of [..., K]: booleans [..., Q, K]."""
        return self.allows(query[..., :, None], key[..., None, :])

    @classmethod
    def of_size(cls, size: int, memory: int) -> Mask:
        """Create the mask that a recipe selects by name, from its settings `mask_size` and `memory_size`."""
        return cls(size)  # type: ignore[call-arg]

    def order(self, length: int, lot: int) -> Tensor | None:
        """The order in which to take the queries of a sentence so that `lot` neighbours share most of their keys.

        It only matters to the speed of a sparse kernel. None: the order in which they stand.
        """
        return None

    def __and__(self, other: Mask) -> Mask:
        return _Combined(self, other, torch.logical_and)

    def __or__(self, other: Mask) -> Mask:
        return _Combined(self, other, torch.logical_or)

    def __invert__(self) -> Mask:
        return _Not(self)


@dataclass(frozen=True)
class Full(Mask):
    """No restriction."""

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return torch.ones_like(query.position, dtype=torch.bool) & torch.ones_like(key.position, dtype=torch.bool)


@MASKS.register("causal")
@dataclass(frozen=True)
class Causal(Mask):
    """A token sees itself and what came before."""

    @classmethod
    def of_size(cls, size: int, memory: int) -> Causal:
        return cls()

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return key.position <= query.position


@MASKS.register("window")
@dataclass(frozen=True)
class Window(Mask):
    """A token sees `before` places back and `after` places ahead."""

    before: int
    after: int = 0

    @classmethod
    def of_size(cls, size: int, memory: int) -> Window:
        return cls(size - 1)  # a window of n tokens includes the token itself

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        distance = key.position - query.position
        return (distance >= -self.before) & (distance <= self.after)


@MASKS.register("strided")
@dataclass(frozen=True)
class Strided(Mask):
    """The last `stride` tokens, itself among them, and every stride-th one before (Child et al. 2019).

    The two heads of "Generating Long Sequences with Sparse Transformers" in one mask. It never looks ahead. Stride 3:

        0 #
        1 ##
        2 ###
        3 ####
        4 .####
        5 ..####
        6 #..####
        7 .#..####
    """

    stride: int

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        back = query.position - key.position
        return (back >= 0) & ((back < self.stride) | (back % self.stride == 0))

    def order(self, length: int, lot: int) -> Tensor:
        """Tiles: the sentence written in lines of `stride` tokens, a few columns of a few lines at a time.

        A tile of c columns sees all of its lines and the one before, and its c columns of all lines above: with n
        lines in all, lot / c lines a tile and n / 2 lines above it on average, that is least for c = sqrt(2 lot s / n);
        the nearest power of two, so that tiles of a lot fill it.
        """
        lines = -(-length // self.stride)
        columns = min(2 ** max(round(math.log2(2 * lot * self.stride / lines) / 2), 0), self.stride, lot)
        place = torch.arange(length)
        line, column = place // self.stride, place % self.stride
        tile = (line // -(-lot // columns)) * self.stride + column // columns
        return tile.argsort(stable=True)


@MASKS.register("fixed")
@dataclass(frozen=True)
class FixedBlocks(Mask):
    """Its own block of `block` tokens up to itself, and the last token of every earlier block (Child et al. 2019).

    The last one of a block sums it up for all that come later. It never looks ahead. Block 3:

        0 #
        1 ##
        2 ###
        3 ..##
        4 ..###
        5 ..####
        6 ..#..##
        7 ..#..###
    """

    block: int

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        same = key.position // self.block == query.position // self.block
        last = key.position % self.block == self.block - 1
        return (key.position <= query.position) & (same | last)


@MASKS.register("segments")
@dataclass(frozen=True)
class Segments(Mask):
    """Its own segment of `length` tokens up to itself, and `memory` tokens before the segment (Dai et al. 2019).

    What Transformer-XL sees, a layer. It never looks ahead. Length 3, memory 1:

        0 #
        1 ##
        2 ###
        3 ..##
        4 ..###
        5 ..####
        6 .....##
        7 .....###
    """

    length: int
    memory: int = 0

    @classmethod
    def of_size(cls, size: int, memory: int) -> Segments:
        return cls(size, memory)

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        first = query.position // self.length * self.length - self.memory
        return (key.position >= first) & (key.position <= query.position)


@dataclass(frozen=True)
class SameSegment(Mask):
    """Tokens of one sentence see each other; padding and fill are seen by none and see nothing."""

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return (query.sentence == key.sentence) & (key.sentence != NO_POSITION)


@dataclass(frozen=True, eq=False)
class TableMask(Mask):
    """Any table of booleans [..., Q, K], read by place within the sentence."""

    booleans: Tensor

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return self.booleans[..., query.position, key.position]


@dataclass(frozen=True)
class _Combined(Mask):
    left: Mask
    right: Mask
    how: Callable[[Tensor, Tensor], Tensor]

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return self.how(self.left.allows(query, key), self.right.allows(query, key))

    def order(self, length: int, lot: int) -> Tensor | None:
        order = self.left.order(length, lot)
        return order if order is not None else self.right.order(length, lot)


@dataclass(frozen=True)
class _Not(Mask):
    mask: Mask

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return ~self.mask.allows(query, key)
