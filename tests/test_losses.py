"""The loss from logits and the loss straight from what the logits are made of are one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.nn.losses import CHUNK_BYTES, CHUNK_STEP, cross_entropy, even_chunk, linear_cross_entropy, r_drop_loss


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 23), st.integers(2, 17), st.integers(1, 30), st.booleans(), st.sampled_from([0.0, 0.1, 0.4]))
def test_chunk_by_chunk_equals_all_at_once(places: int, words: int, chunk: int, biased: bool, smoothing: float) -> None:
    torch.manual_seed(places * words)
    x, table = torch.randn(places, 6, requires_grad=True), torch.randn(words, 6, requires_grad=True)
    bias = torch.randn(words, requires_grad=True) if biased else None
    labels, counted = torch.randint(0, words, (places,)), torch.rand(places) < 0.8
    given_to = [x, table, *([bias] if bias is not None else [])]
    whole = cross_entropy(torch.nn.functional.linear(x, table, bias), labels, counted, smoothing)
    parts = linear_cross_entropy(x, table, bias, labels, counted, smoothing, chunk=chunk)
    torch.testing.assert_close(parts, whole)
    upstream = torch.tensor(0.37)  # a mean over tokens, say
    expected, found = (torch.autograd.grad(loss, given_to, upstream) for loss in (whole, parts))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_two_readings_that_differ_are_pulled_together() -> None:
    """p = (0.8, 0.2) and q = (0.5, 0.5) of a label that is the first word, and a place that does not count."""
    one, other = torch.tensor([[0.8, 0.2], [0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log()
    found = r_drop_loss(one, other, torch.tensor([0, 0]), torch.tensor([True, False]), 0.0, 8.0)
    # (ln 1/0.8 + ln 1/0.5) / 2, and 8 / 4 times 0.3 ln(0.8 / 0.5) - 0.3 ln(0.2 / 0.5) = 0.3 ln 4
    assert found.item() == pytest.approx(math.log(2.5) / 2 + 2 * 0.3 * math.log(4), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 23), st.integers(2, 17), st.integers(1, 30), st.booleans(), st.sampled_from([0.0, 0.1]))
def test_two_readings_chunk_by_chunk(places: int, words: int, chunk: int, biased: bool, smoothing: float) -> None:
    """Our gradients are those that autograd finds for the definition."""
    torch.manual_seed(places * words)
    x, table = torch.randn(2, places, 6, requires_grad=True), torch.randn(words, 6, requires_grad=True)
    bias = torch.randn(words, requires_grad=True) if biased else None
    labels, counted = torch.randint(0, words, (places,)), torch.rand(places) < 0.8
    given_to = [x, table, *([bias] if bias is not None else [])]
    whole = r_drop_loss(*torch.nn.functional.linear(x, table, bias), labels, counted, smoothing, 3.0)
    parts = linear_cross_entropy(x, table, bias, labels, counted, smoothing, 3.0, chunk)
    torch.testing.assert_close(parts, whole)
    expected, found = (torch.autograd.grad(loss, given_to, torch.tensor(0.37)) for loss in (whole, parts))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_without_gradients_none_are_worked_out() -> None:
    x, table = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    labels, counted = torch.randint(0, 7, (5,)), torch.ones(5, dtype=torch.bool)
    with torch.no_grad():
        loss = linear_cross_entropy(x, table, None, labels, counted)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, cross_entropy(x.detach() @ table.detach().T, labels, counted))


def test_under_autocast_products_are_in_half_precision_and_the_sum_is_not() -> None:
    torch.manual_seed(0)
    x, table = torch.randn(64, 16, requires_grad=True), torch.randn(99, 16, requires_grad=True)
    labels, counted = torch.randint(0, 99, (64,)), torch.ones(64, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, table, None, labels, counted, 0.1)
    coarse = (x.detach().bfloat16() @ table.detach().bfloat16().T).double()
    expected = torch.nn.functional.cross_entropy(coarse, labels, label_smoothing=0.1, reduction="sum")
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    assert x.grad is not None and table.grad is not None
    assert x.grad.dtype == table.grad.dtype == torch.float32


@pytest.mark.parametrize("places", [1, 255, 8192, 32768, 100_000])
@pytest.mark.parametrize("words", [50, 37_000, 250_000])
def test_chunks_hold_no_more_than_they_may_and_waste_little(places: int, words: int) -> None:
    chunk = even_chunk(places, 4 * words)
    assert chunk % CHUNK_STEP == 0 and (chunk == CHUNK_STEP or (chunk - CHUNK_STEP) * 4 * words <= CHUNK_BYTES)
    fewest = -(-places * 4 * words // CHUNK_BYTES)
    assert -(-places // chunk) <= fewest
