"""Attention layouts: how queries, keys and values are stored, and which pairs may attend.

A layout converts tensors [T, H, D] to the form that dense kernels read, [..., H, L, D], with a mask, and converts their
result back. Packed batches (training), a KV cache (a decoding step) and cached source keys (cross-attention) are
layouts of the same attention, so that a block is written once for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from regard.attention.block_sparse import BlockSparseMask
from regard.attention.masks import Causal, Full, Mask, SameSegment, SegmentPositions
from regard.attention.scores import TokenPositions
from regard.packed import PackedLayout

QUERY_BLOCK = 128  # queries per block of the block-sparse backend


class SparseMask(Protocol):
    """A mask of which a backend skips most pairs."""

    any_score: ClassVar[bool]  # whether its backend computes any score, not only dot products

    def backend(self, query: Tensor) -> str:
        """The name of the fastest backend for these queries."""
        ...

    @property
    def table(self) -> Tensor:
        """The whole mask, as in `MaskTable`."""
        ...


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
    sparse: SparseMask | None = None
    bias: Tensor | None = None

    @classmethod
    def with_bias(cls, table: Tensor | None, dtype: torch.dtype) -> MaskTable:
        """A table without empty rows, and its bias for scores of this dtype, which many layers share."""
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


KernelInputs = tuple[Tensor, Tensor, Tensor, MaskTable]  # queries, keys, values, and which pairs may attend


class AttentionLayout:
    """Base class of layouts: converts queries, keys and values for a dense kernel, and its result back."""

    # Of the queries, if cached keys include their positions; None: the index in the tensors that kernels read.
    positions: TokenPositions | None = None

    def to_kernel(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> KernelInputs:
        """Queries, keys and values as the dense kernels read them, [..., H, L, D], and the mask."""
        raise NotImplementedError  # implemented by each layout

    def from_kernel(self, out: Tensor) -> Tensor:
        """The result of a kernel, stored like the queries."""
        raise NotImplementedError  # implemented by each layout

    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Numbers of queries and keys of each sentence, without padding; None: there is no padding."""
        return None


class DenseQK(AttentionLayout):
    """Tensors that are already [..., H, L, D], with an optional table of booleans [..., Q, K]."""

    def __init__(self, table: Tensor | None = None, causal: bool = False) -> None:
        self.allowed = MaskTable(table, causal)

    def to_kernel(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> KernelInputs:
        assert key is not None and value is not None
        return query, key, value, self.allowed

    def from_kernel(self, out: Tensor) -> Tensor:
        return out


class PackedQK(AttentionLayout):
    """Packed batches: queries attend to the keys of the same sentence, in another batch or in the same one.

    It is created once per batch and shared by all layers, so that indices and masks are computed once.
    """

    def __init__(
        self, queries: PackedLayout, keys: PackedLayout, mask: Mask | None = None, query_block: int = QUERY_BLOCK
    ) -> None:
        self.queries, self.keys = queries, keys
        self.mask = mask if mask is not None else Full()
        self.query_block = query_block

    @cached_property
    def allowed(self) -> MaskTable:
        """The cheapest form of "same sentence, and the mask", in the padded view.

        Queries that are padding may attend to anything: `from_kernel` drops them. Sentences have at least one token, so
        masking padding or later tokens leaves at least one key to every query.
        """
        is_self = self.queries is self.keys
        if is_self and self.mask == Causal():  # which hides padding too: it comes after all tokens
            return MaskTable(causal=True, no_empty_rows=True)
        if self.mask == Full():
            if self.keys.equal_lengths:
                return MaskTable(no_empty_rows=True)
            return MaskTable(self.keys.padded_is_token[:, None, None, :], no_empty_rows=min(self.keys.lengths) > 0)
        if is_self:
            return MaskTable(sparse=BlockSparseMask(self.mask, self.keys, self.query_block))
        table = (self.mask & SameSegment()).table(
            SegmentPositions.padded(self.queries), SegmentPositions.padded(self.keys)
        )
        return MaskTable(table.unsqueeze(-3))  # the same for all heads

    def to_kernel(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> KernelInputs:
        assert key is not None and value is not None
        q = self.queries.pad(query).transpose(1, 2)  # [T, H, D] -> [N, L, H, D] -> [N, H, L, D]
        k = self.keys.pad(key).transpose(1, 2)
        v = self.keys.pad(value).transpose(1, 2)
        return q, k, v, self.allowed

    def from_kernel(self, out: Tensor) -> Tensor:
        return self.queries.flatten(out.transpose(1, 2))

    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        return self.queries.lengths, self.keys.lengths


# The layouts of attention between packed batches, by the type of their own layouts: `static_layout` adds one.
LAYOUT_TYPES: dict[type[PackedLayout], type[PackedQK]] = {}


def attention_layout(queries: PackedLayout, keys: PackedLayout, mask: Mask | None = None) -> PackedQK:
    """The layout for queries of one packed batch that attend to the same sentences of another (or the same) one."""
    packed = LAYOUT_TYPES.get(type(queries), PackedQK)(queries, keys, mask)
    _ = packed.allowed  # computed outside the blocks, which are compiled one by one
    return packed
