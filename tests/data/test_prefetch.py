"""Batches prefetched on a thread equal those made without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count, islice

import pytest
import torch

from regard.data.packing import Packer
from regard.data.prefetch import Prefetched
from regard.data.stream import StreamPosition
from regard.data.token_store import TokenStore
from regard.packed import SeqBatch


def packer() -> Packer:
    lengths = [2 + (7 * i) % 11 for i in range(200)]
    sentences = [[5 + (i + j) % 40 for j in range(n - 1)] + [2] for i, n in enumerate(lengths)]
    return Packer([TokenStore.of(sentences, sentences)], [1.0], target_budget=64, seed=3, pool=4)


def same(one: SeqBatch, other: SeqBatch) -> bool:
    pairs = [(one.source.ids, other.source.ids), (one.inputs.ids, other.inputs.ids), (one.labels, other.labels)]
    return all(torch.equal(a, b) for a, b in pairs) and one.source.layout.lengths == other.source.layout.lengths


@pytest.mark.parametrize("ahead", [1, 5])
def test_the_same_batches_and_positions_come_in_the_same_order(ahead: int) -> None:
    plain = list(islice(packer().batches(), 60))  # more than an epoch
    with Prefetched(packer().batches(), ahead) as stream:
        for batch, position in plain:
            actual, after = next(stream)
            assert same(actual, batch) and after == position


def test_resuming_at_the_last_position_continues_with_the_next_batch() -> None:
    """Prefetched batches that were never used are made again."""
    plain = [batch for batch, _ in islice(packer().batches(), 30)]
    position = StreamPosition()
    with Prefetched(packer().batches(), ahead=6) as stream:
        for _ in range(13):
            _, position = next(stream)
    with Prefetched(packer().batches(position), ahead=6) as stream:
        assert all(same(next(stream)[0], batch) for batch in plain[13:])


def test_no_more_than_ahead_items_are_prefetched() -> None:
    produced = []

    def numbers() -> Iterator[int]:
        for number in count():
            produced.append(number)
            yield number

    with Prefetched(numbers(), ahead=3) as stream:
        assert next(stream) == 0
        time.sleep(0.1)
        assert len(produced) <= 5  # one used, three waiting, one in progress


def test_an_exception_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("the disk is gone")

    with Prefetched(items()) as stream:
        assert [next(stream), next(stream)] == [1, 2]
        with pytest.raises(ValueError, match="the disk is gone"):
            next(stream)
        with pytest.raises(StopIteration):
            next(stream)


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    stream = Prefetched(count(), ahead=2)
    next(stream)
    stream.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(stream)


def test_time_spent_waiting_for_a_slow_producer_is_measured() -> None:
    def slow() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.2)
            yield number

    with Prefetched(slow()) as stream:
        assert list(stream) == [0, 1, 2]
        assert stream.waited > 0.3
    with Prefetched(iter(range(3))) as stream:
        while not stream._over:
            time.sleep(0.01)
        assert list(stream) == [0, 1, 2]
        assert stream.waited == 0
