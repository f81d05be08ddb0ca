"""What a kernel is told about who may see whom: a table of booleans, or something that lets it skip most of one."""

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
    """What a dense kernel is told about a mask.

    `table`: booleans that broadcast to [..., Q, K]; None: all may attend. `causal`: besides, the last query sees all
    keys, the one before it all but the last key, and so on. `full`: a promise that no row is empty, which saves the
    kernel from looking. `sparse`: in place of a table, what gives one if need be, and lets a kernel skip most of it.
    `bias`: the table once more, as what a fused kernel adds to the scores (0 or -inf), where many layers share it.
    """

    table: Tensor | None = None
    causal: bool = False
    no_empty_rows: bool = False
    sparse: BlockSparseMask | SegmentMask | None = None
    bias: Tensor | None = None

    @classmethod
    def with_bias(cls, table: Tensor | None, dtype: torch.dtype) -> MaskTable:
        """For a table without empty rows that many layers use: with its bias, for scores of this type."""
        if table is None:
            return cls(no_empty_rows=True)
        bias = torch.zeros(table.shape, dtype=dtype, device=table.device).masked_fill_(~table, -math.inf)
        return cls(table, no_empty_rows=True, bias=bias)

    def select(self, sentences: Tensor) -> MaskTable:
        """The same for these sentences, of a table that has them along its first axis."""
        table, bias = (None if x is None else x.index_select(0, sentences) for x in (self.table, self.bias))
        return MaskTable(table, self.causal, self.no_empty_rows, bias=bias)

    def to_dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """One table of booleans that says it all."""
        table = self.table if self.sparse is None else self.sparse.table
        if not self.causal:
            return table
        causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        return causal if table is None else causal & table


@dataclass(frozen=True, eq=False)
class QueryBlock:
    """A few queries, the keys that any of them may see, and which sees which: [queries, keys]."""

    queries: slice | Tensor
    keys: slice | Tensor
    table: Tensor
    no_empty_rows: bool


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """A mask within one long sentence, cut into lots of queries; `back` puts their results in order again."""

    blocks: list[QueryBlock]
    inverse_order: Tensor | None
    share: float  # of all pairs of a query and a key, those that some lot looks at


@lru_cache(maxsize=8)  # of text cut to one length every batch has the same
@torch.inference_mode(False)  # what is kept may be wanted in training later
def block_pattern(mask: Mask, length: int, lot: int, device: torch.device) -> BlockPattern:
    """Lots for a sentence that looks at itself. No more than [lot, length] booleans are held at once, to find them."""
    order = mask.order(length, lot)
    every = torch.arange(length, dtype=torch.int32)  # half the bytes to go through
    place = every if order is None else order.int()
    keys = SegmentPositions(every, torch.zeros_like(every))
    lots, pairs = [], 0
    for queries in place.split(lot):
        table = mask.table(SegmentPositions(queries, torch.zeros_like(queries)), keys)
        seen = table.flatten(0, -2).any(0).nonzero().flatten()
        table = table[..., seen]
        pairs += len(queries) * len(seen)
        full = bool(table.any(-1).all()) and len(seen) > 0
        lots.append(QueryBlock(_range(queries, device), _range(seen, device), table.to(device), full))
    back = None if order is None else order.argsort().to(device)
    return BlockPattern(lots, back, pairs / max(length * length, 1))


def _range(places: Tensor, device: torch.device) -> slice | Tensor:
    """Places as a slice where they are neighbours, which costs no copy."""
    if len(places) == 0:
        return slice(0, 0)
    first, last = int(places[0]), int(places[-1])
    neighbours = last - first + 1 == len(places) and bool((places.diff() == 1).all())
    return slice(first, last + 1) if neighbours else places.to(device, torch.long)


class BlockSparseMask:
    """A mask over the sentences of one row looking at themselves, for kernels that skip what is not allowed."""

    def __init__(self, mask: Mask, rows: PackedLayout, lot: int) -> None:
        self.mask, self.rows, self.lot = mask, rows, lot

    @cached_property
    def table(self) -> Tensor:
        """[N, 1, L, L] all of it, the same for all heads."""
        places = SegmentPositions.padded(self.rows)
        return (self.mask & SameSegment()).table(places, places).unsqueeze(-3)

    @cached_property
    def pattern(self) -> BlockPattern:
        return block_pattern(self.mask, self.rows.max_len, self.lot, self.rows.device)

    @cached_property
    def blocks(self) -> Sequence[tuple[QueryBlock, MaskTable]]:
        """Each lot with what its queries are allowed; padded queries may do as they like."""
        if self.rows.equal_lengths:
            return [(lot, MaskTable(lot.table, no_empty_rows=lot.no_empty_rows)) for lot in self.pattern.blocks]
        present = self.rows.padded_is_token[:, None, None, :]
        return [(lot, MaskTable(lot.table & present[..., lot.keys])) for lot in self.pattern.blocks]


class SegmentMask:
    """Who may see whom between two static rows: each sentence is a range of places of either, and sees its own.

    No real token sees fill. In the table fill sees fill, so that no row is empty where it need not be.
    """

    def __init__(self, queries: StaticPackedLayout, keys: StaticPackedLayout, causal: bool) -> None:
        self.queries, self.keys, self.causal = queries, keys, causal

    def prepare(self) -> None:
        """Make what the kernels will ask for."""
        if self.queries.device.type == "cuda":
            _ = self.places
        else:
            _ = self.table

    @cached_property
    def table(self) -> Tensor:
        """[Q, K] all of it."""
        place = torch.arange(self.queries.size, device=self.queries.device)
        own = self.queries.segment_ids[:, None] == self.keys.segment_ids
        return own & (place <= place[:, None]) if self.causal else own

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which sentence every query and every key belongs to, and where the sentences of either row begin."""
        queries, keys = self.queries, self.keys
        return queries.segment_ids.int(), keys.segment_ids.int(), queries.offsets.int(), keys.offsets.int()
