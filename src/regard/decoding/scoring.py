"""Log-probabilities of given outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.packed import TextBatch


def score(logits_of: Callable[[TextBatch], Tensor], batch: TextBatch) -> list[list[float]]:
    """Return the log-probability of every target token of every pair, that of EOS last, given those before it.

    `logits_of` returns logits [T, V], as `SequenceModel.logits` does; they are normalised in float32.
    """
    layout = batch.inputs.layout
    with torch.no_grad():
        logits = logits_of(batch)[: layout.tokens].float()
        logp = -F.cross_entropy(logits, batch.labels[: layout.tokens], reduction="none")
    return [sentence.tolist() for sentence in layout.split(logp)]
