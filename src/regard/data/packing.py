"""Batches: sentence pairs laid end to end in flat rows, within a budget of tokens for each side.

Which pairs make which batch is a pure function of the seed: epoch e visits all pairs in an order drawn from (seed, e),
pool by pool. Inside a pool pairs are sorted by length, so that the padded view of a batch has little padding, cut into
batches, and the batches are shuffled. Plans need lengths only, so any position is found again without reading tokens.

Plain text is packed the same way, its documents as targets of empty sources; a stream of text is cut into windows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np
import torch

from regard.data.token_cache import Array, Ragged, TokenStore
from regard.errors import UserError
from regard.packed import PackedLayout, PackedTokens, SeqBatch
from regard.text import BOS, PAD

SLACK = 1.1  # room in the source row beyond the corpus's average: sources that are long for their targets still fit
EVEN = 64  # static source rows are multiples of so many tokens, as kernels like it and as target rows mostly are
DEVIATIONS = 3.0  # the same for batches that are not sorted: of how much a batch's source tokens vary


def generator(*numbers: int) -> np.random.Generator:
    """A generator that these numbers determine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(numbers)))


@dataclass(frozen=True)
class StreamPosition:
    """A place in the stream of batches: `batch` batches of this rank have been taken of epoch `epoch`."""

    epoch: int = 0
    batch: int = 0


class BatchStream(ABC):
    """Batches without end, that can be taken up at any position."""

    @abstractmethod
    def batches(self, position: StreamPosition = StreamPosition()) -> Iterator[tuple[SeqBatch, StreamPosition]]:  # noqa: B008  frozen
        """The batches from a position on, without end, each with the position after it."""

    @abstractmethod
    def taken_at(self, step: int) -> tuple[SeqBatch, StreamPosition]:
        """The batch of a step, counted from 0, and the position after it: as `batches` from the start has it."""

    def batch_at(self, step: int) -> SeqBatch:
        """The batch of a step, counted from 0."""
        return self.taken_at(step)[0]


class PlannedBatches(BatchStream):
    """A stream that reads tokens. Kinds differ in what an epoch is made of.

    Of `world` ranks each takes every `world`-th batch; the few that would give some ranks one more are left out.
    """

    members: str  # what a batch is made of, for messages
    seed: int
    rank: int
    world: int
    target_budget: int  # the most tokens of a batch
    source_budget: int
    sentences: int  # the most of a batch
    longest: tuple[int, int]  # the most tokens of a source and of a target
    dropped_long: int = 0  # how many sentences are too long for a batch

    def batches(self, position: StreamPosition = StreamPosition()) -> Iterator[tuple[SeqBatch, StreamPosition]]:  # noqa: B008  frozen
        for members, after in self._planned(position):
            yield self._read(members), after

    def taken_at(self, step: int) -> tuple[SeqBatch, StreamPosition]:
        members, after = next(islice(self._planned(StreamPosition()), step, None))
        return self._read(members), after

    def _planned(self, position: StreamPosition) -> Iterator[tuple[Array, StreamPosition]]:
        """The members of each batch from a position on, and the position after it."""
        for epoch in count(position.epoch):
            skip = position.batch if epoch == position.epoch else 0
            for number, members in islice(enumerate(self._steps(epoch)), skip, None):
                yield members, StreamPosition(epoch, number + 1)

    def _steps(self, epoch: int) -> Iterator[Array]:
        """The members of each batch that this rank takes of an epoch."""
        plan = self._plan(generator(self.seed, epoch))
        taken = 0
        while len(group := list(islice(plan, self.world))) == self.world:
            taken += 1
            yield group[self.rank]
        if not taken:
            raise UserError(f"too few training {self.members}: an epoch has fewer than {self.world} batches")

    @abstractmethod
    def _plan(self, random: np.random.Generator) -> Iterator[Array]:
        """The numbers of the members of each batch of an epoch, for all ranks."""

    @abstractmethod
    def _read(self, members: Array) -> SeqBatch:
        """The tokens of a batch."""


class BatchTransform(BatchStream):
    """The batches of a packer, each altered in the same way."""

    packer: PlannedBatches

    def batches(self, position: StreamPosition = StreamPosition()) -> Iterator[tuple[SeqBatch, StreamPosition]]:  # noqa: B008  frozen
        for batch, after in self.packer.batches(position):
            yield self._alter(batch, after), after

    def taken_at(self, step: int) -> tuple[SeqBatch, StreamPosition]:
        batch, after = self.packer.taken_at(step)
        return self._alter(batch, after), after

    @abstractmethod
    def _alter(self, batch: SeqBatch, after: StreamPosition) -> SeqBatch:
        """What becomes of the batch that ends at a position."""


@dataclass(frozen=True)
class ClassLabelsOnly(BatchTransform):
    """Batches of texts and their classes, of which the classes alone count: the end mark after one is certain."""

    packer: PlannedBatches

    def _alter(self, batch: SeqBatch, after: StreamPosition) -> SeqBatch:
        return class_labels_only(batch)


