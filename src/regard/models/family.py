"""What every model family offers, so that training, search, pictures and serving never ask which one they drive."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard import weights
from regard.attention import Cached
from regard.blocks import computed_again
from regard.rows import PairBatch, TokenRow


class State(Protocol):
    """The decoding state of N sentences with K beams each.

    What belongs to a sentence is stored once; what belongs to a beam is reordered.
    """

    def reorder(self, parents: Tensor) -> Self:
        """Beam k of sentence n goes on from beam `parents[n, k]`; K may change."""
        ...

    def keep(self, sentences: Tensor) -> Self:
        """Only these sentences stay, in this order: [M] indices into the present N."""
        ...


class CachedState:
    """N sentences of K beams that attend to what they were fed: a growing cache a layer, of N * K rows."""

    def __init__(self, own: list[Cached]) -> None:
        self.own = own
        self.beams = 1

    def _take(self, rows: Tensor) -> None:
        for cache in self.own:
            cache.take(rows.flatten())

    def reorder(self, parents: Tensor) -> Self:
        self._take(torch.arange(len(parents), device=parents.device)[:, None] * self.beams + parents)
        self.beams = parents.shape[1]
        return self

    def keep(self, sentences: Tensor) -> Self:
        self._take(sentences[:, None] * self.beams + torch.arange(self.beams, device=sentences.device))
        return self


class Translator(nn.Module):
    """A model from a source sentence to a target sentence: what a family has to write."""

    checkpoint_activations = False  # compute blocks again in the backward pass instead of keeping what is inside them

    def forward(self, batch: PairBatch) -> Tensor:
        """Logits [T, V] for every place of the flat target row, teacher-forced."""
        raise NotImplementedError  # each family's own

    def start(self, source: TokenRow) -> Any:
        """The state before the first target token, one beam a sentence."""
        raise NotImplementedError  # each family's own

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """Feed one token a beam, [N, K]; logits [N, K, V] for the next one, and the state after it."""
        raise NotImplementedError  # each family's own

    def _block(self, block: nn.Module, *arguments: Any) -> Tensor:
        """Run a block, keeping its inner activations or computing them again in the backward pass."""
        if self.checkpoint_activations and self.training:
            contexts = (nullcontext(), computed_again())  # of the first and of the second time
            return checkpoint(block, *arguments, use_reentrant=False, context_fn=lambda: contexts)
        return block(*arguments)

    def begin_with(self, tensors: Mapping[str, Tensor], origin: object) -> None:
        """Take another run's weights. A family may leave out what belonged to that run's task alone."""
        weights.into_model(self, tensors, origin)

    def loss(self, batch: PairBatch, smoothing: float = 0.0) -> Tensor:
        """Label-smoothed cross-entropy summed over the target tokens that count, in float32 whatever the precision.

        (1 - e) · -log p(label) + e · mean over the vocabulary of -log p, as F.cross_entropy defines it.
        """
        losses = F.cross_entropy(self(batch).float(), batch.labels, label_smoothing=smoothing, reduction="none")
        counted = batch.inputs.rows.real if batch.counted is None else batch.counted
        return losses.where(counted, 0.0).sum()
