"""Packing: every pair once an epoch, within the budgets, the same for the same seed, from any position."""

import json
from collections import Counter
from dataclasses import asdict
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import packing, stream
from regard.data.budgets import SOURCE_MULTIPLE
from regard.data.packing import Packer, fill_ratio, sentence_batches
from regard.data.stream import StreamPosition, divide
from regard.data.token_store import Lengths, Ragged, TokenStore
from regard.errors import UserError
from regard.packed import SeqBatch
from regard.text import BOS, EOS


def corpus(count, seed=0, first=100, longest=12):
    """Return a store whose pairs start with a unique id on both sides."""
    draw = np.random.default_rng(seed)
    sentences = [
        [[first + pair, *draw.integers(4, 99, draw.integers(0, longest - 1)).tolist(), EOS] for pair in range(count)]
        for _ in range(2)
    ]
    return TokenStore.of(*sentences)


def pairs_of(batch):
    """Return the ids of the pairs in a batch."""
    return [int(sentence[0]) for sentence in batch.source.layout.split(batch.source.ids)]


def epoch_of(packer, epoch=0):
    """Return the batches of one epoch."""
    batches = []
    for batch, position in packer.batches(StreamPosition(epoch, 0)):
        if position.epoch != epoch:
            return batches
        batches.append(batch)


def assert_same(one, other):
    assert torch.equal(one.source.ids, other.source.ids) and one.source.layout.lengths == other.source.layout.lengths
    assert torch.equal(one.inputs.ids, other.inputs.ids) and one.inputs.layout.lengths == other.inputs.layout.lengths
    assert torch.equal(one.labels, other.labels)


def test_a_batch_equals_one_made_from_token_lists():
    store = corpus(200)
    for static in (False, True):
        packer = Packer([store], [1.0], target_budget=60, source_budget=70, seed=1, static=static)
        for batch, _ in islice(packer.batches(), 10):
            which = [number - 100 for number in pairs_of(batch)]
            expected = SeqBatch.from_lists(
                [store.source[index].tolist() for index in which],
                [store.target[index].tolist() for index in which],
                bos=BOS,
                source_size=70 if static else None,
                target_size=60 if static else None,
            )
            assert_same(batch, expected)


def test_every_pair_comes_once_an_epoch_and_no_budget_is_exceeded():
    packer = Packer([corpus(333)], [1.0], target_budget=40, source_budget=45, pool=8, seed=3)
    for epoch in (0, 1):
        batches = epoch_of(packer, epoch)
        assert sorted(pair for batch in batches for pair in pairs_of(batch)) == list(range(100, 433))
        assert all(batch.num_targets <= 40 and batch.source.layout.tokens <= 45 for batch in batches)
    assert packer.dropped_long == 0


def test_batches_are_as_full_as_the_sorted_order_allows():
    # 12 pairs of 2 target and 2 source tokens, 10 tokens per batch: 5 + 5 + 2
    store = TokenStore.of([[7, EOS]] * 12, [[8, EOS]] * 12)
    packer = Packer([store], [1.0], target_budget=10, seed=0)
    assert sorted(len(batch.source.layout) for batch in epoch_of(packer)) == [2, 5, 5]


def test_sorting_groups_pairs_of_similar_length():
    # targets of 2 and of 6 tokens, 30 per batch: at most one batch has both
    store = TokenStore.of([[7, EOS]] * 60, [[8, EOS] if n % 2 else [8] * 5 + [EOS] for n in range(60)])
    mixed = [
        len(set(batch.inputs.layout.lengths)) > 1
        for batch in epoch_of(Packer([store], [1.0], target_budget=30, seed=0))
    ]
    assert sum(mixed) <= 1


