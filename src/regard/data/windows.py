"""Batches of running text, cut into windows of equal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from regard.data.stream import PlannedBatches, sample_epoch, sections
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
        offsets = []
        for text in self._texts:
            inputs = len(text) - 1  # the last token is a label only
            offsets.append(int(random.integers(min(self.context, inputs - self.context + 1))))
        counts = [(len(text) - 1 - offset) // self.context for text, offset in zip(self._texts, offsets, strict=True)]
        rest = np.zeros(0, np.int64)
        for section in sections(counts, random):
            begins = [
                first + offset + self.context * (part.start + sample_epoch(len(part), weight, random))
                for first, offset, part, weight in zip(self._first, offsets, section, self.weights, strict=False)
            ]
            order = np.concatenate([rest, random.permutation(np.concatenate(begins))])
            whole = len(order) - len(order) % self.count
            yield from order[:whole].reshape(-1, self.count)
            rest = order[whole:]

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
