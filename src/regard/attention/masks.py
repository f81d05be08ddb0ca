"""Attention masks. One convention everywhere: True = may attend.

A mask decides for any two positions whether the query may attend to the key; masks combine with `&`, `|` and `~`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.packed import PackedLayout
from regard.registry import MASKS

NO_POSITION = -1  # the sentence number of padding


@dataclass(frozen=True)
class SegmentPositions:
    """Position of each token within its sentence, and the number of the sentence (-1 for padding), both [..., L]."""

    position: Tensor
    sentence: Tensor

    @classmethod
    def flat(cls, layout: PackedLayout) -> SegmentPositions:
        """The positions [T] of a packed batch."""
        return cls(layout.position, torch.where(layout.is_token, layout.segment_ids, NO_POSITION))

    @classmethod
    def padded(cls, layout: PackedLayout) -> SegmentPositions:
        """The positions [N, L] of the padded view."""
        position = torch.arange(layout.max_len, device=layout.device).expand(len(layout), -1)
        sentence = torch.arange(len(layout), device=layout.device)[:, None]
        return cls(position, torch.where(layout.padded_is_token, sentence, NO_POSITION))

    def __getitem__(self, index: tuple[object, ...]) -> SegmentPositions:
        return SegmentPositions(self.position[index], self.sentence[index])  # type: ignore[index]


class Mask:
    """Base class of masks: `allows(query, key)` broadcasts over positions."""

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        raise NotImplementedError  # implemented by each mask

    def table(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        """Queries [..., Q] and keys [..., K] -> booleans [..., Q, K]."""
        return self.allows(query[..., :, None], key[..., None, :])

    @classmethod
    def of_size(cls, size: int, memory: int) -> Mask:
        """Create the mask that a recipe selects by name, from its settings `mask_size` and `memory_size`."""
        return cls(size)  # type: ignore[call-arg]

    def order(self, length: int, block: int) -> Tensor | None:
        """An order of the queries of a sentence in which blocks of `block` queries share most of their keys.

        It only affects the speed of the block-sparse backend. None: the order of the sentence.
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
    """A token attends to itself and to earlier tokens."""

    @classmethod
    def of_size(cls, size: int, memory: int) -> Causal:
        return cls()

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return key.position <= query.position


@MASKS.register("window")
@dataclass(frozen=True)
class Window(Mask):
    """A token attends to `before` earlier and `after` later tokens, and to itself."""

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
    """The last `stride` tokens, including itself, and every stride-th one before (Child et al. 2019).

    The union of the two heads of "Generating Long Sequences with Sparse Transformers"; causal. Stride 3:

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

    def order(self, length: int, block: int) -> Tensor:
        """Arrange the sentence in lines of `stride` tokens, and take tiles of a few columns by a few lines.

        A tile of c columns attends to all of its lines and the one before, and to its c columns of all lines above.
        With n lines in all, block / c lines per tile and n / 2 lines above it on average, the number of keys is least
        for c = sqrt(2 block stride / n); c is the nearest power of two, so that tiles fill a block.
        """
        lines = -(-length // self.stride)
        columns = min(2 ** max(round(math.log2(2 * block * self.stride / lines) / 2), 0), self.stride, block)
        position = torch.arange(length)
        line, column = position // self.stride, position % self.stride
        tile = (line // -(-block // columns)) * self.stride + column // columns
        return tile.argsort(stable=True)


@MASKS.register("fixed")
@dataclass(frozen=True)
class FixedBlocks(Mask):
    """Its own block of `block` tokens up to itself, and the last token of every earlier block (Child et al. 2019).

    The last token of a block summarises it for all later ones; causal. Block 3:

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

    One layer of Transformer-XL; causal. Length 3, memory 1:

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
    """Tokens attend to tokens of the same sentence; padding attends to nothing, and nothing attends to it."""

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return (query.sentence == key.sentence) & (key.sentence != NO_POSITION)


@dataclass(frozen=True, eq=False)
class TableMask(Mask):
    """Any table of booleans [..., Q, K], indexed by position within the sentence."""

    booleans: Tensor

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return self.booleans[..., query.position, key.position]


@dataclass(frozen=True)
class _Combined(Mask):
    left: Mask
    right: Mask
    operator: Callable[[Tensor, Tensor], Tensor]

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return self.operator(self.left.allows(query, key), self.right.allows(query, key))

    def order(self, length: int, block: int) -> Tensor | None:
        order = self.left.order(length, block)
        return order if order is not None else self.right.order(length, block)


@dataclass(frozen=True)
class _Not(Mask):
    mask: Mask

    def allows(self, query: SegmentPositions, key: SegmentPositions) -> Tensor:
        return ~self.mask.allows(query, key)
