"""Dropout: rates, independence and reproducibility of its random bits."""

from __future__ import annotations

import pytest
import torch

from regard.dropout import LEVELS, dropout, hash_mask, random_mask

SHAPE = torch.Size((2000, 256))


def seeds(number: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(number)
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, generator=random)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_the_dropped_share_is_the_dropout_rate(rate: float) -> None:
    """Within five standard deviations, over all values, per feature and per token."""
    dropped = 1 - hash_mask(SHAPE, rate, seeds(1)).float()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(dropped.mean().item() - rate) < 5 * deviation / SHAPE.numel() ** 0.5
    assert (dropped.mean(0) - rate).abs().max().item() < 5 * deviation / SHAPE[0] ** 0.5
    assert (dropped.mean(1) - rate).abs().max().item() < 5.5 * deviation / SHAPE[1] ** 0.5


def test_neighbours_and_calls_are_uncorrelated() -> None:
    """Correlations of half a million independent bits are below 5 / sqrt(n)."""
    calls = torch.stack([hash_mask(SHAPE, 0.3, seeds(n)).float().flatten() for n in range(4)])
    limit = 5 / SHAPE.numel() ** 0.5
    assert torch.corrcoef(calls).fill_diagonal_(0).abs().max().item() < limit
    for by in (1, 2, 4, 256, 512, 4096):
        assert abs(torch.corrcoef(torch.stack([calls[0][by:], calls[0][:-by]]))[0, 1].item()) < limit


def test_the_bits_are_those_of_murmur3s_mixer() -> None:
    """The expected bits are computed with Python integers."""

    def mixed(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) % 2**32
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) % 2**32
        return h ^ (h >> 16)

    first, second = (int(seed) % 2**32 for seed in seeds(3))
    bits = [mixed(mixed(index ^ first) ^ second) for index in range(50)]
    signed = [h - 2**32 if h >= 2**31 else h for h in bits]
    expected = [h >= round(0.3 * 2**32) - 2**31 for h in signed]
    assert hash_mask(torch.Size((50,)), 0.3, seeds(3)).tolist() == expected


def test_on_a_cpu_the_mask_depends_on_the_seed_and_the_mean_is_kept() -> None:
    torch.manual_seed(1)
    out = dropout(torch.ones(400_001), 0.3, True)  # not a multiple of four
    deviation = (0.3 * 0.7 / 400_001) ** 0.5
    assert abs((out == 0).double().mean().item() - 0.3) < 5 * deviation
    assert torch.allclose(out[out != 0], torch.tensor(1 / 0.7), rtol=1e-4)
    torch.manual_seed(1)
    assert torch.equal(out, dropout(torch.ones(400_001), 0.3, True))


def test_the_four_numbers_of_a_draw_are_dropped_independently() -> None:
    torch.manual_seed(1)
    kept = random_mask(torch.Size((400_000,)), LEVELS // 2)  # a half: correlations are largest
    lanes = (~kept).double().view(-1, 4).T
    assert torch.allclose(lanes.mean(1), torch.tensor(0.5, dtype=torch.double), atol=0.01)
    assert (torch.corrcoef(lanes) - torch.eye(4)).abs().max() < 0.02


def test_on_a_cpu_gradients_use_the_same_mask() -> None:
    x, up = torch.randn(7, 3, requires_grad=True), torch.randn(7, 3)
    torch.manual_seed(2)
    out = dropout(x, 0.4, True)
    out.backward(up)
    torch.manual_seed(2)
    factor = dropout(torch.ones(7, 3), 0.4, True)
    assert torch.equal(out, x * factor)
    assert x.grad is not None and torch.allclose(x.grad, up * factor)


def test_nothing_is_dropped_outside_training() -> None:
    x = torch.randn(50)
    assert dropout(x, 0.2, False) is x and dropout(x, 0.0, True) is x


def test_compiled_dropout_scales_values_and_gradients() -> None:
    x = torch.randn(300, 40, requires_grad=True)
    out = torch.compile(lambda x: dropout(x, 0.25, True), backend="aot_eager", fullgraph=True)(x)
    out.sum().backward()
    assert x.grad is not None
    zero = out == 0
    assert 0.2 < zero.float().mean().item() < 0.3
    torch.testing.assert_close(out[~zero], x[~zero] / 0.75)
    torch.testing.assert_close(x.grad, torch.where(zero, 0.0, 1 / 0.75))