def test_order_is_drawn_by_seed_and_epoch():
    def order(seed, epoch):
        packer = Packer([corpus(200)], [1.0], target_budget=40, pool=8, seed=seed)
        return [pairs_of(batch) for batch in epoch_of(packer, epoch)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(2, 0) and order(1, 0) != order(1, 1)
    lengths = [len(batch) for batch in order(1, 0)]
    assert lengths != sorted(lengths) and lengths != sorted(lengths, reverse=True), "batches are shuffled"


@pytest.fixture
def small_sections(monkeypatch):
    """Corpora of more than 100 pairs are visited in sections."""
    for module in (stream, packing):
        monkeypatch.setattr(module, "SECTION", 100)


@pytest.mark.parametrize("static", [False, True])
def test_large_corpora_are_visited_section_by_section(small_sections, static):
    """Every pair that fits once an epoch; only lengths of the sections at work are looked up."""
    long = TokenStore.of([[5] * 60] * 3, [[5] * 60] * 3)  # too long for a batch
    stores = [corpus(470), corpus(230, first=1000), long]
    packer = Packer(stores, [1.0, 1.0, 1.0], target_budget=50, seed=1, static=static, pool=1)
    assert isinstance(packer._source_lengths, Lengths) and isinstance(packer._target_lengths, Lengths)
    whole = [np.concatenate([getattr(s, side).lengths() for s in stores]) for side in ("source", "target")]
    assert (packer.dropped_long, packer.longest) == (3, tuple(int(lengths[:700].max()) for lengths in whole))
    orders = []
    for epoch in (0, 1):
        visited = [pair for batch in epoch_of(packer, epoch) for pair in pairs_of(batch)]
        assert sorted(visited) == [*range(100, 570), *range(1000, 1230)]
        orders.append(visited)
    assert orders[0] != orders[1]
    # 8 sections: within one, pairs of the first store are at most 59 apart, and a pool of another one may be mixed in
    first = [pair for pair in orders[0][:60] if pair < 1000]
    spans = sorted((pair - 100) * 8 // 470 for pair in first)
    assert len(set(spans)) <= 2
    planned = packer.plan(StreamPosition(0, 40))
    batches = [batch.read() for batch in islice(packer.plan(), 43)]
    assert [pairs_of(next(planned).read()) for _ in range(3)] == [pairs_of(batch) for batch in batches[40:]]


def test_lengths_are_those_of_the_offsets():
    sides = [Ragged.of([[1] * n for n in lengths]) for lengths in ([3, 0, 2], [], [5, 1])]
    lengths, expected = Lengths(sides), np.array([3, 0, 2, 5, 1])
    for members in (slice(None), slice(1, 4), slice(0, None, 2), slice(4, 9), np.array([4, 0, 2])):
        assert lengths[members].tolist() == expected[members].tolist()
    assert len(lengths) == 5 and lengths[:].dtype == np.int32


def test_resumed_equals_uninterrupted():
    packer = Packer([corpus(70)], [1.5], target_budget=40, pool=8, seed=5)
    stream = list(islice(packer.batches(StreamPosition(0, 0)), 60))  # several epochs
    assert stream[-1][1].epoch >= 2
    for step in (0, 1, 5, 20, 41):
        position = StreamPosition(**json.loads(json.dumps(asdict(stream[step][1]))))
        for (batch, after), (expected, expected_after) in zip(
            packer.batches(position), stream[step + 1 :], strict=False
        ):
            assert_same(batch, expected)
            assert after == expected_after


def test_a_batch_is_a_pure_function_of_its_step():
    packer = Packer([corpus(120)], [1.0], target_budget=40, pool=8, seed=5)
    for step, (batch, _) in enumerate(islice(packer.batches(), 30)):
        assert_same(batch, packer.batch_at(step))


@pytest.mark.parametrize(("accumulate", "world"), [(1, 1), (4, 1), (4, 2), (5, 3), (2, 4)])
def test_the_batch_of_a_step_is_the_same_for_any_number_of_processes(accumulate, world):
    """Their shares are its micro-batches, each once, also across the end of an epoch; a share may be empty."""
    packer = Packer([corpus(40)], [1.0], target_budget=40, pool=8, seed=9)
    plain = list(islice(packer.batches(), 12 * accumulate))
    assert plain[-1][1].epoch > 0
    shares = [islice(packer.shares(accumulate=accumulate, rank=rank, world=world), 12) for rank in range(world)]
    for step, parts in enumerate(zip(*shares, strict=True)):
        expected = plain[step * accumulate : (step + 1) * accumulate]
        assert {part.after for part in parts} == {expected[-1][1]}
        actual = {index: batch for part in parts for index, batch in part.batches.items()}
        assert sum(len(part.batches) for part in parts) == len(actual) == accumulate
        for index, (batch, _) in enumerate(expected):
            assert_same(actual[index], batch)
        assert sum(not part.batches for part in parts) == max(world - accumulate, 0)


def test_a_position_between_steps_serves_any_number_of_processes():
    packer = Packer([corpus(40)], [1.0], target_budget=40, pool=8, seed=9)
    first, second = islice(packer.shares(accumulate=3), 2)
    for rank in range(2):
        (share,) = islice(packer.shares(first.after, 3, rank, 2), 1)
        assert share.after == second.after
        for index, batch in share.batches.items():
            assert_same(batch, second.batches[index])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5))
