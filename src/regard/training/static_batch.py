"""Batches in one buffer of constant size, so that a step that was compiled or captured once serves all of them.

The batches of a static packer have tensors of constant shapes, but the lengths of their sentences differ, and lengths
that are Python integers would be compiled in. Here all tensors of a batch, of any dtypes, and the offsets of its
sentences are copied into one buffer of bytes: one copy to the device per batch, where only values change.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from regard.attention import StaticPackedLayout
from regard.packed import Batch, PackedLayout, map_leaves

ALIGNMENT = 16  # bytes, so that every tensor of the buffer can be read in wide loads
AnyBatch = TypeVar("AnyBatch", bound=Batch)


@dataclass(frozen=True)
class BufferField:
    """Part of the buffer that holds a tensor, or the offsets of a layout; no elements for a constant layout."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Tensor | PackedLayout) -> BufferField:
        if isinstance(leaf, Tensor):
            return cls(leaf.dtype, tuple(leaf.shape))
        return cls(torch.long, (0 if leaf.bounds is None else leaf.bounds[0] + 1,))

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor, begin: int) -> Tensor:
        return buffer[begin : begin + self.bytes].view(self.dtype).view(self.shape)


class StaticBatchShape(Generic[AnyBatch]):
    """Fields, dtypes, shapes and bounds of layouts that all batches of a run share, read from one of them.

    A layout without `bounds` has to be the same in all batches. Fields that share an object share it in all batches.
    """

    def __init__(self, example: AnyBatch) -> None:
        self._example: AnyBatch = example.to("meta")
        self._structure = _structure(example)
        self._fields: list[tuple[BufferField, int]] = []  # with the byte where each begins
        self.size = 0  # bytes
        for leaf in _leaves(example):
            self._fields.append((BufferField.of(leaf), self.size))
            self.size += -(-self._fields[-1][0].bytes // ALIGNMENT) * ALIGNMENT
        self._constant: dict[tuple[int, torch.device], PackedLayout] = {}

    def flatten(self, batch: AnyBatch, pinned: bool = False) -> Tensor:
        """Copy a batch on the host into one tensor of `size` bytes."""
        if _structure(batch) != self._structure:
            raise ValueError(f"a batch of another shape than the first one: {_structure(batch)}, not {self._structure}")
        buffer = torch.empty(self.size, dtype=torch.uint8, pin_memory=pinned)
        for leaf, (field, begin) in zip(_leaves(batch), self._fields, strict=True):
            part = field.view(buffer, begin)
            if isinstance(leaf, Tensor):
                part.copy_(leaf)
            elif leaf.bounds is not None:
                if len(leaf) > leaf.bounds[0] or leaf.max_len > leaf.bounds[1]:
                    raise ValueError(f"{len(leaf)} sentences of up to {leaf.max_len} tokens exceed {leaf.bounds}")
                part[: len(leaf) + 1] = leaf.offsets
                part[len(leaf) + 1 :] = leaf.tokens
        return buffer

    def unflatten(self, buffer: Tensor) -> AnyBatch:
        """The batch that `flatten` copied, as views of the buffer, on whichever device it is."""
        fields = iter(enumerate(self._fields))

        def restore(leaf: Tensor | PackedLayout) -> Tensor | PackedLayout:
            index, (field, begin) = next(fields)
            if isinstance(leaf, PackedLayout) and leaf.bounds is None:
                # Kept, so that its cached indices are not computed while a graph is captured.
                return self._constant.setdefault((index, buffer.device), leaf.to(buffer.device))
            view = field.view(buffer, begin)
            if isinstance(leaf, PackedLayout) and leaf.bounds is not None:
                return StaticPackedLayout(view, leaf.size, leaf.bounds[1])
            return view

        batch: AnyBatch = map_leaves(self._example, restore)
        return batch


def _leaves(batch: Batch) -> list[Tensor | PackedLayout]:
    """The tensors and layouts of a batch, each once."""
    leaves: list[Tensor | PackedLayout] = []
    map_leaves(batch, leaves.append)
    return leaves


def _structure(batch: Batch) -> object:
    """The batch with its tensors and layouts replaced by a number, for shared ones, and what is constant in them."""
    numbers = count()

    def describe(leaf: Tensor | PackedLayout) -> tuple[object, ...]:
        if isinstance(leaf, Tensor):
            return next(numbers), BufferField.of(leaf)
        return next(numbers), leaf.size, leaf.bounds, None if leaf.bounds else leaf.lengths

    return map_leaves(batch, describe)
