"""Batches from the token cache: sentence pairs packed end to end, within a budget of tokens for each side.

Which pairs make which batch is a pure function of the seed: epoch e visits all pairs in an order drawn from (seed, e),
one pool of pairs after the other. Inside a pool pairs are sorted by length, so that the padded view of a batch has
little padding, cut into batches, and the batches are shuffled. Plans need lengths only, so that any position of the
stream is found again without reading tokens.

The batch of a training step is a number of consecutive micro-batches, the same for any number of processes, which
divide them among themselves (`BatchStream.shares`).

Plain text is packed the same way, its documents as targets of empty sources; running text is cut into windows
(`data.windows`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from regard.data.token_store import LINK_BITS, Array, Ragged, TokenStore, split_links
from regard.errors import UserError
from regard.packed import Batch, LinkTargets, PackedLayout, PackedTokens, SeqBatch
from regard.text import BOS, PAD

# How much larger the source budget is than a batch's expected source tokens, which differ from batch to batch:
SLACK = 1.1  # this factor for batches of pairs sorted by length;
DEVIATIONS = 3.0  # for static batches, which are not sorted, this many standard deviations
SOURCE_MULTIPLE = 64  # static source budgets are multiples of this many tokens, which suits the kernels
LINK_SLACK = 1.25  # link budget of a static batch, relative to the corpus's average


def generator(*numbers: int) -> np.random.Generator:
    """A random generator that these numbers determine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(numbers)))


@dataclass(frozen=True)
class StreamPosition:
    """A position in the stream of batches: `batch` batches of epoch `epoch` have been taken, by all processes."""

    epoch: int = 0
    batch: int = 0


START = StreamPosition()


@dataclass(frozen=True)
class PlannedBatch:
    """A batch that is not read yet, what it costs to train on it, and the position after it."""

    read: Callable[[], Any]
    cost: float  # in tokens (`PlannedBatches._cost`)
    after: StreamPosition


@dataclass(frozen=True)
class BatchShare:
    """One process's part of a step's batch: micro-batches by their index in it, and the position after all of it.

    `idle` are micro-batches of other processes. This one passes them too, with weight 0, where all processes have to
    take part in the same collective operations.
    """

    batches: dict[int, Any]
    after: StreamPosition
    idle: list[Any] = field(default_factory=list)


