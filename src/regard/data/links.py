"""Links between the tokens of pairs, as targets of guided alignment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from regard.data.packing import Packer
from regard.data.stream import SECTION
from regard.data.token_store import LINK_BITS, Array, TokenStore, lengths_of, split_links
from regard.packed import LinkTargets, PackedLayout

SLACK = 1.25  # link budget of a static batch, relative to the corpus's average


class LinkedPacker(Packer):
    """Batches of stored pairs with the links between their tokens; the loss of these has the weight `link_weight`."""

    def __init__(
        self, stores: Sequence[TokenStore], weights: Sequence[float], *, link_weight: float, **options: Any
    ) -> None:
        super().__init__(stores, weights, **options)
        self.link_weight = link_weight
        self._links = [store.links for store in stores if store.links is not None]
        self._counts = lengths_of(self._links, SECTION)
        usable = [(self._counts[pairs], targets) for pairs, _, targets in self._usable_parts()]
        per_target = sum(int(counts.sum()) for counts, _ in usable) / sum(int(targets.sum()) for _, targets in usable)
        most = max(int(counts.max(initial=0)) for counts, _ in usable)
        self.link_budget = max(math.ceil(SLACK * per_target * self.target_budget), most, 1)

    def _limits(self, pairs: Array) -> list[tuple[Array, int]]:
        limits = super()._limits(pairs)
        return [*limits, (self._counts[pairs], self.link_budget)] if self.static else limits

    def _read(self, members: Array) -> Any:
        return replace(super()._read(members), links=self._read_links(members))

    def _read_links(self, members: Array) -> LinkTargets:
        """The links of a batch as targets of the queries that read a target token: those one position later.

        The links of a token share its weight. In static batches there are `link_budget` of them.
        """
        counts = self._counts[members]
        flat = PackedLayout(counts.tolist(), self.link_budget if self.static else None)
        sources, targets = split_links(self._gather(self._links, members, flat))
        sentences = np.concatenate([np.repeat(np.arange(len(members)), counts), np.zeros(flat.size - flat.tokens, int)])
        tokens = sentences << LINK_BITS | targets  # target tokens, numbered through the batch
        _, token, of_token = np.unique(tokens[: flat.tokens], return_inverse=True, return_counts=True)
        weights = np.zeros(flat.size, np.float32)
        weights[: flat.tokens] = self.link_weight / of_token[token]
        rows = targets + (weights > 0)
        return LinkTargets(*map(torch.from_numpy, (sentences, rows, sources, weights)))
