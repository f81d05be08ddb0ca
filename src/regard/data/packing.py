"""Batches from the token cache: sentence pairs packed end to end, within a budget of tokens for each side.

An epoch visits all pairs in random order, one pool of pairs after the other. Inside a pool pairs are sorted by length,
so that the padded view of a batch has little padding, cut into batches, and the batches are shuffled. Plans need
lengths only (`data.stream`). Large corpora are visited in sections, so that memory does not grow with them.

Plain text is packed the same way, its documents as targets of empty sources; running text is cut into windows
(`data.windows`). Links between tokens are packed with their pairs by `data.links`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from regard.data import budgets
from regard.data.stream import SECTION, PlannedBatches, sample_epoch, sections
from regard.data.token_store import Array, Ragged, TokenStore, lengths_of
from regard.errors import UserError
from regard.packed import PackedLayout, PackedTokens, SeqBatch
from regard.text import BOS, PAD


class Packer(PlannedBatches):
    """Batches of stored pairs, each of at most `target_budget` and `source_budget` tokens.

    A pair is visited `weight` times an epoch: 2 is twice, 0.5 a random half of the corpus, another one in each epoch.
    Pairs for about `pool` batches at a time are sorted by length: a larger pool makes the padded view tighter, a
    smaller one mixes better. `static` batches are padded up to the budgets, so that shapes never change; others end
    with their last token. Static batches are for kernels that read no padding, so pairs of all lengths share a batch,
    and the number of pairs is bounded too.

    To divide the work among processes, a pair of tokens that attend to each other counts as `pair_cost` tokens.
    """

    members = "pairs"

    def __init__(
        self,
        stores: Sequence[TokenStore],
        weights: Sequence[float],
        *,
        target_budget: int,
        seed: int,
        source_budget: int | None = None,
        pool: int = 64,
        static: bool = False,
        pair_cost: float = 0.0,
    ) -> None:
        if len(stores) != len(weights):
            raise ValueError(f"{len(stores)} stores, {len(weights)} weights")
        self.stores, self.weights = list(stores), list(weights)
        self.seed, self.static, self.pair_cost = seed, static, pair_cost
        self._first = np.cumsum([0, *map(len, stores)])  # a pair's number counts through all stores
        self._source_lengths = lengths_of([store.source for store in stores], SECTION)
        self._target_lengths = lengths_of([store.target for store in stores], SECTION)
        self.target_budget = target_budget
        ratio = _weighted(weights, [s.report.source_tokens for s in stores]) / _weighted(
            weights, [s.report.target_tokens for s in stores]
        )
        step = slice(None, None, max(-(-len(self._target_lengths) // SECTION), 1))  # large corpora are sampled
        sources, targets = self._source_lengths[step], self._target_lengths[step]
        self.source_budget = source_budget or budgets.source_budget(
            sources, targets, self._longest_source(), ratio, target_budget, static
        )
        usable, longest = 0, (0, 0)
        for pairs, *lengths in self._usable_parts():
            usable += len(pairs)
            longest = max(longest[0], int(lengths[0].max(initial=0))), max(longest[1], int(lengths[1].max(initial=0)))
        self.longest, self.dropped_long = longest, len(self._target_lengths) - usable
        if not usable:
            raise UserError(f"no training pair fits a batch of {target_budget} tokens: raise training.batch_tokens")
        targets = targets[(sources <= self.source_budget) & (targets <= target_budget)]
        self._pool = math.ceil(pool * target_budget / float(targets.mean()))  # pairs sorted by length together
        self.sentences = budgets.max_sentences(targets, target_budget)

    def _longest_source(self) -> int:
        """The longest source of a pair whose target fits a batch."""
        parts = (slice(begin, begin + SECTION) for begin in range(0, len(self._target_lengths), SECTION))
        fitting = (self._source_lengths[part][self._target_lengths[part] <= self.target_budget] for part in parts)
        return max(int(sources.max(initial=0)) for sources in fitting)

    def _usable(self, begin: int, end: int) -> tuple[Array, Array, Array]:
        """The numbers of the pairs from `begin` to `end` that fit a batch, and their lengths."""
        sources, targets = self._source_lengths[begin:end], self._target_lengths[begin:end]
        fits = np.flatnonzero((sources <= self.source_budget) & (targets <= self.target_budget))
        return begin + fits, sources[fits], targets[fits]

    def _usable_parts(self) -> Iterator[tuple[Array, Array, Array]]:
        """The numbers of all pairs that fit a batch, and their lengths, some at a time."""
        for begin in range(0, len(self._target_lengths), SECTION):
            yield self._usable(begin, min(begin + SECTION, len(self._target_lengths)))

    def _plan(self, random: np.random.Generator) -> Iterator[Array]:
        """The pair numbers of each batch of an epoch. What a pool leaves over goes into the next."""
        pools, rest = self._pools(random), np.zeros(0, np.int64)
        pool = next(pools, None)
        while pool is not None:
            following = next(pools, None)
            batches = self._cut(np.concatenate([rest, pool]))
            if following is not None:
                rest = batches.pop()
            for index in random.permutation(len(batches)):
                yield batches[index]
            pool = following

    def _pools(self, random: np.random.Generator) -> Iterator[Array]:
        """The pairs that an epoch visits, in random order, in groups that are each sorted by length."""
        for section in sections([*map(len, self.stores)], random):
            order = self._visits(section, random)
            for begin in range(0, len(order), self._pool):
                yield order[begin : begin + self._pool]

    def _visits(self, section: list[range], random: np.random.Generator) -> Array:
        """The pairs of a section that an epoch visits, in random order."""
        visits = []
        for first, part, weight in zip(self._first, section, self.weights, strict=False):
            usable, *_ = self._usable(int(first) + part.start, int(first) + part.stop)
            visits.append(usable[sample_epoch(len(usable), weight, random)])
        return random.permutation(np.concatenate(visits))

    def _cut(self, pool: Array) -> list[Array]:
        """Sort a pool by length, unless batches are static, and cut it wherever the next pair would exceed a budget.

        Pairs are sorted by the length of the target, and among equal ones by that of the source: ascending for even
        lengths of the target, descending for odd ones, so that the source's length does not jump where the target's
        changes. Pairs of equal lengths stay in their random order.
        """
        sources, targets = self._source_lengths[pool], self._target_lengths[pool]
        unsorted = np.arange(len(pool))
        order = unsorted if self.static else np.lexsort((np.where(targets % 2, -sources, sources), targets))
        ends = [(counts[order].cumsum(dtype=np.int64), budget) for counts, budget in self._limits(pool)]
        cuts = [0]
        while (begin := cuts[-1]) < len(pool):
            most = begin + self.sentences if self.static else len(pool)
            used = [(end, budget + (end[begin - 1] if begin else 0)) for end, budget in ends]
            cuts.append(min(most, *(int(end.searchsorted(limit, "right")) for end, limit in used)))
        return np.split(pool[order], cuts[1:-1])

    def _limits(self, pairs: Array) -> list[tuple[Array, int]]:
        """Counts for each of these pairs, and the budgets of a batch for the sums of these counts."""
        sources, targets = self._source_lengths[pairs], self._target_lengths[pairs]
        return [(sources, self.source_budget), (targets, self.target_budget)]

    def _cost(self, members: Array) -> float:
        """Tokens, and pairs of tokens that attend: of each side, half of them in the causal target, and of both."""
        sources, targets = (lengths[members].astype(float) for lengths in (self._source_lengths, self._target_lengths))
        pairs = sources @ sources + targets @ targets / 2 + sources @ targets
        return float(sources.sum() + targets.sum() + self.pair_cost * pairs)

    def _read(self, members: Array) -> Any:
        """Read the tokens of a batch from the stores into packed tensors."""
        sources = self._layout(self._source_lengths[members], self.source_budget, self.longest[0])
        targets = self._layout(self._target_lengths[members], self.target_budget, self.longest[1])
        source = self._gather([store.source for store in self.stores], members, sources)
        labels = self._gather([store.target for store in self.stores], members, targets)
        return SeqBatch(
            PackedTokens(torch.from_numpy(source), sources),
            PackedTokens(torch.from_numpy(target_inputs(labels, targets)), targets),
            torch.from_numpy(labels),
        )

    def _layout(self, lengths: Array, budget: int, longest: int) -> PackedLayout:
        if not self.static:
            return PackedLayout(lengths.tolist())
        return PackedLayout(lengths.tolist(), budget, bounds=(self.sentences, longest))

    def _gather(self, sides: list[Ragged], pairs: Array, layout: PackedLayout) -> Array:
        """[T] (or [T, F], of features) one side of the pairs, concatenated and padded."""
        rows = sides[0].ids
        flat = np.full((layout.size, *rows.shape[1:]), PAD, np.int64 if rows.ndim == 1 else rows.dtype)
        store_of_pair = np.searchsorted(self._first, pairs, "right") - 1
        store_of_token = np.repeat(store_of_pair, layout.lengths)
        for index in np.unique(store_of_pair):
            chosen = pairs[store_of_pair == index] - self._first[index]
            flat[: layout.tokens][store_of_token == index] = sides[index].gather(chosen)
        return flat


def _weighted(weights: Sequence[float], counts: Sequence[int]) -> float:
    return sum(weight * count for weight, count in zip(weights, counts, strict=True))


def target_inputs(labels: Array, layout: PackedLayout) -> Array:
    """[T] what a decoder is fed to predict packed labels: each target shifted right, BOS first."""
    inputs = np.full_like(labels, PAD)
    inputs[1 : layout.tokens] = labels[: layout.tokens - 1]
    inputs[np.cumsum([0, *layout.lengths[:-1]])] = BOS
    return inputs


def fill_ratio(batch: Any) -> dict[str, float]:
    """The share of tokens, the rest being padding: in the source, in the target, and in the padded view of both.

    An empty side, such as the source of plain text, is left out.
    """
    source, target = batch.source.layout, batch.inputs.layout
    cells = len(source) * source.max_len + len(target) * target.max_len
    shares = {"source": (source.tokens, source.size), "target": (target.tokens, target.size)}
    shares["padded"] = (source.tokens + target.tokens, cells)
    return {name: tokens / size for name, (tokens, size) in shares.items() if size}


def sentence_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sentences for decoding: indices by length, as many together as keep count * longest within the budget.

    A sentence longer than the budget comes alone.

    >>> sentence_batches([3, 1, 2, 9], budget=6)
    [[1, 2], [0], [3]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