class BatchStream(ABC):
    """An endless stream of batches that can be resumed at any position."""

    @abstractmethod
    def plan(self, position: StreamPosition = START) -> Iterator[PlannedBatch]:
        """The batches from a position on, without end."""

    def batches(self, position: StreamPosition = START) -> Iterator[tuple[Any, StreamPosition]]:
        """The batches from a position on, each with the position after it."""
        for planned in self.plan(position):
            yield planned.read(), planned.after

    def shares(
        self,
        position: StreamPosition = START,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        equal: bool = False,
    ) -> Iterator[BatchShare]:
        """For each step, the share that process `rank` of `world` takes of its `accumulate` micro-batches.

        The micro-batches of a step do not depend on the number of processes, and none is split between processes. Every
        process has at least one pass, or, if `equal`, as many as the others: what its share lacks, it passes idly.
        """
        planned = self.plan(position)
        while True:
            step = list(islice(planned, accumulate))
            costs = [micro.cost for micro in step]
            parts = divide(costs, world, most=-(-accumulate // world) if equal else accumulate)
            passes = max(map(len, parts)) if equal else 1
            cheapest = step[costs.index(min(costs))]
            idle = [cheapest.read() for _ in range(passes - len(parts[rank]))]
            yield BatchShare({index: step[index].read() for index in parts[rank]}, step[-1].after, idle)

    def batch_at(self, number: int) -> Any:
        """The micro-batch of this number, counted from 0."""
        return next(islice(self.plan(), number, None)).read()


def divide(costs: Sequence[float], parts: int, most: int | None = None) -> list[list[int]]:
    """Divide items into parts of about equal cost: the costliest first, each to the part with the least so far.

    A part takes at most `most` items.

    >>> divide([5, 9, 4, 3], 2), divide([9, 1, 1, 1], 2), divide([9, 1, 1, 1], 2, most=2)
    ([[1, 3], [0, 2]], [[0], [1, 2, 3]], [[0, 3], [1, 2]])
    """
    totals, chosen = [0.0] * parts, [list[int]() for _ in range(parts)]
    most = len(costs) if most is None else most
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        part = min((p for p in range(parts) if len(chosen[p]) < most), key=totals.__getitem__)
        totals[part] += costs[index]
        chosen[part].append(index)
    return [sorted(part) for part in chosen]


class PlannedBatches(BatchStream):
    """A stream of epochs, whose order is drawn from (seed, epoch). Kinds differ in what a batch is made of."""

    members: str  # what a batch is made of, for messages
    seed: int
    target_budget: int  # maximum number of tokens of a batch
    source_budget: int
    sentences: int  # maximum number of sentences of a batch
    longest: tuple[int, int]  # maximum number of tokens of a source and of a target
    dropped_long: int = 0  # how many sentences are too long for a batch

    def plan(self, position: StreamPosition = START) -> Iterator[PlannedBatch]:
        for epoch in count(position.epoch):
            number = 0
            for number, members in enumerate(self._plan(generator(self.seed, epoch)), 1):
                if epoch > position.epoch or number > position.batch:
                    after = StreamPosition(epoch, number)
                    yield PlannedBatch(partial(self._read, members), self._cost(members), after)
            if not number:
                raise UserError(f"too few training {self.members}: an epoch has not one batch")

    @abstractmethod
    def _plan(self, random: np.random.Generator) -> Iterator[Array]:
        """The numbers of the members of each batch of an epoch."""

    @abstractmethod
    def _cost(self, members: Array) -> float:
        """What a batch costs, in tokens, by which processes divide the work; only ratios matter."""

    @abstractmethod
    def _read(self, members: Array) -> Batch:
        """Read a batch."""


def sample_epoch(count: int, weight: float, random: np.random.Generator) -> Array:
    """The numbers that an epoch visits of `count`: all, `weight` times over; of a fractional weight a random part."""
    everything, whole = np.arange(count), int(weight)
    part = random.choice(everything, round((weight - whole) * count), replace=False)
    return np.concatenate([everything] * whole + [part])


class Packer(PlannedBatches):
    """Batches of stored pairs, each of at most `target_budget` and `source_budget` tokens.

    A pair is visited `weight` times an epoch: 2 is twice, 0.5 a random half of the corpus, drawn anew each epoch. Pairs
    for about `pool` batches at a time are sorted by length: a larger pool makes the padded view tighter, a smaller one
    mixes better. `static` batches are padded up to the budgets, so that shapes never change; others end with their last
    token. Static batches are for kernels that read no padding, so pairs of all lengths share a batch, and the number of
    pairs is bounded too.

    Links of the stores are targets of guided alignment, whose loss has the weight `link_weight`. To divide the work
    among processes, a pair of tokens that attend to each other counts as `pair_cost` tokens.
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
        link_weight: float = 0.0,
        pair_cost: float = 0.0,
    ) -> None:
        if len(stores) != len(weights):
            raise ValueError(f"{len(stores)} stores, {len(weights)} weights")
        self.stores, self.weights = list(stores), list(weights)
        self.seed, self.static, self.link_weight, self.pair_cost = seed, static, link_weight, pair_cost
        self._first = np.cumsum([0, *map(len, stores)])  # a pair's number counts through all stores
        self._source_lengths = np.concatenate([store.source.lengths() for store in stores])
        self._target_lengths = np.concatenate([store.target.lengths() for store in stores])
        self.target_budget = target_budget
        self.source_budget = source_budget or self._default_source_budget()
        fits = (self._source_lengths <= self.source_budget) & (self._target_lengths <= self.target_budget)
        self.dropped_long = int((~fits).sum())
        if not fits.any():
            raise UserError(f"no training pair fits a batch of {target_budget} tokens: raise training.batch_tokens")
        self._usable = [np.flatnonzero(part) for part in np.split(fits, self._first[1:-1])]  # per store, from 0
        mean = float(self._target_lengths[fits].mean())
        self._pool = math.ceil(pool * target_budget / mean)  # pairs sorted by length together
        self.longest = int(self._source_lengths[fits].max()), int(self._target_lengths[fits].max())
        average = target_budget / mean  # pairs of a batch
        spread = float(self._target_lengths[fits].std()) / mean * math.sqrt(average)
        self.sentences = math.ceil(average + DEVIATIONS * 2 * spread) + 1
        self._links = [store.links for store in stores if store.links is not None]
        if self._links:
            self._link_counts = np.concatenate([links.lengths() for links in self._links])
            per_target = float(self._link_counts[fits].sum()) / float(self._target_lengths[fits].sum())
            most = int(self._link_counts[fits].max())
            self.link_budget = max(math.ceil(LINK_SLACK * per_target * target_budget), most, 1)

    def _default_source_budget(self) -> int:
        """The source tokens that come with `target_budget` target tokens here, at least the longest source."""
        fits = self._target_lengths <= self.target_budget
        sources = sum(w * store.report.source_tokens for w, store in zip(self.weights, self.stores, strict=True))
        targets = sum(w * store.report.target_tokens for w, store in zip(self.weights, self.stores, strict=True))
        share = self.target_budget * sources / targets * (self._slack(sources / targets) if self.static else SLACK)
        budget = max(math.ceil(round(share, 6)), int(self._source_lengths[fits].max(initial=0)))
        return -(-budget // SOURCE_MULTIPLE) * SOURCE_MULTIPLE if self.static else budget

    def _slack(self, ratio: float) -> float:
        """The source budget of a batch of random pairs over its expected source tokens: `DEVIATIONS` deviations more.

        A batch with T target tokens has `ratio` T source tokens, give or take sqrt(n) times the deviation of a pair's
        source from `ratio` times its target, n being the number of pairs of a batch.
        """
        pairs = max(self.target_budget / float(self._target_lengths.mean()), 1.0)
        deviation = float((self._source_lengths - ratio * self._target_lengths).std())
        return 1 + DEVIATIONS * deviation * math.sqrt(pairs) / (ratio * self.target_budget) if ratio else 1.0

    def _plan(self, random: np.random.Generator) -> Iterator[Array]:
        """The pair numbers of each batch of an epoch. What a pool leaves over goes into the next."""
        order = self._visits(random)
        rest = order[:0]
        for begin in range(0, len(order), self._pool):
            batches = self._cut(np.concatenate([rest, order[begin : begin + self._pool]]))
            if begin + self._pool < len(order):
                rest = batches.pop()
            for index in random.permutation(len(batches)):
                yield batches[index]

    def _visits(self, random: np.random.Generator) -> Array:
        """The pairs that an epoch visits, in random order."""
        stores = zip(self._first, self._usable, self.weights, strict=False)
        visits = [first + usable[sample_epoch(len(usable), weight, random)] for first, usable, weight in stores]
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
        limits = [(sources, self.source_budget), (targets, self.target_budget)]
        if self._links and self.static:
            limits.append((self._link_counts[pool], self.link_budget))
        ends = [(counts[order].cumsum(dtype=np.int64), budget) for counts, budget in limits]
        cuts = [0]
        while (begin := cuts[-1]) < len(pool):
            most = begin + self.sentences if self.static else len(pool)
            used = [(end, budget + (end[begin - 1] if begin else 0)) for end, budget in ends]
            cuts.append(min(most, *(int(end.searchsorted(limit, "right")) for end, limit in used)))
        return np.split(pool[order], cuts[1:-1])

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
        inputs = np.full_like(labels, PAD)
        inputs[1 : targets.tokens] = labels[: targets.tokens - 1]
        inputs[np.cumsum([0, *targets.lengths[:-1]])] = BOS
        return SeqBatch(
            PackedTokens(torch.from_numpy(source), sources),
            PackedTokens(torch.from_numpy(inputs), targets),
            torch.from_numpy(labels),
            links=self._read_links(members) if self._links else None,
        )

    def _read_links(self, members: Array) -> LinkTargets:
        """The links of a batch as targets of the queries that read a target token: those one position later.

        The links of a token share its weight. In static batches there are `link_budget` of them.
        """
        counts = self._link_counts[members]
        flat = PackedLayout(counts.tolist(), self.link_budget if self.static else None)
        sources, targets = split_links(self._gather(self._links, members, flat))
        sentences = np.concatenate([np.repeat(np.arange(len(members)), counts), np.zeros(flat.size - flat.tokens, int)])
        tokens = sentences << LINK_BITS | targets  # of the target, numbered through the batch
        _, token, of_token = np.unique(tokens[: flat.tokens], return_inverse=True, return_counts=True)
        weights = np.zeros(flat.size, np.float32)
        weights[: flat.tokens] = self.link_weight / of_token[token]
        rows = targets + (weights > 0)
        return LinkTargets(*map(torch.from_numpy, (sentences, rows, sources, weights)))

    def _layout(self, lengths: Array, budget: int, longest: int) -> PackedLayout:
        if not self.static:
            return PackedLayout(lengths.tolist())
        return PackedLayout(lengths.tolist(), budget, bounds=(self.sentences, longest))

    def _gather(self, sides: list[Ragged], pairs: Array, layout: PackedLayout) -> Array:
        """[T] one side of the pairs, concatenated and padded."""
        flat = np.full(layout.size, PAD, np.int64)
        store_of_pair = np.searchsorted(self._first, pairs, "right") - 1
        store_of_token = np.repeat(store_of_pair, layout.lengths)
        for index in np.unique(store_of_pair):
            chosen = pairs[store_of_pair == index] - self._first[index]
            flat[: layout.tokens][store_of_token == index] = sides[index].gather(chosen)
        return flat


def fill_ratio(batch: SeqBatch) -> dict[str, float]:
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
