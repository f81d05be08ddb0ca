"""Batches of running text, cut into windows of equal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from regard.data.packing import PlannedBatches, sample_epoch
from regard.data.token_store import Array, TokenStore
from regard.errors import UserError
from regard.packed import PackedLayout, PackedTokens, SeqBatch


class TokenWindows(PlannedBatches):
    """Batches of running text: windows of `context` tokens, with labels one token further on.

    Every epoch cuts the text at a new random offset and takes the windows in random order, `batch_tokens // context` a
    batch; the few left over at the end are dropped. All windows are equally long, so there is no padding. Weights are
    as for a `Packer`.
    """

    members = "windows"

    def __init__(
        self, stores: Sequence[TokenStore], weights: Sequence[float], *, context: int, batch_tokens: int, seed: int
    ) -> None:
        self._texts = [store.target.ids for store in stores]
        self._first = np.cumsum([0, *map(len, self._texts)])  # a position counts through all texts
        self.weights, self.context, self.seed = list(weights), context, seed
        self.count = max(batch_tokens // context, 1)  # windows of a batch
        self.target_budget, self.source_budget = self.count * context, 0
        self.sentences, self.longest = self.count, (0, context)
        if (shortest := min(map(len, self._texts))) <= context:
            raise UserError(
                f"a training text of {shortest} tokens is too short for windows of {context} and a token more: "
                "use more text, or lower model.max_positions"
            )

    def _plan(self, random: np.random.Generator) -> Iterator[Array]:
        """The positions where the windows of each batch begin."""
        begins = []
        for first, text, weight in zip(self._first, self._texts, self.weights, strict=False):
            inputs = len(text) - 1  # the last token is a label only
            offset = int(random.integers(min(self.context, inputs - self.context + 1)))
            windows = (inputs - offset) // self.context
            begins.append(first + offset + self.context * sample_epoch(windows, weight, random))
        order = random.permutation(np.concatenate(begins))
        for at in range(0, len(order) - self.count + 1, self.count):
            yield order[at : at + self.count]

    def _cost(self, members: Array) -> float:
        return len(members) * self.context

    def _read(self, members: Array) -> SeqBatch:
        text_of_window = np.searchsorted(self._first, members, "right") - 1
        within = (members - self._first[text_of_window])[:, None] + np.arange(self.context + 1)
        windows = np.empty(within.shape, np.int64)  # [N, context + 1]
        for index in np.unique(text_of_window):
            windows[text_of_window == index] = self._texts[index][within[text_of_window == index]]
        layout, empty = PackedLayout([self.context] * len(members)), PackedLayout([0] * len(members))
        inputs, labels = (torch.from_numpy(part.flatten()) for part in (windows[:, :-1], windows[:, 1:]))
        return SeqBatch(PackedTokens(inputs[:0], empty), PackedTokens(inputs, layout), labels)
