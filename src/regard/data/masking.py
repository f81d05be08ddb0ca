"""Gaps in text, for a model to fill in: BERT's 80/10/10 (Devlin et al. 2019, section 3.1).

Of the tokens to be guessed 80 % are masked, 10 % become a random other piece, and 10 % stay as they are: at the time of
use nothing is masked, so a model that looked at masks alone would learn nothing of the other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from regard.data.packing import BatchTransform, PlannedBatches, StreamPosition, generator
from regard.packed import PackedTokens, SeqBatch
from regard.text import BOS, EOS, Tokenizer
from regard.text.encode import MASK

MASKED, RANDOM = 0.8, 0.1  # of what is to be guessed; the rest stays


@dataclass(frozen=True)
class MaskingPolicy:
    """What share of the words is to be guessed, what stands in a gap, and which ids random pieces are drawn from."""

    share: float
    mask_id: int
    first_piece: int
    vocabulary: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, share: float) -> MaskingPolicy:
        return cls(share, tokenizer.tag(MASK), tokenizer.first, len(tokenizer))

    def mask(self, batch: SeqBatch, random: np.random.Generator) -> SeqBatch:
        """A text batch with gaps: what is read is in `source` (= `inputs`), the text in `labels`, they in `counted`.

        The text is the labels of the batch, [begin, w1 .. wn, end] each. Of its real places that are no marks a share
        is to be guessed, at least one (where there is one).
        """
        rows, clean = batch.inputs.layout, batch.labels.numpy()
        words = np.flatnonzero((clean[: rows.tokens] != BOS) & (clean[: rows.tokens] != EOS))
        guessed = words[random.random(len(words)) < self.share]
        if not len(guessed):
            guessed = random.choice(words, min(len(words), 1), replace=False)
        lot = random.random(len(guessed))
        read = clean.copy()
        read[guessed[lot < MASKED]] = self.mask_id
        other = guessed[(lot >= MASKED) & (lot < MASKED + RANDOM)]
        read[other] = random.integers(self.first_piece, self.vocabulary, len(other))
        counted = torch.zeros(len(clean), dtype=torch.bool)
        counted[torch.from_numpy(guessed)] = True
        row = PackedTokens(torch.from_numpy(read), rows)
        return SeqBatch(row, row, batch.labels, counted)


@dataclass(frozen=True)
class MaskedBatches(BatchTransform):
    """The batches of a packer with gaps. Where they are depends on the seed, the epoch and the batch's number in it."""

    packer: PlannedBatches
    seed: int
    gaps: MaskingPolicy

    def _alter(self, batch: SeqBatch, after: StreamPosition) -> SeqBatch:
        return self.gaps.mask(batch, generator(self.seed, after.epoch, after.batch))
