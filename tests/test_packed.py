"""Flat rows: sentences end to end, and the way to the padded view and back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.packed import PackedLayout, PackedTokens, SeqBatch, StaticPackedLayout

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)


def test_two_sentences_and_fill_by_hand() -> None:
    rows = PackedLayout([2, 3], size=7)  # a a b b b _ _
    assert rows.lengths == (2, 3)
    assert (len(rows), rows.tokens, rows.size, rows.max_len) == (2, 5, 7, 3)
    assert rows.length.tolist() == [2, 3]
    assert rows.offsets.tolist() == [0, 2, 5]
    assert rows.segment_ids.tolist() == [0, 0, 1, 1, 1, 2, 2]  # fill belongs to sentence N
    assert rows.position.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert rows.is_token.tolist() == [True] * 5 + [False] * 2
    assert rows.padded_is_token.tolist() == [[True, True, False], [True, True, True]]


def test_the_padded_view_by_hand() -> None:
    rows = PackedLayout([2, 3], size=7)
    flat = torch.arange(1, 8)
    assert rows.pad(flat).tolist() == [[1, 2, 0], [3, 4, 5]]
    assert rows.flatten(torch.tensor([[1, 2, 9], [3, 4, 5]])).tolist() == [1, 2, 3, 4, 5, 0, 0]
    assert [part.tolist() for part in rows.split(flat)] == [[1, 2], [3, 4, 5]]


def test_a_sentence_without_tokens_has_a_row_of_padding() -> None:
    rows = PackedLayout([1, 0, 2])
    assert rows.segment_ids.tolist() == [0, 2, 2]
    assert rows.position.tolist() == [0, 0, 1]
    assert rows.pad(torch.tensor([5, 6, 7])).tolist() == [[5, 0], [0, 0], [6, 7]]


@pytest.mark.parametrize(("lengths", "even"), [([3, 3], True), ([4], True), ([3, 2], False), ([0, 1], False)])
def test_even_rows_have_no_padding(lengths: list[int], even: bool) -> None:
    assert PackedLayout(lengths).equal_lengths is even


def test_even_rows_are_padded_without_a_copy() -> None:
    flat = torch.arange(8.0)
    padded = PackedLayout([3, 3], size=8).pad(flat)
    assert padded.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert padded.data_ptr() == flat.data_ptr()


def test_too_many_tokens_for_the_row() -> None:
    with pytest.raises(ValueError, match="5 tokens do not fit a batch of 4"):
        PackedLayout([2, 3], size=4)


@given(LENGTHS, st.integers(0, 5), st.sampled_from([(), (1,), (2, 3)]))
def test_flat_to_padded_and_back(lengths: list[int], spare: int, features: tuple[int, ...]) -> None:
    rows = PackedLayout(lengths, sum(lengths) + spare)
    flat = torch.rand(rows.size, *features) + 1
    padded = rows.pad(flat)
    assert padded.shape == (len(lengths), max(lengths), *features)
    for n, sentence in enumerate(rows.split(flat)):
        assert torch.equal(padded[n, : lengths[n]], sentence)
        assert not padded[n, lengths[n] :].any()
    back = rows.flatten(padded)
    assert torch.equal(back[: rows.tokens], flat[: rows.tokens])
    assert back.shape == flat.shape and not back[rows.tokens :].any()


@given(LENGTHS, st.integers(0, 5))
def test_places_and_sentences_are_counted_out(lengths: list[int], spare: int) -> None:
    rows = PackedLayout(lengths, sum(lengths) + spare)
    owners = [n for n, length in enumerate(lengths) for _ in range(length)]
    places = [place for length in lengths for place in range(length)]
    assert rows.segment_ids.tolist() == owners + [len(lengths)] * spare
    assert rows.position.tolist() == places + [0] * spare
    assert rows.is_token.tolist() == [True] * len(places) + [False] * spare


@given(LENGTHS, st.integers(1, 5))
def test_fill_never_reaches_the_padded_view_nor_padding_the_flat_one(lengths: list[int], spare: int) -> None:
    rows = PackedLayout(lengths, sum(lengths) + spare)
    flat = torch.rand(rows.size, 2)
    flat[rows.tokens :] = math.nan
    assert rows.pad(flat).isfinite().all()
    padded = torch.rand(len(lengths), max(lengths), 2)
    padded[~rows.padded_is_token] = math.nan
    assert rows.flatten(padded).isfinite().all()


def test_gradients_of_fill_and_padding_are_zero() -> None:
    rows = PackedLayout([1, 2], size=5)
    flat = torch.rand(5, requires_grad=True)
    rows.pad(flat).sum().backward()
    assert flat.grad is not None and flat.grad.tolist() == [1, 1, 1, 0, 0]
    padded = torch.rand(2, 2, requires_grad=True)
    rows.flatten(padded).sum().backward()
    assert padded.grad is not None and padded.grad.tolist() == [[1, 0], [1, 1]]


def test_moving_rows_keeps_what_they_say() -> None:
    rows = PackedLayout([2, 1], size=4)
    assert rows.to("cpu") is rows
    moved = rows.to("meta")
    assert (moved.lengths, moved.size, moved.device.type) == ((2, 1), 4, "meta")


def test_a_token_row_is_laid_end_to_end_and_filled() -> None:
    row = PackedTokens.from_lists([[5, 6], [7]], size=5, pad_id=9)
    assert row.ids.tolist() == [5, 6, 7, 9, 9]
    assert row.layout.lengths == (2, 1)
    assert PackedTokens.from_lists([[5, 6], [7]]).ids.tolist() == [5, 6, 7]


def test_a_pair_batch_shifts_the_target_right_inside_each_sentence() -> None:
    end, begin = 2, 1
    batch = SeqBatch.from_lists([[5, end], [6, 7, end]], [[8, 9, end], [end]], bos=begin, source_size=6, target_size=5)
    assert batch.source.ids.tolist() == [5, end, 6, 7, end, 0]
    assert batch.inputs.ids.tolist() == [begin, 8, 9, begin, 0]
    assert batch.labels.tolist() == [8, 9, end, end, 0]
    assert batch.inputs.layout.lengths == (3, 1)
    assert batch.num_targets == 4


@given(LENGTHS, st.integers(0, 3))
def test_gradients_move_back_the_way_the_tokens_came(lengths: list[int], fill: int) -> None:
    """Held against indexing into a table with a row of zeros at its end, which PyTorch differentiates by itself."""
    rows = PackedLayout(lengths, sum(lengths) + fill)
    flat = torch.randn(rows.size, 2, requires_grad=True)
    there = [[start + i if i < n else rows.size for i in range(rows.max_len)] for start, n in _spans(lengths)]
    table = torch.cat([flat, torch.zeros(1, 2)])
    plain = table[torch.tensor(there, dtype=torch.long).reshape(len(lengths), rows.max_len)]
    assert torch.equal(rows.pad(flat), plain)
    up = torch.randn_like(plain)
    (expected,) = torch.autograd.grad(plain, flat, up, retain_graph=True)
    (found,) = torch.autograd.grad(rows.pad(flat), flat, up)
    assert torch.equal(found, expected)

    padded = torch.randn_like(plain).requires_grad_()
    real = torch.cat([padded[i, :n] for i, n in enumerate(lengths)] + [torch.zeros(fill, 2)])
    assert torch.equal(rows.flatten(padded), real)
    up = torch.randn_like(real)
    if real.requires_grad:
        (expected,) = torch.autograd.grad(real, padded, up)
        (found,) = torch.autograd.grad(rows.flatten(padded), padded, up)
        assert torch.equal(found, expected)


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    return [(sum(lengths[:i]), n) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_mean_over_many_tokens_loses_no_more_than_its_own_rounding(dtype: torch.dtype) -> None:
    """On a GPU tokens are added one by one, and in bf16 each of them would be rounded away in part."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, x = PackedLayout([700, 3], device=device), torch.rand(703, 4, device=device).to(dtype)
    expected = torch.stack([part.double().mean(0) for part in x.split([700, 3])])
    found = rows.mean(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=torch.finfo(dtype).eps)


