"""Packed batches of static shapes, as compiled and captured steps require, and attention between them."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from regard import kernels
from regard.attention.layouts import LAYOUT_TYPES, KernelInputs, MaskTable, PackedQK
from regard.attention.masks import Causal, Full, Mask
from regard.packed import PackedLayout


class StaticPackedLayout(PackedLayout):
    """A layout with static shapes: only `offsets` [M + 1], on the device, differs between batches.

    What is compiled or captured for one batch then serves all others. M is the maximum number of sentences; after the
    actual ones, the offsets repeat the number of tokens. `max_len` is an upper bound.

    >>> layout = StaticPackedLayout(torch.tensor([0, 2, 3, 3]), size=4, longest=2)
    >>> layout.position.tolist(), layout.segment_ids.tolist()
    ([0, 1, 0, 0], [0, 0, 1, 3])
    """

    def __init__(self, offsets: Tensor, size: int, longest: int) -> None:
        self.offsets = offsets
        self.size, self.max_len = size, longest
        self.bounds = len(offsets) - 1, longest
        self.device = offsets.device

    @property
    def lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        raise TypeError("the lengths of a static layout are on the device: see `length`")

    tokens = lengths  # type: ignore[assignment]

    @property
    def empty(self) -> bool:
        return self.size == 0

    @property
    def may_have_padding(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"StaticPackedLayout(at most {len(self)} sentences, size={self.size})"

    @cached_property
    def length(self) -> Tensor:
        """[M] the sentence lengths; zeros after the actual sentences."""
        return self.offsets.diff()

    @cached_property
    def segment_ids(self) -> Tensor:
        """[T] the sentence that each token belongs to; M for padding."""
        index = torch.arange(self.size, device=self.device, dtype=self.offsets.dtype)
        return torch.searchsorted(self.offsets, index, right=True) - 1

    @cached_property
    def is_token(self) -> Tensor:
        return torch.arange(self.size, device=self.device) < self.offsets[-1]

    def convolved(self, kernel: int, stride: int = 1, padding: int = 0) -> StaticPackedLayout:
        extra = 2 * padding - kernel + stride  # a sentence of n tokens keeps at most (n + extra) / stride
        lengths = torch.where(self.length > 0, (self.length + extra).clamp(min=0) // stride, 0)
        size = (self.size + len(self) * max(extra, 0)) // stride
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return StaticPackedLayout(offsets, size, max((self.max_len + extra) // stride, 0))


class SegmentMask:
    """The mask between two static packed batches: tokens attend to tokens of the same sentence.

    No token attends to padding. In the table padding attends to padding, to avoid empty rows.
    """

    any_score: ClassVar[bool] = False

    def __init__(self, queries: StaticPackedLayout, keys: StaticPackedLayout, causal: bool) -> None:
        self.queries, self.keys, self.causal = queries, keys, causal

    def backend(self, query: Tensor) -> str:
        return "varlen" if kernels.supports(query) else "fused"

    def prepare(self) -> None:
        """Compute what the backend of this device will read."""
        if kernels.supports(self.queries.offsets):
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

    def to_kernel(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> KernelInputs:
        assert key is not None and value is not None
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), self.allowed

    def from_kernel(self, out: Tensor) -> Tensor:
        return out.transpose(0, 1)

    def lengths(self) -> None:
        return None


LAYOUT_TYPES[StaticPackedLayout] = StaticQK
