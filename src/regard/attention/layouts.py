"""How queries, keys and values lie in memory, and which of them may meet.

A layout opens [T, H, D] tensors into what the dense kernels take, [..., H, L, D], with what is allowed, and closes the
result again. Training (flat rows), a decoding step (a growing cache), and a look at stored source keys are three
layouts of the same attention, so a block is written once for all of them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from torch import Tensor

from regard.attention.mask_tables import BlockSparseMask, MaskTable, SegmentMask
from regard.attention.masks import Causal, Full, Mask, SameSegment, SegmentPositions
from regard.attention.scores import TokenPositions
from regard.packed import PackedLayout, StaticPackedLayout

QUERY_BLOCK = 128  # queries that a sparse kernel takes at a time


class AttentionLayout(Protocol):
    """Opens queries, keys and values for a dense kernel and closes its result."""

    def positions(self, query: Tensor) -> TokenPositions | None:
        """Where the tokens of `query` stand, if keys are cached with their positions; None: as they lie when opened."""
        ...

    def open(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, MaskTable]: ...

    def close(self, out: Tensor) -> Tensor: ...

    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Real queries and keys of each opened sentence; None: all of them."""
        ...


class DenseQK:
    """Tensors that already are [..., H, L, D], with a table of booleans."""

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
    """Flat rows: queries of one row look at the keys of the same sentence in another (or the same) row.

    Made once a batch and shared by all layers, so the maps and tables are built once. `lot` is how many queries a
    sparse kernel takes at a time.
    """

    def __init__(
        self, queries: PackedLayout, keys: PackedLayout, mask: Mask | None = None, lot: int = QUERY_BLOCK
    ) -> None:
        self.queries, self.keys = queries, keys
        self.mask = mask if mask is not None else Full()
        self.lot = lot

    def positions(self, query: Tensor) -> None:
        return None

    @cached_property
    def allowed(self) -> MaskTable:
        """The cheapest form of "same sentence, and the mask", in the padded view.

        Padded queries may do as they like: closing drops them. Sentences have at least one token, so a row that only
        avoids padding, or looks back from where it stands, is never empty.
        """
        own = self.queries is self.keys
        if own and self.mask == Causal():
            return MaskTable(
                causal=True, no_empty_rows=True
            )  # padding lies behind every real query, so causality hides it
        if self.mask == Full():
            if self.keys.equal_lengths:
                return MaskTable(no_empty_rows=True)
            return MaskTable(self.keys.padded_is_token[:, None, None, :], no_empty_rows=min(self.keys.lengths) > 0)
        if own:
            return MaskTable(sparse=BlockSparseMask(self.mask, self.keys, self.lot))
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
    """Static rows, as they lie: queries [H, T, D] against keys [H, S, D] of all sentences at once.

    Nothing depends on where the sentences begin but numbers on the device, so one compiled step serves all batches.
    Those numbers are made at once: they are for all blocks, and a compiler sees the blocks one by one.
    """

    queries: StaticPackedLayout
    keys: StaticPackedLayout

    def __init__(self, queries: StaticPackedLayout, keys: StaticPackedLayout, mask: Mask | None = None) -> None:
        super().__init__(queries, keys, mask)
        if self.mask not in (Causal(), Full()):
            raise TypeError(f"static rows cannot be seen through {self.mask}")
        ranges = SegmentMask(queries, keys, self.mask == Causal())
        self.allowed = MaskTable(sparse=ranges)
        ranges.prepare()

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, MaskTable]:
        assert key is not None and value is not None
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), self.allowed

    def close(self, out: Tensor) -> Tensor:
        return out.transpose(0, 1)

    def lengths(self) -> None:  # type: ignore[override]
        return None


def pack(queries: PackedLayout, keys: PackedLayout, mask: Mask | None = None) -> PackedQK:
    """The layout for queries of one row that look at the same sentences in another (or the same) row."""
    if isinstance(queries, StaticPackedLayout) and isinstance(keys, StaticPackedLayout):
        return StaticQK(queries, keys, mask)
    packed = PackedQK(queries, keys, mask)
    _ = packed.allowed  # made now: a compiler of blocks should find it there
    return packed