# -- layouts that change inside a model --------------------------------------------------------------------------------


def convolve(x: torch.Tensor, layout: PackedLayout, weight: torch.Tensor, stride: int, padding: int) -> torch.Tensor:
    """[T, C] -> [T', D]: a convolution along each sentence of a packed batch, with weight [D, C, K]."""
    new = layout.convolved(weight.shape[2], stride, padding)
    sentence = new.segment_ids.clamp(max=len(layout) - 1)
    within = new.position[:, None] * stride - padding + torch.arange(weight.shape[2])  # [T', K]
    inside = (within >= 0) & (within < layout.length[sentence][:, None]) & new.is_token[:, None]
    index = torch.where(inside, layout.offsets[sentence][:, None] + within, 0)
    windows = torch.where(inside[..., None], x[index], 0.0)  # [T', K, C]
    return torch.einsum("tkc,dck->td", windows, weight)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 2, 1), (3, 2, 0), (4, 4, 0), (1, 3, 0), (5, 1, 2), (3, 1, 2)]
)
def test_a_layout_after_a_convolution_is_that_of_each_sentence_by_itself(
    kernel: int, stride: int, padding: int
) -> None:
    """By torch's own convolution; also where shapes are static."""
    lengths, (size, most, longest) = [7, 5, 1, 9, 4], (31, 8, 11)
    torch.manual_seed(0)
    x, weight = torch.randn(size, 3, dtype=torch.float64), torch.randn(2, 3, kernel, dtype=torch.float64)
    layout = PackedLayout(lengths, size, bounds=(most, longest))
    expected = []
    for sentence in layout.split(x):
        room = len(sentence) + 2 * padding >= kernel  # torch refuses a sentence shorter than the kernel
        conv = (
            torch.nn.functional.conv1d(sentence.T[None], weight, stride=stride, padding=padding)[0].T
            if room
            else x[:0, :2]
        )
        expected.append(conv)
    offsets = torch.tensor([0, *lengths, 0, 0, 0]).cumsum(0)
    for own in (layout, StaticPackedLayout(offsets, size, longest)):
        new = own.convolved(kernel, stride, padding)
        assert new.length.tolist()[: len(lengths)] == list(map(len, expected)) and not new.length[len(lengths) :].any()
        assert new.max_len >= max(map(len, expected)) and new.bounds == (
            most,
            (longest + 2 * padding - kernel) // stride + 1,
        )
        found = convolve(x, own, weight, stride, padding)
        assert len(found) == new.size
        torch.testing.assert_close(found[new.is_token], torch.cat(expected))


def test_static_layouts_after_a_convolution_have_room_for_the_worst_case() -> None:
    """20 tokens: sentences of 1 token keep one each, of 3 tokens two each; 10 sentences keep at most 15."""
    for lengths in ([1] * 10, [3] * 5 + [1] * 5, [2] * 10, [20]):
        new = StaticPackedLayout(torch.tensor([0, *lengths] + [0] * (10 - len(lengths))).cumsum(0), 20, 20).convolved(
            3, 2, 1
        )
        assert int(new.offsets[-1]) == sum((n + 1) // 2 for n in lengths) <= new.size == 15