def test_shares_are_balanced_by_cost(costs, parts):
    """No part exceeds the mean by more than the costliest item, and no item could be moved to even out two parts."""
    shares = divide(costs, parts)
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    totals = [sum(costs[index] for index in share) for share in shares]
    assert max(totals) <= sum(costs) / parts + max(costs, default=0)
    for share, total in zip(shares, totals, strict=True):
        assert all(total - costs[index] <= min(totals) for index in share)


def test_weights_set_how_often_an_epoch_visits_a_pair():
    stores = [corpus(40, 1, first=100), corpus(40, 2, first=200), corpus(40, 3, first=300), corpus(40, 4, first=400)]
    packer = Packer(stores, [2.0, 0.5, 1.5, 1.0], target_budget=50, seed=1)
    visited_per_epoch = []
    for epoch in (0, 1):
        visits = Counter(pair for batch in epoch_of(packer, epoch) for pair in pairs_of(batch))
        assert all(visits[100 + n] == 2 and visits[400 + n] == 1 for n in range(40))
        visited = {n for n in range(40) if visits[200 + n]}
        visits_of_third = [visits[300 + n] for n in range(40)]
        assert len(visited) == 20 and visits.total() == 80 + 20 + 60 + 40
        assert sorted(visits_of_third) == [1] * 20 + [2] * 20
        visited_per_epoch.append(visited)
    assert visited_per_epoch[0] != visited_per_epoch[1], "drawn anew each epoch"


def test_sources_and_targets_of_several_stores_stay_aligned():
    stores = [corpus(30, 1, first=100), corpus(30, 2, first=200)]
    for batch in epoch_of(Packer(stores, [1.0, 1.0], target_budget=60, seed=1)):
        firsts = [int(sentence[0]) for sentence in batch.inputs.layout.split(batch.labels)]
        assert firsts == pairs_of(batch)


def test_the_source_budget_follows_the_corpus():
    # 2 source tokens for every 3 target tokens: 100 * 2 / 3 * 1.1 = 73.3
    store = TokenStore.of([[7, EOS]] * 5, [[8, 8, EOS]] * 5)
    assert Packer([store], [1.0], target_budget=100, seed=0).source_budget == 74
    # equally many: 110, not 111 by a rounding error
    assert Packer([TokenStore.of([[7, EOS]], [[8, EOS]])], [1.0], target_budget=100, seed=0).source_budget == 110
    # one long source among short ones still fits: 4 * 26 / 42 * 1.1 = 2.7 -> 6
    store = TokenStore.of([[EOS]] * 20 + [[7] * 5 + [EOS]], [[8, EOS]] * 21)
    assert Packer([store], [1.0], target_budget=4, seed=0).source_budget == 6
    assert Packer([store], [1.0], target_budget=4, seed=0, source_budget=9).source_budget == 9