def class_labels_only(batch: SeqBatch) -> SeqBatch:
    """A batch of texts and their classes of which nothing else counts."""
    rows = batch.inputs.layout
    return replace(batch, loss_mask=rows.is_token & (rows.position == 0))


def _sample_epoch(count: int, weight: float, random: np.random.Generator) -> Array:
    """Which of so many an epoch visits: all, `weight` times over, and of a fraction a random part."""
    everything, whole = np.arange(count), int(weight)
    part = random.choice(everything, round((weight - whole) * count), replace=False)
    return np.concatenate([everything] * whole + [part])


class Packer(PlannedBatches):
    """An endless stream of batches from stored pairs, each at most `target_budget` and `source_budget` tokens long.

    A pair is visited `weight` times an epoch: 2 is twice, 0.5 a random half of the corpus, drawn anew each epoch. Pairs
    for about `pool` batches at a time are sorted by length: more makes the padded view tighter, fewer mixes better.
    `static` rows are filled up to the budgets, so that shapes never change; others end where their tokens end. They are
    for kernels that look at no padding, so pairs of all lengths share a batch, and its number of pairs is bounded too.
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
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if len(stores) != len(weights):
            raise ValueError(f"{len(stores)} stores, {len(weights)} weights")
        self.stores, self.weights = list(stores), list(weights)
        self.seed, self.static, self.rank, self.world = seed, static, rank, world
        self._first = np.cumsum([0, *map(len, stores)])  # a pair's number counts through all stores
        self._source_lengths = np.concatenate([store.source.lengths() for store in stores])
        self._target_lengths = np.concatenate([store.target.lengths() for store in stores])
        self.target_budget = target_budget
        self.source_budget = source_budget or self._following_budget()
        fits = (self._source_lengths <= self.source_budget) & (self._target_lengths <= self.target_budget)
        self.dropped_long = int((~fits).sum())
        if not fits.any():
            raise UserError(f"no training pair fits a batch of {target_budget} tokens: raise training.batch_tokens")
        self._usable = [np.flatnonzero(part) for part in np.split(fits, self._first[1:-1])]  # per store, from 0
        mean = float(self._target_lengths[fits].mean())
        self._pool = math.ceil(pool * target_budget / mean)  # pairs sorted by length together
        self.longest = int(self._source_lengths[fits].max()), int(self._target_lengths[fits].max())
        usual = target_budget / mean
        spread = float(self._target_lengths[fits].std()) / mean * math.sqrt(usual)
        self.sentences = math.ceil(usual + DEVIATIONS * 2 * spread) + 1

    def _following_budget(self) -> int:
        """The source budget that goes with the target budget in this corpus, and holds every source by itself."""
        fits = self._target_lengths <= self.target_budget
        sources = sum(w * store.report.source_tokens for w, store in zip(self.weights, self.stores, strict=True))
        targets = sum(w * store.report.target_tokens for w, store in zip(self.weights, self.stores, strict=True))
        share = self.target_budget * sources / targets * (self._slack(sources / targets) if self.static else SLACK)
        room = max(math.ceil(round(share, 6)), int(self._source_lengths[fits].max(initial=0)))
        return -(-room // EVEN) * EVEN if self.static else room

    def _slack(self, ratio: float) -> float:
        """Room in the source row of a batch of random pairs, as a share: so many deviations of its source tokens.

        Of a batch with T target tokens the source has `ratio` T, give or take sqrt(n) times the deviation of a pair's
        source from `ratio` times its target, n being the pairs of a batch.
        """
        pairs = max(self.target_budget / float(self._target_lengths.mean()), 1.0)
        deviation = float((self._source_lengths - ratio * self._target_lengths).std())
        return 1 + DEVIATIONS * deviation * math.sqrt(pairs) / (ratio * self.target_budget) if ratio else 1.0

    def _plan(self, random: np.random.Generator) -> Iterator[Array]:
        """The pair numbers of each batch of an epoch, for all ranks. What a pool leaves over goes into the next."""
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
        visits = [first + usable[_sample_epoch(len(usable), weight, random)] for first, usable, weight in stores]
        return random.permutation(np.concatenate(visits))

    def _cut(self, pool: Array) -> list[Array]:
        """Sort a pool by length, unless rows are static, and cut it wherever the next pair would exceed a budget.

        By target, then by source, up and down in turn: neighbours stay alike where the target's length changes. Equally
        long pairs stay in their random order.
        """
        sources, targets = self._source_lengths[pool], self._target_lengths[pool]
        unsorted = np.arange(len(pool))
        order = unsorted if self.static else np.lexsort((np.where(targets % 2, -sources, sources), targets))
        source_ends, target_ends = sources[order].cumsum(dtype=np.int64), targets[order].cumsum(dtype=np.int64)
        cuts = [0]
        source_done, target_done = 0, 0
        while cuts[-1] < len(pool):
            source_cut = source_ends.searchsorted(source_done + self.source_budget, "right")
            target_cut = target_ends.searchsorted(target_done + self.target_budget, "right")
            most = cuts[-1] + self.sentences if self.static else len(pool)
            cuts.append(min(int(source_cut), int(target_cut), most))
            source_done, target_done = source_ends[cuts[-1] - 1], target_ends[cuts[-1] - 1]
        return np.split(pool[order], cuts[1:-1])

    def _read(self, members: Array) -> SeqBatch:
        """The tokens of a batch, straight from the stores into flat rows."""
        source_rows = self._layout(self._source_lengths[members], self.source_budget, self.longest[0])
        target_rows = self._layout(self._target_lengths[members], self.target_budget, self.longest[1])
        source = self._gather([store.source for store in self.stores], members, source_rows)
        labels = self._gather([store.target for store in self.stores], members, target_rows)
        inputs = np.full_like(labels, PAD)
        inputs[1 : target_rows.tokens] = labels[: target_rows.tokens - 1]
        inputs[np.cumsum([0, *target_rows.lengths[:-1]])] = BOS
        return SeqBatch(
            PackedTokens(torch.from_numpy(source), source_rows),
            PackedTokens(torch.from_numpy(inputs), target_rows),
            torch.from_numpy(labels),
        )

    def _layout(self, lengths: Array, budget: int, longest: int) -> PackedLayout:
        if not self.static:
            return PackedLayout(lengths.tolist())
        return PackedLayout(lengths.tolist(), budget, bounds=(self.sentences, longest))

    def _gather(self, sides: list[Ragged], pairs: Array, rows: PackedLayout) -> Array:
        """[T] one side of the pairs, end to end, then fill."""
        flat = np.full(rows.size, PAD, np.int64)
        owner = np.searchsorted(self._first, pairs, "right") - 1
        owner_of_token = np.repeat(owner, rows.lengths)
        for index in np.unique(owner):
            mine = owner == index
            flat[: rows.tokens][owner_of_token == index] = sides[index].gather(pairs[mine] - self._first[index])
        return flat


class TokenWindows(PlannedBatches):
    """An endless stream of batches from running text: windows of `context` tokens, labels one token further on.

    Every epoch cuts the text at a fresh random offset and takes the windows in random order, `batch_tokens // context`
    a batch; the few left over at the end are left out. All windows are equally long, so there is no padding. Weights
    are as for a `Packer`.
    """

    members = "windows"

    def __init__(
        self,
        stores: Sequence[TokenStore],
        weights: Sequence[float],
        *,
        context: int,
        batch_tokens: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._texts = [store.target.ids for store in stores]
        self._first = np.cumsum([0, *map(len, self._texts)])  # a place counts through all texts
        self.weights, self.context = list(weights), context
        self.seed, self.rank, self.world = seed, rank, world
        self.count = max(batch_tokens // context, 1)  # windows a batch
        self.target_budget, self.source_budget = self.count * context, 0
        self.sentences, self.longest = self.count, (0, context)
        if (shortest := min(map(len, self._texts))) <= context:
            raise UserError(
                f"a training text of {shortest} tokens is too short for windows of {context} and a token more: "
                "use more text, or lower model.max_positions"
            )

    def _plan(self, random: np.random.Generator) -> Iterator[Array]:
        """The places where the windows of each batch begin."""
        begins = []
        for first, text, weight in zip(self._first, self._texts, self.weights, strict=False):
            places = len(text) - 1  # the last token is a label only
            offset = int(random.integers(min(self.context, places - self.context + 1)))
            windows = (places - offset) // self.context
            begins.append(first + offset + self.context * _sample_epoch(windows, weight, random))
        order = random.permutation(np.concatenate(begins))
        for at in range(0, len(order) - self.count + 1, self.count):
            yield order[at : at + self.count]

    def _read(self, members: Array) -> SeqBatch:
        owner = np.searchsorted(self._first, members, "right") - 1
        within = (members - self._first[owner])[:, None] + np.arange(self.context + 1)
        windows = np.empty(within.shape, np.int64)  # [N, context + 1]
        for index in np.unique(owner):
            windows[owner == index] = self._texts[index][within[owner == index]]
        rows, nothing = PackedLayout([self.context] * len(members)), PackedLayout([0] * len(members))
        inputs, labels = (torch.from_numpy(part.flatten()) for part in (windows[:, :-1], windows[:, 1:]))
        return SeqBatch(PackedTokens(inputs[:0], nothing), PackedTokens(inputs, rows), labels)


def fill_ratio(batch: SeqBatch) -> dict[str, float]:
    """How much of a batch is tokens: of its source row, its target row, and the padded view of both together.

    A row of no places at all, as the source row of plain text, is left out.
    """
    source, target = batch.source.layout, batch.inputs.layout
    cells = len(source) * source.max_len + len(target) * target.max_len
    shares = {"source": (source.tokens, source.size), "target": (target.tokens, target.size)}
    shares["padded"] = (source.tokens + target.tokens, cells)
    return {name: tokens / places for name, (tokens, places) in shares.items() if places}


def sentence_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sentences for decoding: indices by length, so many together that count * longest stays within the budget.

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
