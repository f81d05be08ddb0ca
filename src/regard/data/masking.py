"""BERT's masking (Devlin et al. 2019, section 3.1).

80 % of the tokens to be guessed are replaced by the mask token, 10 % by a random token, and 10 % are kept. A fine-tuned
model never reads masks: if only masks were predicted, the vectors of other tokens would not be trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from regard.data.stream import START, BatchStream, PlannedBatch, PlannedBatches, StreamPosition, generator
from regard.packed import PackedTokens, SeqBatch
from regard.text import BOS, EOS, Tokenizer
from regard.text.encode import MASK

MASKED, RANDOM = 0.8, 0.1  # shares of the tokens to be guessed; the rest is kept


@dataclass(frozen=True)
class MaskingPolicy:
    """The share of tokens to be guessed, the id of the mask token, and the ids that random tokens are drawn from."""

    share: float
    mask_id: int
    first_id: int  # first id of an ordinary token, after the special ones
    vocabulary: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, share: float) -> MaskingPolicy:
        return cls(share, tokenizer.tag(MASK), tokenizer.first, len(tokenizer))

    def mask(self, batch: SeqBatch, random: np.random.Generator) -> SeqBatch:
        """Mask a batch of texts: `source` (= `inputs`) is masked, `labels` are the text, `loss_mask` what to guess.

        The texts are the labels of the batch, [BOS, w1 .. wn, EOS] each. A share of the tokens except BOS and EOS is to
        be guessed, at least one.
        """
        layout, clean = batch.inputs.layout, batch.labels.numpy()
        words = np.flatnonzero((clean[: layout.tokens] != BOS) & (clean[: layout.tokens] != EOS))
        guessed = words[random.random(len(words)) < self.share]
        if not len(guessed):
            guessed = random.choice(words, min(len(words), 1), replace=False)
        draw = random.random(len(guessed))
        masked = clean.copy()
        masked[guessed[draw < MASKED]] = self.mask_id
        replaced = guessed[(draw >= MASKED) & (draw < MASKED + RANDOM)]
        masked[replaced] = random.integers(self.first_id, self.vocabulary, len(replaced))
        loss_mask = torch.zeros(len(clean), dtype=torch.bool)
        loss_mask[torch.from_numpy(guessed)] = True
        inputs = PackedTokens(torch.from_numpy(masked), layout)
        return SeqBatch(inputs, inputs, batch.labels, loss_mask)


@dataclass(frozen=True)
class MaskedBatches(BatchStream):
    """The masked batches of a packer. The masks depend on the seed, the epoch and the batch's number in it."""

    packer: PlannedBatches
    seed: int
    policy: MaskingPolicy

    def plan(self, position: StreamPosition = START) -> Iterator[PlannedBatch]:
        for planned in self.packer.plan(position):
            yield replace(planned, read=partial(self._read, planned))

    def _read(self, planned: PlannedBatch) -> SeqBatch:
        random = generator(self.seed, planned.after.epoch, planned.after.batch)
        return self.policy.mask(planned.read(), random)
