"""Masking for masked language models: its rates, its exclusions, and that it survives resuming."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from regard.data.masking import MaskedBatches, MaskingPolicy
from regard.data.packing import Packer
from regard.data.stream import StreamPosition, generator
from regard.data.token_store import TokenStore
from regard.packed import SeqBatch
from regard.text import BOS, EOS

MASK, FIRST, SIZE = 4, 5, 1000  # ids of the mask and of the first ordinary token; vocabulary size


def policy(share: float) -> MaskingPolicy:
    return MaskingPolicy(share, mask_id=MASK, first_id=FIRST, vocabulary=SIZE)


def text_batch(texts: list[list[int]], size: int | None = None) -> SeqBatch:
    """Return texts as they are stored, [BOS, words, EOS], without sources."""
    return SeqBatch.from_lists([[] for _ in texts], [[BOS, *words, EOS] for words in texts], bos=BOS, target_size=size)


def packer(seed: int = 1, static: bool = True) -> Packer:
    draw = np.random.default_rng(0)
    texts = [[BOS, *draw.integers(FIRST, SIZE, draw.integers(1, 20)).tolist(), EOS] for _ in range(150)]
    return Packer(
        [TokenStore.of([[] for _ in texts], texts)], [1.0], target_budget=100, source_budget=1, seed=seed, static=static
    )


def masked(seed: int = 1, share: float = 0.15) -> MaskedBatches:
    return MaskedBatches(packer(), seed, policy(share))


def same(one: SeqBatch, other: SeqBatch) -> bool:
    pairs = [(one.source.ids, other.source.ids), (one.labels, other.labels), (one.loss_mask, other.loss_mask)]
    return all(torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]


def within(count: int, of: int, share: float) -> bool:
    """Return whether a count is within 5 standard deviations of its expectation."""
    return abs(count - of * share) < 5 * math.sqrt(of * share * (1 - share))


def test_inputs_and_labels_have_the_same_layout() -> None:
    batch = text_batch([[10, 11, 12], [13, 14]], size=12)
    result = policy(0.5).mask(batch, generator(1))
    assert result.source is result.inputs and result.inputs.layout is batch.inputs.layout
    assert torch.equal(result.labels, batch.labels)
    assert result.loss_mask is not None and result.num_targets == int(result.loss_mask.sum()) >= 1
    unmasked = ~result.loss_mask
    assert torch.equal(result.source.ids[unmasked], batch.labels[unmasked])  # all other tokens are unchanged


def test_selected_tokens_are_masked_replaced_or_unchanged_at_80_10_10_percent() -> None:
    words = guessed = mask = unchanged = 0
    others: list[int] = []
    for seed in range(200):
        draw = np.random.default_rng(seed)
        batch = text_batch([draw.integers(FIRST, SIZE, 30).tolist() for _ in range(10)])
        result = policy(0.15).mask(batch, generator(seed))
        read, clean = result.source.ids[result.loss_mask], result.labels[result.loss_mask]
        words += 300
        guessed += len(read)
        mask += int((read == MASK).sum())
        unchanged += int((read == clean).sum())
        others += read[(read != MASK) & (read != clean)].tolist()
    assert within(guessed, words, 0.15)
    chance = 1 / (SIZE - FIRST)  # that a random token is the right one
    assert within(mask, guessed, 0.8)
    assert within(unchanged, guessed, 0.1 + 0.1 * chance) and within(len(others), guessed, 0.1 * (1 - chance))
    assert min(others) >= FIRST and max(others) < SIZE
    middle = sum(token < (FIRST + SIZE) // 2 for token in others)
    assert within(middle, len(others), 0.5)  # from the whole vocabulary


def test_special_tokens_and_padding_are_never_selected() -> None:
    batch = text_batch([[10, 11, 12], [13], [14, 15]], size=20)
    maskable = (batch.labels != BOS) & (batch.labels != EOS) & batch.inputs.layout.is_token
    result = policy(0.999999).mask(batch, generator(1))
    assert torch.equal(result.loss_mask, maskable)
    assert torch.equal(result.source.ids[~maskable], batch.labels[~maskable])


def test_at_least_one_token_of_a_batch_is_selected() -> None:
    for seed in range(50):
        result = policy(1e-9).mask(text_batch([[10, 11], [12]], size=9), generator(seed))
        assert result.num_targets == 1 and result.labels[result.loss_mask].item() in (10, 11, 12)


def test_masks_depend_on_the_seed_and_the_stream_position() -> None:
    one, again, other = (list(islice(masked(seed).batches(), 30)) for seed in (1, 1, 2))
    assert all(same(a, b) and p == q for (a, p), (b, q) in zip(one, again, strict=True))
    where = [batch.loss_mask for batch, _ in one]
    assert not any(torch.equal(a, b) for a, b in pairwise(where))  # type: ignore[arg-type]
    assert not any(torch.equal(a, b.loss_mask) for a, (b, _) in zip(where, other, strict=True))  # type: ignore[arg-type]


def test_a_resumed_stream_equals_an_uninterrupted_one() -> None:
    uninterrupted = list(islice(masked().batches(), 45))
    assert uninterrupted[-1][1].epoch >= 1  # past the end of an epoch
    for stop in (1, 7, 20, 40):
        rest = islice(masked().batches(uninterrupted[stop - 1][1]), 45 - stop)
        assert all(same(a, b) and p == q for (a, p), (b, q) in zip(uninterrupted[stop:], rest, strict=True))
    for step in (0, 3, 44):
        assert same(masked().batch_at(step), uninterrupted[step][0])


def test_a_text_is_masked_differently_in_the_next_epoch() -> None:
    def masks_by_text(epoch: int) -> dict[tuple[int, ...], tuple[bool, ...]]:
        result = {}
        for batch, position in masked(share=0.5).batches(StreamPosition(epoch, 0)):
            if position.epoch != epoch:
                return result
            layout = batch.inputs.layout
            for text, where in zip(layout.split(batch.labels), layout.split(batch.loss_mask), strict=True):
                result[tuple(text.tolist())] = tuple(where.tolist())
        raise AssertionError

    first, second = masks_by_text(0), masks_by_text(1)
    assert first.keys() == second.keys()
    long = [text for text in first if len(text) > 10]
    assert sum(first[text] == second[text] for text in long) <= len(long) // 20


@pytest.mark.parametrize("static", [True, False])
def test_labels_and_sizes_are_those_of_the_packer(static: bool) -> None:
    plain = packer(static=static)
    for (masked_batch, _), (batch, _) in zip(
        MaskedBatches(plain, 1, policy(0.15)).batches(), islice(plain.batches(), 5), strict=False
    ):
        assert (
            torch.equal(masked_batch.labels, batch.labels)
            and masked_batch.inputs.layout.size == batch.inputs.layout.size
        )
