"""Sparse masks of long sentences, divided into blocks of queries, so that most pairs need not be computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from regard.attention.masks import Mask, SameSegment, SegmentPositions
from regard.packed import PackedLayout

MIN_SPARSE_LENGTH = 1024  # length from which `block_sparse` is worth its overhead ...
MAX_SPARSE_SHARE = 0.4  # ... if it computes at most this share of all pairs (a causal mask allows half of them)


@dataclass(frozen=True, eq=False)
class QueryBlock:
    """A block of queries, the keys that any of them may attend to, and the allowed pairs [..., queries, keys]."""

    queries: slice | Tensor
    keys: slice | Tensor
    table: Tensor
    no_empty_rows: bool


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """A mask within one long sentence, divided into blocks of queries; `inverse_order` restores their order."""

    blocks: list[QueryBlock]
    inverse_order: Tensor | None
    share: float  # share of all pairs of query and key that is computed


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

    any_score: ClassVar[bool] = False

    def __init__(self, mask: Mask, layout: PackedLayout, query_block: int) -> None:
        self.mask, self.layout, self.query_block = mask, layout, query_block

    @cached_property
    def table(self) -> Tensor:
        """[N, 1, L, L] the whole mask, the same for all heads."""
        positions = SegmentPositions.padded(self.layout)
        return (self.mask & SameSegment()).table(positions, positions).unsqueeze(-3)

    def backend(self, query: Tensor) -> str:
        """The name of the fastest backend for queries [..., L, D]."""
        skips = query.shape[-2] >= MIN_SPARSE_LENGTH and self.pattern.share < MAX_SPARSE_SHARE
        return "block_sparse" if skips else "fused"

    @cached_property
    def pattern(self) -> BlockPattern:
        return block_pattern(self.mask, self.layout.max_len, self.query_block, self.layout.device)

    @cached_property
    def blocks(self) -> list[QueryBlock]:
        """The blocks of queries with their masks; queries that are padding may attend to anything."""
        blocks = self.pattern.blocks
        if self.layout.equal_lengths:
            return blocks
        is_token = self.layout.padded_is_token[:, None, None, :]
        return [replace(b, table=b.table & is_token[..., b.keys], no_empty_rows=False) for b in blocks]
