"""Streams that alter each batch of a packer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from regard.data.packing import START, BatchStream, PlannedBatch, PlannedBatches, StreamPosition
from regard.packed import Batch, SeqBatch


class BatchTransform(BatchStream):
    """The batches of a packer, each altered in the same way."""

    packer: PlannedBatches

    def plan(self, position: StreamPosition = START) -> Iterator[PlannedBatch]:
        for planned in self.packer.plan(position):
            yield replace(planned, read=partial(self._read, planned))

    def _read(self, planned: PlannedBatch) -> Batch:
        return self._alter(planned.read(), planned.after)

    @abstractmethod
    def _alter(self, batch: Any, after: StreamPosition) -> Batch:
        """Alter the batch that ends at a position."""


@dataclass(frozen=True)
class ClassLabelsOnly(BatchTransform):
    """Batches of texts and their classes, of which the classes alone count in the loss, not the EOS after them."""

    packer: PlannedBatches

    def _alter(self, batch: SeqBatch, after: StreamPosition) -> SeqBatch:
        return class_labels_only(batch)


def class_labels_only(batch: SeqBatch) -> SeqBatch:
    """Mask all labels but the first of each target, its class."""
    layout = batch.inputs.layout
    return replace(batch, loss_mask=layout.is_token & (layout.position == 0))
