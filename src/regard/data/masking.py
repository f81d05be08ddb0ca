"""Gaps in text, for a model to fill in: BERT's 80/10/10 (Devlin et al. 2019, section 3.1).

Of the tokens to be guessed 80 % are masked, 10 % become a random other piece, and 10 % stay as they are: at the time of
use nothing is masked, so a model that looked at masks alone would learn nothing of the other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from regard.data.packing import Position
from regard.rows import PairBatch, TokenRow
from regard.text import BEGIN, END

MASKED, RANDOM = 0.8, 0.1  # of what is to be guessed; the rest stays


class Batches(Protocol):
    """A stream of text batches that can be taken up at any position."""

    def batches(self, position: Position = ...) -> Iterator[tuple[PairBatch, Position]]: ...


def generator(*numbers: int) -> np.random.Generator:
    """A generator that these numbers determine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(numbers)))


def mask_batch(
    batch: PairBatch, random: np.random.Generator, *, share: float, mask_id: int, first_piece: int, vocabulary: int
) -> PairBatch:
    """A text batch with gaps: what is read is in `source` (= `inputs`), the text in `labels`, the gaps in `counted`.

    The text is the labels of the batch, [begin, w1 .. wn, end] each. Of its real places that are no marks a `share` is
    to be guessed, at least one (where there is one); random pieces are drawn from ids of `first_piece` on.
    """
    rows, clean = batch.inputs.rows, batch.labels.numpy()
    words = np.flatnonzero((clean[: rows.tokens] != BEGIN) & (clean[: rows.tokens] != END))
    guessed = words[random.random(len(words)) < share]
    if not len(guessed):
        guessed = random.choice(words, min(len(words), 1), replace=False)
    lot = random.random(len(guessed))
    read = clean.copy()
    read[guessed[lot < MASKED]] = mask_id
    other = guessed[(lot >= MASKED) & (lot < MASKED + RANDOM)]
    read[other] = random.integers(first_piece, vocabulary, len(other))
    counted = torch.zeros(len(clean), dtype=torch.bool)
    counted[torch.from_numpy(guessed)] = True
    row = TokenRow(torch.from_numpy(read), rows)
    return PairBatch(row, row, batch.labels, counted)


@dataclass(frozen=True)
class Masked:
    """The batches of a packer with gaps. Where they are depends on the seed, the epoch and the batch's number in it.

    >>> Masked(packer, 1, 0.15, mask_id=4, first_piece=5, vocabulary=8000).batch_at(0)  # doctest: +SKIP
    """

    packer: Batches
    recipe_seed: int
    share: float
    mask_id: int
    first_piece: int
    vocabulary: int

    def batches(self, position: Position = Position()) -> Iterator[tuple[PairBatch, Position]]:  # noqa: B008  frozen
        """The batches from a position on, without end, each with the position after it."""
        for batch, after in self.packer.batches(position):
            random = generator(self.recipe_seed, after.epoch, after.batch)
            masked = mask_batch(
                batch,
                random,
                share=self.share,
                mask_id=self.mask_id,
                first_piece=self.first_piece,
                vocabulary=self.vocabulary,
            )
            yield masked, after

    def batch_at(self, step: int) -> PairBatch:
        """The batch of a step, counted from 0."""
        return next(islice(self.batches(), step, None))[0]