def test_static_batches_have_one_shape():
    packer = Packer([corpus(200)], [1.0], target_budget=48, source_budget=50, seed=1, static=True)
    shapes = {(batch.source.ids.shape, batch.inputs.ids.shape, batch.labels.shape) for batch in epoch_of(packer)}
    assert shapes == {((50,), (48,), (48,))}


def test_pairs_longer_than_a_budget_are_left_out_and_counted():
    store = TokenStore.of([[7, EOS], [9] * 9 + [EOS], [5, EOS]], [[8, EOS], [8, EOS], [8] * 30 + [EOS]])
    packer = Packer([store], [1.0], target_budget=20, source_budget=8, seed=0)
    assert packer.dropped_long == 2
    assert [pairs_of(batch) for batch in epoch_of(packer)] == [[7]]
    with pytest.raises(UserError, match="batch_tokens"):
        Packer([store], [1.0], target_budget=1, seed=0)


def test_an_epoch_without_a_batch_is_an_error():
    store = TokenStore.of([[7, EOS]], [[8, EOS]])
    with pytest.raises(UserError, match="too few"):
        Packer([store], [0.25], target_budget=20, seed=0).batch_at(0)


def test_fill_ratio_is_the_fraction_of_tokens():
    # sources of 2 and 4 tokens in a batch of 8; targets of 3 and 3 in one of 10; padded: 2 * 4 + 2 * 3 cells
    batch = SeqBatch.from_lists([[7, EOS], [7, 7, 7, EOS]], [[8, 8, EOS]] * 2, bos=BOS, source_size=8, target_size=10)
    assert fill_ratio(batch) == {"source": 6 / 8, "target": 6 / 10, "padded": 12 / 14}


def test_batches_of_an_ordinary_corpus_have_little_padding():
    draw = np.random.default_rng(0)
    targets = np.clip(draw.lognormal(2.8, 0.5, 20_000), 2, 100).astype(int)
    sources = np.clip(targets * draw.lognormal(0, 0.2, 20_000), 2, 100).astype(int)
    store = TokenStore.of([[7] * n for n in sources], [[8] * n for n in targets])
    for static in (False, True):
        packer = Packer([store], [1.0], target_budget=1024, seed=1, static=static)
        ratios = [fill_ratio(batch) for batch in epoch_of(packer)]
        mean = {name: np.mean([one[name] for one in ratios]) for name in ratios[0]}
        assert mean["target"] > 0.9 and mean["source"] > 0.85
        assert static or mean["padded"] > 0.85  # static batches never use the padded view


def test_static_batches_hold_pairs_of_all_lengths_and_never_more_than_their_bounds():
    draw = np.random.default_rng(0)
    targets = np.clip(draw.lognormal(2.8, 0.5, 20_000), 2, 100).astype(int)
    store = TokenStore.of([[7] * n for n in targets], [[8] * n for n in targets])
    packer = Packer([store], [1.0], target_budget=1024, seed=1, static=True)
    assert packer.source_budget % SOURCE_MULTIPLE == 0
    batches = list(epoch_of(packer))
    assert sum(len(batch.inputs.layout) for batch in batches) == 20_000
    for batch in batches:
        assert (batch.source.layout.size, batch.inputs.layout.size) == (packer.source_budget, 1024)
        assert len(batch.inputs.layout) <= packer.sentences and batch.inputs.layout.max_len <= packer.longest[1]
    means = [np.mean(batch.inputs.layout.lengths) for batch in batches[:-1]]
    assert min(means) > targets.mean() / 1.5 and max(means) < targets.mean() * 1.5


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 100))
def test_decoding_batches_hold_every_sentence_once_within_the_budget(lengths, budget):
    groups = sentence_batches(lengths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[index] for index in group) <= budget
    for one, other in pairwise(groups):
        assert lengths[one[-1]] <= lengths[other[0]]
        assert (len(one) + 1) * lengths[other[0]] > budget, "a sentence that would have fitted was deferred"
