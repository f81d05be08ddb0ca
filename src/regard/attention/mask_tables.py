"""Masks in the form that backends take: a table of booleans, or a description that lets them skip most of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from regard.attention.masks import Mask, SameSegment, SegmentPositions
from regard.packed import PackedLayout, StaticPackedLayout


@dataclass(frozen=True)
class MaskTable:
    """A mask in the form that backends take.

    - `table`: booleans that broadcast to [..., Q, K]; None: all pairs are allowed.
    - `causal`: in addition, the last query attends to all keys, the one before it to all but the last key, and so on.
    - `no_empty_rows`: every query has an allowed key, so that a backend need not check.
    - `sparse`: replaces the table, which it computes on demand; a backend may skip most of it.
    - `bias`: the table as numbers to add to the scores (0 or -inf), if many layers share it.
    """

    table: Tensor | None = None
    causal: bool = False
    no_empty_rows: bool = False
    sparse: BlockSparseMask | SegmentMask | None = None
    bias: Tensor | None = None

    @classmethod
    def with_bias(cls, table: Tensor | None, dtype: torch.dtype) -> MaskTable:
        """For a table without empty rows that many layers share: add its bias, for scores of this dtype."""
        if table is None:
            return cls(no_empty_rows=True)
        bias = torch.zeros(table.shape, dtype=dtype, device=table.device).masked_fill_(~table, -math.inf)
        return cls(table, no_empty_rows=True, bias=bias)

    def select(self, sentences: Tensor) -> MaskTable:
        """Select sentences, the first axis of the table."""
        table, bias = (None if x is None else x.index_select(0, sentences) for x in (self.table, self.bias))
        return MaskTable(table, self.causal, self.no_empty_rows, bias=bias)

    def to_dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """The whole mask as one table of booleans; None: all pairs are allowed."""
        table = self.table if self.sparse is None else self.sparse.table
        if not self.causal:
            return table
        causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        return causal if table is None else causal & table


@dataclass(frozen=True, eq=False)
class QueryBlock:
    """A block of queries, the keys that any of them may attend to, and the table [queries, keys] of allowed pairs."""

    queries: slice | Tensor
    keys: slice | Tensor
    table: Tensor
    no_empty_rows: bool


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """A mask within one long sentence, divided into blocks of queries; `inverse_order` restores their order."""

    blocks: list[QueryBlock]
    inverse_order: Tensor | None
    share: float  # of all pairs of a query and a key, those that are computed


@lru_cache(maxsize=8)  # batches of text in windows of one length share a pattern
@torch.inference_mode(False)  # a cached pattern may be used in training later
def block_pattern(mask: Mask, length: int, block: int, device: torch.device) -> BlockPattern:
    """Divide the queries of a sentence of `length` tokens into blocks. Needs memory for [block, length] booleans."""
    order = mask.order(length, block)
    index = torch.arange(length, dtype=torch.int32)  # int32 is faster than int64
    query_order = index if order is None else order.int()
    keys = SegmentPositions(index, torch.zeros_like(index))
    blocks, pairs = [], 0
    for queries in query_order.split(block):
        table = mask.table(SegmentPositions(queries, torch.zeros_like(queries)), keys)
        used = table.flatten(0, -2).any(0).nonzero().flatten()
        table = table[..., used]
        pairs += len(queries) * len(used)
        no_empty_rows = bool(table.any(-1).all()) and len(used) > 0
        blocks.append(QueryBlock(_range(queries, device), _range(used, device), table.to(device), no_empty_rows))
    inverse_order = None if order is None else order.argsort().to(device)
    return BlockPattern(blocks, inverse_order, pairs / max(length * length, 1))


def _range(positions: Tensor, device: torch.device) -> slice | Tensor:
    """Return consecutive positions as a slice, which selects without a copy."""
    if len(positions) == 0:
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    consecutive = last - first + 1 == len(positions) and bool((positions.diff() == 1).all())
    return slice(first, last + 1) if consecutive else positions.to(device, torch.long)


class BlockSparseMask:
    """A mask of self-attention in a packed batch, for backends that skip pairs that are not allowed."""

    def __init__(self, mask: Mask, layout: PackedLayout, query_block: int) -> None:
        self.mask, self.layout, self.query_block = mask, layout, query_block

    @cached_property
    def table(self) -> Tensor:
        """[N, 1, L, L] the whole mask, the same for all heads."""
        positions = SegmentPositions.padded(self.layout)
        return (self.mask & SameSegment()).table(positions, positions).unsqueeze(-3)

    @cached_property
    def pattern(self) -> BlockPattern:
        return block_pattern(self.mask, self.layout.max_len, self.query_block, self.layout.device)

    @cached_property
    def blocks(self) -> Sequence[tuple[QueryBlock, MaskTable]]:
        """The blocks of queries, each with its mask; queries that are padding may attend to anything."""
        blocks = self.pattern.blocks
        if self.layout.equal_lengths:
            return [(block, MaskTable(block.table, no_empty_rows=block.no_empty_rows)) for block in blocks]
        is_token = self.layout.padded_is_token[:, None, None, :]
        return [(block, MaskTable(block.table & is_token[..., block.keys])) for block in blocks]


class SegmentMask:
    """The mask between two static packed batches: tokens attend to tokens of the same sentence.

    No token attends to padding. In the table padding attends to padding, to avoid empty rows.
    """

    def __init__(self, queries: StaticPackedLayout, keys: StaticPackedLayout, causal: bool) -> None:
        self.queries, self.keys, self.causal = queries, keys, causal

    def prepare(self) -> None:
        """Compute what the backend of this device will read."""
        if self.queries.device.type == "cuda":
            _ = self.segments
        else:
            _ = self.table

    @cached_property
    def table(self) -> Tensor:
        """[Q, K] the whole mask."""
        index = torch.arange(self.queries.size, device=self.queries.device)
        same_sentence = self.queries.segment_ids[:, None] == self.keys.segment_ids
        return same_sentence & (index <= index[:, None]) if self.causal else same_sentence

    @cached_property
    def segments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sentence numbers of queries [Q] and keys [K], and offsets [M + 1] of the sentences in both, as int32."""
        queries, keys = self.queries, self.keys
        return queries.segment_ids.int(), keys.segment_ids.int(), queries.offsets.int(), keys.offsets.int()
