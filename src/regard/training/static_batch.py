"""Batches in one tensor of constant size, so that a step that was compiled or captured once serves all of them.

The rows of a static packer have constant sizes, but the host knows where their sentences begin, and what the host knows
is compiled in. Here all of a batch, where its sentences begin included, is laid into one tensor of integers: one copy
to the device a step, and there nothing but numbers changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from regard.data.packing import PlannedBatches, TokenWindows
from regard.packed import PackedLayout, PackedTokens, SeqBatch, StaticPackedLayout


@lru_cache(maxsize=8)  # what rows keep is made once, and not while a graph is captured
def _even(sentences: int, length: int, device: torch.device) -> PackedLayout:
    return PackedLayout([length] * sentences, device=device)


@dataclass(frozen=True)
class StaticBatchShape:
    """What all batches of a run have in common: the places of both rows, and bounds for their sentences."""

    source: int  # places
    target: int
    sentences: int  # the most a batch may have
    source_longest: int  # the most tokens of a sentence
    target_longest: int
    even: bool  # all sentences are of `target_longest` tokens, with no fill and no source: windows of running text
    counted: bool  # only some places count in the loss
    shared: bool  # the target row is the source row (texts with gaps)

    @classmethod
    def of(cls, packer: PlannedBatches, gaps: bool, counted: bool = False) -> StaticBatchShape:
        """What the batches of a static packer have in common.

        `gaps`: they are texts with gaps to fill in; `counted`: of others, too, only some places count.
        """
        even = isinstance(packer, TokenWindows)
        target = packer.target_budget
        source = target if gaps else packer.source_budget
        longest = packer.longest
        some = gaps or counted
        return cls(source, target, packer.sentences, longest[1 if gaps else 0], longest[1], even, some, gaps)

    @property
    def parts(self) -> list[int]:
        """How many integers each part takes: source, inputs, labels, counted; where sentences begin, of either row."""
        offsets = 0 if self.even else self.sentences + 1
        inputs = 0 if self.shared else self.target
        return [self.source, inputs, self.target, self.target * self.counted, offsets, offsets * (not self.shared)]

    @property
    def size(self) -> int:
        return sum(self.parts)

    def flatten(self, batch: SeqBatch) -> Tensor:
        """A batch as one row of `size` integers on the host."""
        source, target = batch.source.layout, batch.inputs.layout
        if (source.size, target.size) != (self.source, self.target) or len(target) > self.sentences:
            raise ValueError(f"a batch of {source.size} and {target.size} places, {len(target)} sentences: not {self}")
        laid = torch.empty(self.size, dtype=torch.long)
        places = laid.split(self.parts)
        places[0].copy_(batch.source.ids)
        if not self.shared:
            places[1].copy_(batch.inputs.ids)
        places[2].copy_(batch.labels)
        if self.counted:
            assert batch.loss_mask is not None
            places[3].copy_(batch.loss_mask)
        if not self.even:
            for rows, place in zip((source, target), places[4:], strict=True):
                if len(place):
                    place[: len(rows) + 1] = torch.tensor([0, *accumulate(rows.lengths)])
                    place[len(rows) + 1 :] = rows.tokens
        return laid

    def unflatten(self, laid: Tensor) -> SeqBatch:
        """What `lay` laid, on whichever device it is: the same batch, of static rows."""
        source, inputs, labels, counted, source_offsets, offsets = laid.split(self.parts)
        if self.even:
            nothing, rows = (_even(self.sentences, n, laid.device) for n in (0, self.target_longest))
            return SeqBatch(PackedTokens(source, nothing), PackedTokens(inputs, rows), labels)
        first = PackedTokens(source, StaticPackedLayout(source_offsets, self.source, self.source_longest))
        second = first
        if not self.shared:
            second = PackedTokens(inputs, StaticPackedLayout(offsets, self.target, self.target_longest))
        return SeqBatch(first, second, labels, counted.bool() if self.counted else None)
