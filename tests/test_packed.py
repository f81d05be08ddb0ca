"""Packed batches: concatenated sentences, and conversion to the padded view and back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.attention import StaticPackedLayout
from regard.packed import PackedLayout, PackedTokens, SeqBatch

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)


def test_two_sentences_and_padding_by_hand() -> None:
    layout = PackedLayout([2, 3], size=7)  # a a b b b _ _
    assert layout.lengths == (2, 3)
    assert (len(layout), layout.tokens, layout.size, layout.max_len) == (2, 5, 7, 3)
    assert layout.length.tolist() == [2, 3]
    assert layout.offsets.tolist() == [0, 2, 5]
    assert layout.segment_ids.tolist() == [0, 0, 1, 1, 1, 2, 2]  # padding has segment id N
    assert layout.position.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert layout.is_token.tolist() == [True] * 5 + [False] * 2
    assert layout.padded_is_token.tolist() == [[True, True, False], [True, True, True]]


def test_the_padded_view_by_hand() -> None:
    layout = PackedLayout([2, 3], size=7)
    flat = torch.arange(1, 8)
    assert layout.pad(flat).tolist() == [[1, 2, 0], [3, 4, 5]]
    assert layout.flatten(torch.tensor([[1, 2, 9], [3, 4, 5]])).tolist() == [1, 2, 3, 4, 5, 0, 0]
    assert [part.tolist() for part in layout.split(flat)] == [[1, 2], [3, 4, 5]]


def test_an_empty_sentence_is_all_padding_in_the_padded_view() -> None:
    layout = PackedLayout([1, 0, 2])
    assert layout.segment_ids.tolist() == [0, 2, 2]
    assert layout.position.tolist() == [0, 0, 1]
    assert layout.pad(torch.tensor([5, 6, 7])).tolist() == [[5, 0], [0, 0], [6, 7]]


@pytest.mark.parametrize(("lengths", "equal"), [([3, 3], True), ([4], True), ([3, 2], False), ([0, 1], False)])
def test_equal_lengths_need_no_padding(lengths: list[int], equal: bool) -> None:
    assert PackedLayout(lengths).equal_lengths is equal


def test_equal_lengths_are_padded_without_a_copy() -> None:
    flat = torch.arange(8.0)
    padded = PackedLayout([3, 3], size=8).pad(flat)
    assert padded.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert padded.data_ptr() == flat.data_ptr()


def test_too_many_tokens_for_the_batch() -> None:
    with pytest.raises(ValueError, match="5 tokens do not fit a batch of 4"):
        PackedLayout([2, 3], size=4)


@given(LENGTHS, st.integers(0, 5), st.sampled_from([(), (1,), (2, 3)]))
def test_flat_to_padded_and_back(lengths: list[int], padding_len: int, features: tuple[int, ...]) -> None:
    layout = PackedLayout(lengths, sum(lengths) + padding_len)
    flat = torch.rand(layout.size, *features) + 1
    padded = layout.pad(flat)
    assert padded.shape == (len(lengths), max(lengths), *features)
    for n, sentence in enumerate(layout.split(flat)):
        assert torch.equal(padded[n, : lengths[n]], sentence)
        assert not padded[n, lengths[n] :].any()
    back = layout.flatten(padded)
    assert torch.equal(back[: layout.tokens], flat[: layout.tokens])
    assert back.shape == flat.shape and not back[layout.tokens :].any()


@given(LENGTHS, st.integers(0, 5))
def test_positions_and_segment_ids_of_every_token(lengths: list[int], padding_len: int) -> None:
    layout = PackedLayout(lengths, sum(lengths) + padding_len)
    segments = [n for n, length in enumerate(lengths) for _ in range(length)]
    positions = [position for length in lengths for position in range(length)]
    assert layout.segment_ids.tolist() == segments + [len(lengths)] * padding_len
    assert layout.position.tolist() == positions + [0] * padding_len
    assert layout.is_token.tolist() == [True] * len(positions) + [False] * padding_len


@given(LENGTHS, st.integers(1, 5))
def test_values_of_padding_never_cross_to_the_other_view(lengths: list[int], padding_len: int) -> None:
    layout = PackedLayout(lengths, sum(lengths) + padding_len)
    flat = torch.rand(layout.size, 2)
    flat[layout.tokens :] = math.nan
    assert layout.pad(flat).isfinite().all()
    padded = torch.rand(len(lengths), max(lengths), 2)
    padded[~layout.padded_is_token] = math.nan
    assert layout.flatten(padded).isfinite().all()


def test_gradients_of_padding_are_zero() -> None:
    layout = PackedLayout([1, 2], size=5)
    flat = torch.rand(5, requires_grad=True)
    layout.pad(flat).sum().backward()
    assert flat.grad is not None and flat.grad.tolist() == [1, 1, 1, 0, 0]
    padded = torch.rand(2, 2, requires_grad=True)
    layout.flatten(padded).sum().backward()
    assert padded.grad is not None and padded.grad.tolist() == [[1, 0], [1, 1]]


def test_moving_a_layout_keeps_its_contents() -> None:
    layout = PackedLayout([2, 1], size=4)
    assert layout.to("cpu") is layout
    on_meta = layout.to("meta")
    assert (on_meta.lengths, on_meta.size, on_meta.device.type) == ((2, 1), 4, "meta")


def test_packed_tokens_are_concatenated_and_padded() -> None:
    packed = PackedTokens.from_lists([[5, 6], [7]], size=5, pad_id=9)
    assert packed.ids.tolist() == [5, 6, 7, 9, 9]
    assert packed.layout.lengths == (2, 1)
    assert PackedTokens.from_lists([[5, 6], [7]]).ids.tolist() == [5, 6, 7]


def test_a_pair_batch_shifts_the_target_right_inside_each_sentence() -> None:
    eos, bos = 2, 1
    batch = SeqBatch.from_lists([[5, eos], [6, 7, eos]], [[8, 9, eos], [eos]], bos=bos, source_size=6, target_size=5)
    assert batch.source.ids.tolist() == [5, eos, 6, 7, eos, 0]
    assert batch.inputs.ids.tolist() == [bos, 8, 9, bos, 0]
    assert batch.labels.tolist() == [8, 9, eos, eos, 0]
    assert batch.inputs.layout.lengths == (3, 1)
    assert batch.num_targets == 4


@given(LENGTHS, st.integers(0, 3))
def test_gradients_of_pad_and_flatten_equal_those_of_indexing(lengths: list[int], padding_size: int) -> None:
    """The reference indexes a table with a row of zeros at its end, which autograd differentiates."""
    layout = PackedLayout(lengths, sum(lengths) + padding_size)
    flat = torch.randn(layout.size, 2, requires_grad=True)
    index = [[start + i if i < n else layout.size for i in range(layout.max_len)] for start, n in _spans(lengths)]
    table = torch.cat([flat, torch.zeros(1, 2)])
    reference = table[torch.tensor(index, dtype=torch.long).reshape(len(lengths), layout.max_len)]
    assert torch.equal(layout.pad(flat), reference)
    grad_out = torch.randn_like(reference)
    (expected,) = torch.autograd.grad(reference, flat, grad_out, retain_graph=True)
    (actual,) = torch.autograd.grad(layout.pad(flat), flat, grad_out)
    assert torch.equal(actual, expected)

    padded = torch.randn_like(reference).requires_grad_()
    tokens = torch.cat([padded[i, :n] for i, n in enumerate(lengths)] + [torch.zeros(padding_size, 2)])
    assert torch.equal(layout.flatten(padded), tokens)
    grad_out = torch.randn_like(tokens)
    if tokens.requires_grad:
        (expected,) = torch.autograd.grad(tokens, padded, grad_out)
        (actual,) = torch.autograd.grad(layout.flatten(padded), padded, grad_out)
        assert torch.equal(actual, expected)


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    return [(sum(lengths[:i]), n) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_mean_over_many_tokens_is_exact_up_to_its_final_rounding(dtype: torch.dtype) -> None:
    """Accumulated in bf16, token by token, the sum would lose most of its digits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout, x = PackedLayout([700, 3], device=device), torch.rand(703, 4, device=device).to(dtype)
    expected = torch.stack([part.double().mean(0) for part in x.split([700, 3])])
    actual = layout.mean(x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=0, rtol=torch.finfo(dtype).eps)


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
    """Compared with conv1d on each sentence; also with static shapes."""
    lengths, (size, most, longest) = [7, 5, 1, 9, 4], (31, 8, 11)
    torch.manual_seed(0)
    x, weight = torch.randn(size, 3, dtype=torch.float64), torch.randn(2, 3, kernel, dtype=torch.float64)
    layout = PackedLayout(lengths, size, bounds=(most, longest))
    expected = []
    for sentence in layout.split(x):
        fits = len(sentence) + 2 * padding >= kernel  # torch refuses a sentence shorter than the kernel
        conv = (
            torch.nn.functional.conv1d(sentence.T[None], weight, stride=stride, padding=padding)[0].T
            if fits
            else x[:0, :2]
        )
        expected.append(conv)
    offsets = torch.tensor([0, *lengths, 0, 0, 0]).cumsum(0)
    for variant in (layout, StaticPackedLayout(offsets, size, longest)):
        new = variant.convolved(kernel, stride, padding)
        assert new.length.tolist()[: len(lengths)] == list(map(len, expected)) and not new.length[len(lengths) :].any()
        assert new.max_len >= max(map(len, expected)) and new.bounds == (
            most,
            (longest + 2 * padding - kernel) // stride + 1,
        )
        actual = convolve(x, variant, weight, stride, padding)
        assert len(actual) == new.size
        torch.testing.assert_close(actual[new.is_token], torch.cat(expected))


def test_static_layouts_after_a_convolution_fit_the_worst_case() -> None:
    """20 tokens: sentences of 1 token keep one each, of 3 tokens two each; 10 sentences keep at most 15."""
    for lengths in ([1] * 10, [3] * 5 + [1] * 5, [2] * 10, [20]):
        new = StaticPackedLayout(torch.tensor([0, *lengths] + [0] * (10 - len(lengths))).cumsum(0), 20, 20).convolved(
            3, 2, 1
        )
        assert int(new.offsets[-1]) == sum((n + 1) // 2 for n in lengths) <= new.size == 15
