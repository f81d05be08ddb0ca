"""The fused loss of the output projection equals the loss from logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.nn.linear_cross_entropy import CHUNK_BYTES, CHUNK_STEP, even_chunk, linear_cross_entropy
from regard.nn.losses import cross_entropy
from regard.nn.r_drop import r_drop_loss


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 23), st.integers(2, 17), st.integers(1, 30), st.booleans(), st.sampled_from([0.0, 0.1, 0.4]))
def test_chunk_by_chunk_equals_all_at_once(
    tokens: int, vocabulary: int, chunk: int, biased: bool, smoothing: float
) -> None:
    torch.manual_seed(tokens * vocabulary)
    x, table = torch.randn(tokens, 6, requires_grad=True), torch.randn(vocabulary, 6, requires_grad=True)
    bias = torch.randn(vocabulary, requires_grad=True) if biased else None
    labels, loss_mask = torch.randint(0, vocabulary, (tokens,)), torch.rand(tokens) < 0.8
    params = [x, table, *([bias] if bias is not None else [])]
    reference = cross_entropy(torch.nn.functional.linear(x, table, bias), labels, loss_mask, smoothing)
    chunked = linear_cross_entropy(x, table, bias, labels, loss_mask, smoothing, chunk=chunk)
    torch.testing.assert_close(chunked, reference)
    upstream = torch.tensor(0.37)  # a mean over tokens, say
    expected, actual = (torch.autograd.grad(loss, params, upstream) for loss in (reference, chunked))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_r_drop_by_hand() -> None:
    """p = (0.8, 0.2) and q = (0.5, 0.5), with the first token as label, and a masked token."""
    one, other = torch.tensor([[0.8, 0.2], [0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log()
    actual = r_drop_loss(one, other, torch.tensor([0, 0]), torch.tensor([True, False]), 0.0, 8.0)
    # (ln 1/0.8 + ln 1/0.5) / 2, and 8 / 4 times 0.3 ln(0.8 / 0.5) - 0.3 ln(0.2 / 0.5) = 0.3 ln 4
    assert actual.item() == pytest.approx(math.log(2.5) / 2 + 2 * 0.3 * math.log(4), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 23), st.integers(2, 17), st.integers(1, 30), st.booleans(), st.sampled_from([0.0, 0.1]))
def test_r_drop_in_chunks_equals_the_definition(
    tokens: int, vocabulary: int, chunk: int, biased: bool, smoothing: float
) -> None:
    """Gradients are compared with those of autograd."""
    torch.manual_seed(tokens * vocabulary)
    x, table = torch.randn(2, tokens, 6, requires_grad=True), torch.randn(vocabulary, 6, requires_grad=True)
    bias = torch.randn(vocabulary, requires_grad=True) if biased else None
    labels, loss_mask = torch.randint(0, vocabulary, (tokens,)), torch.rand(tokens) < 0.8
    params = [x, table, *([bias] if bias is not None else [])]
    reference = r_drop_loss(*torch.nn.functional.linear(x, table, bias), labels, loss_mask, smoothing, 3.0)
    chunked = linear_cross_entropy(x, table, bias, labels, loss_mask, smoothing, 3.0, chunk)
    torch.testing.assert_close(chunked, reference)
    expected, actual = (torch.autograd.grad(loss, params, torch.tensor(0.37)) for loss in (reference, chunked))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_no_gradients_are_computed_under_no_grad() -> None:
    x, table = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    labels, loss_mask = torch.randint(0, 7, (5,)), torch.ones(5, dtype=torch.bool)
    with torch.no_grad():
        loss = linear_cross_entropy(x, table, None, labels, loss_mask)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, cross_entropy(x.detach() @ table.detach().T, labels, loss_mask))


def test_under_autocast_matmuls_are_in_bf16_and_the_sum_is_not() -> None:
    torch.manual_seed(0)
    x, table = torch.randn(64, 16, requires_grad=True), torch.randn(99, 16, requires_grad=True)
    labels, loss_mask = torch.randint(0, 99, (64,)), torch.ones(64, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, table, None, labels, loss_mask, 0.1)
    coarse = (x.detach().bfloat16() @ table.detach().bfloat16().T).double()
    expected = torch.nn.functional.cross_entropy(coarse, labels, label_smoothing=0.1, reduction="sum")
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    assert x.grad is not None and table.grad is not None
    assert x.grad.dtype == table.grad.dtype == torch.float32


@pytest.mark.parametrize("tokens", [1, 255, 8192, 32768, 100_000])
@pytest.mark.parametrize("vocabulary", [50, 37_000, 250_000])
def test_chunks_respect_the_size_limit_and_are_as_few_as_possible(tokens: int, vocabulary: int) -> None:
    chunk = even_chunk(tokens, 4 * vocabulary)
    assert chunk % CHUNK_STEP == 0 and (chunk == CHUNK_STEP or (chunk - CHUNK_STEP) * 4 * vocabulary <= CHUNK_BYTES)
    fewest = -(-tokens * 4 * vocabulary // CHUNK_BYTES)
    assert -(-tokens // chunk) <= fewest
