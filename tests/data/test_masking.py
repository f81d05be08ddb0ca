"""Gaps in text: so many, of three kinds, never in marks or fill, and the same wherever training is taken up."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from regard.data.masking import MaskedBatches, MaskingPolicy
from regard.data.packing import Packer, StreamPosition, generator
from regard.data.token_cache import TokenStore
from regard.packed import SeqBatch
from regard.text import BOS, EOS

MASK, FIRST, SIZE = 4, 5, 1000  # the mask's id, the first piece's, and the vocabulary


def gaps(share: float) -> MaskingPolicy:
    return MaskingPolicy(share, mask_id=MASK, first_id=FIRST, vocabulary=SIZE)


def text_batch(texts: list[list[int]], size: int | None = None) -> SeqBatch:
    """Texts as they are stored, [begin, words, end], with no sources."""
    return SeqBatch.from_lists([[] for _ in texts], [[BOS, *words, EOS] for words in texts], bos=BOS, target_size=size)


def packer(seed: int = 1, static: bool = True) -> Packer:
    draw = np.random.default_rng(0)
    texts = [[BOS, *draw.integers(FIRST, SIZE, draw.integers(1, 20)).tolist(), EOS] for _ in range(150)]
    return Packer(
        [TokenStore.of([[] for _ in texts], texts)], [1.0], target_budget=100, source_budget=1, seed=seed, static=static
    )


def masked(seed: int = 1, share: float = 0.15) -> MaskedBatches:
    return MaskedBatches(packer(), seed, gaps(share))


def same(one: SeqBatch, other: SeqBatch) -> bool:
    pairs = [(one.source.ids, other.source.ids), (one.labels, other.labels), (one.loss_mask, other.loss_mask)]
    return all(torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]


def within(count: int, of: int, share: float) -> bool:
    """Whether a count is what a share would give, but for 5 standard deviations."""
    return abs(count - of * share) < 5 * math.sqrt(of * share * (1 - share))


def test_what_is_read_and_what_is_to_be_guessed_lie_side_by_side() -> None:
    batch = text_batch([[10, 11, 12], [13, 14]], size=12)
    found = gaps(0.5).mask(batch, generator(1))
    assert found.source is found.inputs and found.inputs.layout is batch.inputs.layout
    assert torch.equal(found.labels, batch.labels)
    assert found.loss_mask is not None and found.num_targets == int(found.loss_mask.sum()) >= 1
    open_places = ~found.loss_mask
    assert torch.equal(found.source.ids[open_places], batch.labels[open_places])  # nothing else is touched


def test_a_share_of_the_words_is_guessed_and_80_10_10_of_them_masked_changed_and_kept() -> None:
    words = guessed = mask = kept = 0
    others: list[int] = []
    for seed in range(200):
        draw = np.random.default_rng(seed)
        batch = text_batch([draw.integers(FIRST, SIZE, 30).tolist() for _ in range(10)])
        found = gaps(0.15).mask(batch, generator(seed))
        read, clean = found.source.ids[found.loss_mask], found.labels[found.loss_mask]
        words += 300
        guessed += len(read)
        mask += int((read == MASK).sum())
        kept += int((read == clean).sum())
        others += read[(read != MASK) & (read != clean)].tolist()
    assert within(guessed, words, 0.15)
    chance = 1 / (SIZE - FIRST)  # that a random piece is the right one
    assert within(mask, guessed, 0.8)
    assert within(kept, guessed, 0.1 + 0.1 * chance) and within(len(others), guessed, 0.1 * (1 - chance))
    assert min(others) >= FIRST and max(others) < SIZE
    middle = sum(token < (FIRST + SIZE) // 2 for token in others)
    assert within(middle, len(others), 0.5)  # from all over the vocabulary


def test_marks_and_fill_are_never_chosen_even_if_everything_else_is() -> None:
    batch = text_batch([[10, 11, 12], [13], [14, 15]], size=20)
    places = (batch.labels != BOS) & (batch.labels != EOS) & batch.inputs.layout.is_token
    found = gaps(0.999999).mask(batch, generator(1))
    assert torch.equal(found.loss_mask, places)
    assert torch.equal(found.source.ids[~places], batch.labels[~places])


def test_at_least_one_word_of_a_batch_is_guessed() -> None:
    for seed in range(50):
        found = gaps(1e-9).mask(text_batch([[10, 11], [12]], size=9), generator(seed))
        assert found.num_targets == 1 and found.labels[found.loss_mask].item() in (10, 11, 12)


def test_the_same_position_always_has_the_same_gaps_and_others_have_others() -> None:
    one, again, other = (list(islice(masked(seed).batches(), 30)) for seed in (1, 1, 2))
    assert all(same(a, b) and p == q for (a, p), (b, q) in zip(one, again, strict=True))
    where = [batch.loss_mask for batch, _ in one]
    assert not any(torch.equal(a, b) for a, b in pairwise(where))  # type: ignore[arg-type]
    assert not any(torch.equal(a, b.loss_mask) for a, (b, _) in zip(where, other, strict=True))  # type: ignore[arg-type]


def test_a_stream_taken_up_anywhere_goes_on_as_if_it_had_never_stopped() -> None:
    whole = list(islice(masked().batches(), 45))
    assert whole[-1][1].epoch >= 1  # past the end of an epoch
    for stop in (1, 7, 20, 40):
        rest = islice(masked().batches(whole[stop - 1][1]), 45 - stop)
        assert all(same(a, b) and p == q for (a, p), (b, q) in zip(whole[stop:], rest, strict=True))
    for step in (0, 3, 44):
        assert same(masked().batch_at(step), whole[step][0])


def test_a_text_has_other_gaps_in_the_next_epoch() -> None:
    def seen(epoch: int) -> dict[tuple[int, ...], tuple[bool, ...]]:
        found = {}
        for batch, position in masked(share=0.5).batches(StreamPosition(epoch, 0)):
            if position.epoch != epoch:
                return found
            rows = batch.inputs.layout
            for text, where in zip(rows.split(batch.labels), rows.split(batch.loss_mask), strict=True):
                found[tuple(text.tolist())] = tuple(where.tolist())
        raise AssertionError

    first, second = seen(0), seen(1)
    assert first.keys() == second.keys()
    long = [text for text in first if len(text) > 10]
    assert sum(first[text] == second[text] for text in long) <= len(long) // 20


@pytest.mark.parametrize("static", [True, False])
def test_the_text_itself_is_the_packers(static: bool) -> None:
    plain = packer(static=static)
    for (gappy, _), (batch, _) in zip(
        MaskedBatches(plain, 1, gaps(0.15)).batches(), islice(plain.batches(), 5), strict=False
    ):
        assert torch.equal(gappy.labels, batch.labels) and gappy.inputs.layout.size == batch.inputs.layout.size
