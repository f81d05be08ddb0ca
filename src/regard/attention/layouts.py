"""Attention layouts: how queries, keys and values are stored, and which pairs may attend.

A layout opens tensors [T, H, D] into the form of the dense kernels, [..., H, L, D], together with a mask, and closes
the result again. Packed batches (training), a KV cache (a decoding step) and cached source keys (cross-attention) are
layouts of the same attention, so that a block is written once for all of them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from torch import Tensor

from regard.attention.mask_tables import BlockSparseMask, MaskTable, SegmentMask
from regard.attention.masks import Causal, Full, Mask, SameSegment, SegmentPositions
from regard.attention.scores import TokenPositions
from regard.packed import PackedLayout, StaticPackedLayout

QUERY_BLOCK = 128  # queries per block of the block-sparse backend


class AttentionLayout(Protocol):
    """Opens queries, keys and values for a dense kernel and closes its result."""

    def positions(self, query: Tensor) -> TokenPositions | None:
        """Positions of the tokens of `query`, if cached keys include theirs; None: the index in the opened tensors."""
        ...

    def open(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, MaskTable]: ...

    def close(self, out: Tensor) -> Tensor: ...

    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Numbers of queries and keys of each sentence, without padding; None: there is no padding."""
        ...


class DenseQK:
    """Tensors that are already [..., H, L, D], with an optional table of booleans [..., Q, K]."""

    def __init__(self, table: Tensor | None = None, causal: bool = False) -> None:
        self.allowed = MaskTable(table, causal)

    def positions(self, query: Tensor) -> None:
        return None

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, MaskTable]:
        assert key is not None and value is not None
        return query, key, value, self.allowed

    def close(self, out: Tensor) -> Tensor:
        return out

    def lengths(self) -> None:
        return None


class PackedQK:
    """Packed batches: queries attend to the keys of the same sentence, in another batch or in the same one.

    It is created once per batch and shared by all layers, so that indices and masks are computed once.
    """

    def __init__(
        self, queries: PackedLayout, keys: PackedLayout, mask: Mask | None = None, query_block: int = QUERY_BLOCK
    ) -> None:
        self.queries, self.keys = queries, keys
        self.mask = mask if mask is not None else Full()
        self.query_block = query_block

    def positions(self, query: Tensor) -> None:
        return None

    @cached_property
    def allowed(self) -> MaskTable:
        """The cheapest form of "same sentence, and the mask", in the padded view.

        Queries that are padding may attend to anything: `close` drops them. Sentences have at least one token, so
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

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, MaskTable]:
        assert key is not None and value is not None
        q = self.queries.pad(query).transpose(1, 2)  # [T, H, D] -> [N, L, H, D] -> [N, H, L, D]
        k = self.keys.pad(key).transpose(1, 2)
        v = self.keys.pad(value).transpose(1, 2)
        return q, k, v, self.allowed

    def close(self, out: Tensor) -> Tensor:
        return self.queries.flatten(out.transpose(1, 2))

    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.queries.lengths, self.keys.lengths


class StaticQK(PackedQK):
    """Packed batches of static shapes, without padding them: queries [H, T, D] and keys [H, S, D] of all sentences.

    Only tensors on the device depend on the sentence lengths, so one compiled step serves all batches. The mask is
    computed in the constructor, since blocks share it but are compiled one by one.
    """

    queries: StaticPackedLayout
    keys: StaticPackedLayout

    def __init__(self, queries: StaticPackedLayout, keys: StaticPackedLayout, mask: Mask | None = None) -> None:
        super().__init__(queries, keys, mask)
        if self.mask not in (Causal(), Full()):
            raise TypeError(f"static batches support full and causal masks, not {self.mask}")
        segments = SegmentMask(queries, keys, self.mask == Causal())
        self.allowed = MaskTable(sparse=segments)
        segments.prepare()

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, MaskTable]:
        assert key is not None and value is not None
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), self.allowed

    def close(self, out: Tensor) -> Tensor:
        return out.transpose(0, 1)

    def lengths(self) -> None:  # type: ignore[override]
        return None


def pack(queries: PackedLayout, keys: PackedLayout, mask: Mask | None = None) -> PackedQK:
    """The layout for queries of one packed batch that attend to the same sentences of another (or the same) one."""
    if isinstance(queries, StaticPackedLayout) and isinstance(keys, StaticPackedLayout):
        return StaticQK(queries, keys, mask)
    packed = PackedQK(queries, keys, mask)
    _ = packed.allowed  # computed outside the blocks, which are compiled one by one
    return packed
