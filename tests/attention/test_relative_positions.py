"""Positions inside the attention, rotary and relative, against loops over every query and key."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor

from cached import attend_cached
from regard.attention import (
    BeamTree,
    Causal,
    KVCache,
    MaskTable,
    PackedQK,
    Relative,
    Rotary,
    Score,
    attend,
    use_backend,
)
from regard.attention.backends import fused, plain
from regard.attention.positional_scores import BucketedBias
from regard.errors import UserError
from regard.packed import PackedLayout
from regard.registry import POSITIONS

HEADS, WIDTH, BASE = 2, 6, 50.0


def make_score(kind: str, base: float = BASE) -> Score:
    torch.manual_seed(1)
    score = (Rotary(WIDTH, base) if kind == "rotary" else Relative(WIDTH, HEADS, base)).double()
    with torch.no_grad():
        for parameter in score.parameters():
            parameter.normal_()
    return score


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def frequencies(width: int, base: float) -> list[float]:
    return [base ** -(2 * f / width) for f in range(math.ceil(width / 2))]


def rotary_loop(query: Tensor, key: Tensor, base: float) -> Tensor:
    """Pairs of features as complex numbers: Re sum_f q_f conj(k_f) e^(i w_f (distance of q and k)) / sqrt(D)."""
    (queries, width), keys = query.shape, len(key)
    scores = torch.empty(queries, keys, dtype=torch.float64)
    for i in range(queries):
        for j in range(keys):
            distance = keys - queries + i - j
            total = 0.0
            for f, w in enumerate(frequencies(width, base)):
                q, k = (complex(x[f].item(), x[f + width // 2].item()) for x in (query[i], key[j]))
                total += (q * k.conjugate() * cmath.exp(1j * w * distance)).real
            scores[i, j] = total / math.sqrt(width)
    return scores


def relative_loop(query: Tensor, key: Tensor, u: Tensor, v: Tensor, weight: Tensor, base: float) -> Tensor:
    """((q + u) · k + (q + v) · W R(distance)) / sqrt(D) of one head."""
    (queries, width), keys = query.shape, len(key)
    scores = torch.empty(queries, keys, dtype=torch.float64)
    for i in range(queries):
        for j in range(keys):
            distance = keys - queries + i - j
            angles = [w * distance for w in frequencies(width, base)]
            r = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
            scores[i, j] = ((query[i] + u) @ key[j] + (query[i] + v) @ (weight @ r)) / math.sqrt(width)
    return scores


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 7), (3, 8)])  # a whole text, a step, a segment
def test_rotary_scores_equal_loops(queries: int, keys: int) -> None:
    score = make_score("rotary")
    query, key = draw(3, HEADS, queries, WIDTH), draw(3, HEADS, keys, WIDTH)
    actual = score(query, key)
    for n in range(3):
        for h in range(HEADS):
            torch.testing.assert_close(actual[n, h], rotary_loop(query[n, h], key[n, h], BASE))


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 7), (3, 8)])
@pytest.mark.parametrize("width", [6, 5])
def test_relative_scores_equal_loops(queries: int, keys: int, width: int) -> None:
    torch.manual_seed(2)
    score = Relative(width, HEADS, BASE).double()
    query, key = draw(3, HEADS, queries, width), draw(3, HEADS, keys, width)
    actual = score(query, key)
    for n in range(3):
        for h in range(HEADS):
            params = score.content[h], score.distance[h], score.weight[h]
            torch.testing.assert_close(actual[n, h], relative_loop(query[n, h], key[n, h], *params, BASE))


@pytest.mark.parametrize("kind", ["rotary", "relative"])
def test_scores_depend_on_the_distance_alone(kind: str) -> None:
    """The same vector everywhere: a score is the same along every diagonal, and differs from one to the next."""
    score = make_score(kind)
    same = draw(HEADS, 1, WIDTH)
    actual = score(same.expand(HEADS, 300, WIDTH), same.expand(HEADS, 300, WIDTH))
    torch.testing.assert_close(actual[:, 1:, 1:], actual[:, :-1, :-1])
    assert (actual[:, 1:, 0] - actual[:, :-1, 0]).abs().min() > 0


@pytest.mark.parametrize("kind", ["rotary", "relative"])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_equals_plain_with_gradients(kind: str, causal: bool) -> None:
    score = make_score(kind)
    query, key, value = draw(2, HEADS, 4, WIDTH), draw(2, HEADS, 7, WIDTH), draw(2, HEADS, 7, WIDTH)
    grad_out = torch.randn(2, HEADS, 4, WIDTH, dtype=torch.float64)
    actual = []
    for run in (plain, fused):
        out = run(query, key, value, MaskTable(causal=causal), score)
        gradients = torch.autograd.grad((out * grad_out).sum(), [query, key, value, *score.parameters()])
        assert all(g.any() for g in gradients)
        actual.append([out, *gradients])
    for slow, fast in zip(*actual, strict=True):
        torch.testing.assert_close(slow, fast, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ["rotary", "relative"])
@pytest.mark.parametrize("name", ["plain", "fused"])
def test_left_padding_changes_no_distance(kind: str, name: str) -> None:
    """Texts of 5, 2 and 4 tokens fed to a cache together, then two steps, against a packed batch."""
    score = make_score(kind)
    lengths, steps = [5, 2, 4], 2
    layout = PackedLayout([n + steps for n in lengths])
    query, key, value = (torch.randn(layout.size, HEADS, WIDTH, dtype=torch.float64) for _ in range(3))
    padding = torch.tensor([5 - n for n in lengths])

    def early(x: Tensor) -> Tensor:  # [B, 5, H, D], with garbage as padding
        parts = [part[:n] for part, n in zip(layout.split(x), lengths, strict=True)]
        return torch.stack([torch.cat([torch.full((5 - len(p), HEADS, WIDTH), 9.0).double(), p]) for p in parts])

    cache = KVCache(BeamTree(3, padding=padding))
    with use_backend(name):
        expected = layout.split(attend(query, key, value, PackedQK(layout, layout, Causal()), score=score))
        prompt = attend_cached(early(query), early(key), early(value), cache, score=score)
        for n, length in enumerate(lengths):
            torch.testing.assert_close(prompt[n, 5 - length :], expected[n][:length])
        for step in range(steps):
            now = [
                torch.stack([p[n + step] for p, n in zip(layout.split(x), lengths, strict=True)])
                for x in (query, key, value)
            ]
            out = attend_cached(*now, cache, score=score)
            for n, length in enumerate(lengths):
                torch.testing.assert_close(out[n], expected[n][length + step])


@pytest.mark.parametrize("kind", ["rotary", "relative"])
def test_far_distances_are_as_exact_as_near_ones(kind: str) -> None:
    """In float32, at position 20,000: the angles are computed in float64."""
    exact, score = make_score(kind, 10000.0), make_score(kind, 10000.0).float()
    key = torch.randn(HEADS, 20_000, WIDTH, dtype=torch.float64)
    query = torch.randn(HEADS, 1, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(score(query.float(), key.float()).double(), exact(query, key), atol=3e-5, rtol=3e-5)


def test_scores_for_positions_by_name() -> None:
    scores = {name: encoding.score(6, 2, 10000.0) for name, encoding in POSITIONS.items()}
    rotary, relative = scores.pop("rotary"), scores.pop("relative")
    assert isinstance(rotary, Rotary) and isinstance(relative, Relative)
    bucketed = scores.pop("bucketed")
    assert isinstance(bucketed, BucketedBias) and bucketed.bias.shape[1] == 2  # a column for each head
    shapes = {name: tuple(p.shape) for name, p in relative.named_parameters()}
    assert shapes == {"content": (2, 6), "distance": (2, 6), "weight": (2, 6, 6)}
    assert set(scores.values()) == {None}
    with pytest.raises(UserError, match="the width of a head, 3, must be even"):
        Rotary(3)


@pytest.mark.parametrize("kind", ["rotary", "relative"])
def test_tables_made_in_inference_mode_can_be_used_in_training(kind: str) -> None:
    score = POSITIONS[kind].score(4, 2, 10000.0)
    query, key = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(2))
    with torch.inference_mode():
        score(query, key)
    score(query, key).sum().backward()
    assert query.grad is not None and query.grad.any()
