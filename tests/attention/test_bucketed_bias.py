"""Biases by distance, as in T5: buckets by hand, and the same scores from positions in a KV cache."""

from __future__ import annotations

import math

import pytest
import torch

from regard.attention import BucketedBias, Causal, DistanceBuckets, PackedQK, attend
from regard.attention.scores import TokenPositions
from regard.packed import PackedLayout

HEADS, WIDTH = 3, 4


def score(buckets: DistanceBuckets) -> BucketedBias:
    torch.manual_seed(1)
    made = BucketedBias(HEADS, buckets).double()
    with torch.no_grad():
        made.bias.normal_()
    return made


def test_near_distances_have_a_bucket_each_and_far_ones_share() -> None:
    """Two-sided, 8 buckets up to 10: 0 and 1; from 2 on, 2 + floor(2 ln(d / 2) / ln 5), at most 3; later keys: + 4."""
    table = DistanceBuckets(8, 10).table().tolist()
    before = [3, 3, 3, 3, 3, 3, 2, 2, 2, 1, 0]  # of the distances -10 .. 0
    assert table == before + [4 + bucket for bucket in reversed(before[:-1])]


def test_a_causal_table_uses_all_buckets_for_earlier_keys() -> None:
    """4 exact ones; from 4 on, 4 + floor(4 ln(d / 4) / ln 4): 4, 4, 5, 5, 6, ... and at most 7; later keys: 0."""
    by_hand = [min(4 + math.floor(4 * math.log(d / 4) / math.log(4) + 1e-9), 7) if d >= 4 else d for d in range(17)]
    table = DistanceBuckets(8, 16, causal=True).table().tolist()
    assert table == [*reversed(by_hand), *[0] * 16] and by_hand[4:12] == [4, 4, 5, 5, 6, 6, 6, 6]


@pytest.mark.parametrize("causal", [True, False])
def test_a_score_is_the_scaled_dot_product_and_the_bias_of_the_distance(causal: bool) -> None:
    made = score(DistanceBuckets(8, 6, causal))
    q, k = (torch.randn(HEADS, n, WIDTH, dtype=torch.float64) for n in (4, 9))
    table = DistanceBuckets(8, 6, causal).table().tolist()
    scores = made(q, k)
    for h in range(HEADS):
        for i in range(4):
            for j in range(9):
                distance = max(-6, min(6, j - (i + 5)))
                expected = q[h, i] @ k[h, j] / 2 + made.bias[table[distance + 6], h]
                torch.testing.assert_close(scores[h, i, j], expected)


def test_scores_with_cached_positions_equal_those_by_index() -> None:
    made, tokens = score(DistanceBuckets(8, 6, causal=True)), 300  # more than bf16 can count
    q, k = (torch.randn(tokens, HEADS, WIDTH, dtype=torch.float64) for _ in range(2))
    by_index = made.compare(q.transpose(0, 1), k.transpose(0, 1))
    q, k, cached = made.encode_positions(q, k, TokenPositions(torch.arange(tokens)))
    assert k.shape[-1] == made.cached_width(WIDTH)
    positions = k[..., -2:]
    assert torch.equal(positions, positions.bfloat16().double())
    torch.testing.assert_close(cached.compare(q.transpose(0, 1), k.transpose(0, 1)), by_index)


def test_the_bias_learns_through_attention() -> None:
    made, layout = score(DistanceBuckets(8, 6, causal=True)), PackedLayout([3, 5])
    x = torch.randn(8, HEADS, WIDTH, dtype=torch.float64)
    out = attend(x, x, x, PackedQK(layout, layout, Causal()), score=made)
    out.square().sum().backward()
    assert made.bias.grad is not None
    assert (made.bias.grad != 0).any(1).tolist() == [True] * 5 + [False] * 3  # distances 0 to 4
