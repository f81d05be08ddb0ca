"""Streams of batches that can be resumed at any position, and shared by several processes.

Which examples make which batch is a pure function of the seed: epoch e visits them in an order drawn from (seed, e). A
plan needs no tokens, so that any position of the stream is found again without reading them.

The batch of a training step is a number of consecutive micro-batches, the same for any number of processes, which
divide them among themselves (`BatchStream.shares`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np

from regard.data.token_store import Array
from regard.errors import UserError
from regard.packed import Batch

SECTION = 2**22  # members of a corpus (pairs, windows) that are shuffled at once, and whose lengths are in memory


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
        """The share of process `rank` of `world` in the `accumulate` micro-batches of each step.

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
        """The cost of a batch in tokens, by which processes divide the work; only ratios matter."""

    @abstractmethod
    def _read(self, members: Array) -> Batch:
        """Read a batch."""


def sections(counts: Sequence[int], random: np.random.Generator) -> Iterator[list[range]]:
    """Divide the members of several stores into sections of at most `SECTION` in all, in random order.

    A section is a range of each store. One is shuffled at a time, so that memory does not grow with the corpus, and its
    tokens are close to each other on disk.
    """
    number = max(-(-sum(counts) // SECTION), 1)
    for section in random.permutation(number).tolist() if number > 1 else [0]:
        yield [range(count * section // number, count * (section + 1) // number) for count in counts]


def sample_epoch(count: int, weight: float, random: np.random.Generator) -> Array:
    """The numbers that an epoch visits of `count`: all, `weight` times over; of a fractional weight a random part."""
    everything, whole = np.arange(count), int(weight)
    part = random.choice(everything, round((weight - whole) * count), replace=False)
    return np.concatenate([everything] * whole + [part])
