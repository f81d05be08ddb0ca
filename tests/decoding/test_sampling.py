"""Random draws are fair, kept to the tokens they may fall on, and the same for a line whatever its batch."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.decoding import SearchRequest, sampling, search, topk
from regard.decoding.sampling import draw, filter_tokens, keys, splitmix64, uniforms
from regard.decoding.topk import stable_topk
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings
from regard.text import BOS, EOS

A, B, C = 3, 4, 5
MASK = (1 << 64) - 1


class TableModel:
    """Next-token probabilities by the last token; the state is only how many sentences and beams there are."""

    def __init__(self, rows: dict[int, list[float]]) -> None:
        size = len(next(iter(rows.values())))
        self.logits = torch.full((size, size), -math.inf)
        for last, row in rows.items():
            self.logits[last] = torch.tensor(row).log()

    def start(self, source: PackedTokens) -> Shape:
        return Shape(len(source.layout), 1)

    def step(self, state: Shape, tokens: Tensor) -> tuple[Tensor, Shape]:
        assert tokens.shape == (state.count, state.width)
        return self.logits[tokens], state


class Shape:
    def __init__(self, count: int, width: int) -> None:
        self.count, self.width = count, width

    def reorder(self, parents: Tensor) -> Shape:
        assert parents.shape[0] == self.count
        return Shape(*parents.shape)

    def select(self, sentences: Tensor) -> Shape:
        return Shape(len(sentences), self.width)


#                 0    1    END  A    B    C
FIRST = [0.0, 0.0, 0.1, 0.2, 0.3, 0.4]
AFTER_A = [0.0, 0.0, 0.5, 0.1, 0.4, 0.0]
ENDS = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
MODEL = TableModel({BOS: FIRST, A: AFTER_A, B: ENDS, C: ENDS, EOS: ENDS})


def sample(
    count: int, settings: DecodingSettings, lines: list[int] | None = None, seed: int = 0, nbest: int = 1
) -> list:
    source = PackedTokens.from_lists([[A, EOS]] * count)
    return search(MODEL, SearchRequest(source, settings, lines=lines, seed=seed, nbest=nbest))


def chi_square(observed: list[int], expected: list[float]) -> float:
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


# Upper 0.1% points of the chi-square distribution, by degrees of freedom; the draws are fixed, so these never flicker.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 5: 20.52, 15: 37.70, 99: 148.23, 255: 330.52}


def test_splitmix64_is_the_published_generator() -> None:
    # The first outputs of the generator seeded with 1234567, as Rosetta Code lists them: its state grows by the golden
    # gamma at each output, so the i-th output is the hash of seed + i * gamma.
    gamma = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + i * gamma) & MASK for i in range(5)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def slow_splitmix64(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def test_random_numbers_are_hashes_of_their_keys() -> None:
    draw = random.Random(1)
    for _ in range(50):
        seed, line, number, step = (
            draw.randrange(1 << 70),
            draw.randrange(1 << 40),
            draw.randrange(5),
            draw.randrange(99),
        )
        word = 0
        for part in (seed & MASK, line, number, step):
            word = slow_splitmix64(word ^ part)
        assert float(uniforms(keys(seed, [line], 5), step)[0, number]) == (word >> 40) / 2**24


@pytest.mark.parametrize("axis", ["seed", "line", "sample", "step"])
def test_uniforms_are_uniform_along_every_axis(axis: str) -> None:
    count = 20000
    values = {
        "seed": lambda: torch.cat([uniforms(keys(s, [0], 1), 0) for s in range(count)]),
        "line": lambda: uniforms(keys(0, range(count), 1), 0),
        "sample": lambda: uniforms(keys(0, [0], count), 0),
        "step": lambda: torch.cat([uniforms(keys(0, [0], 1), s) for s in range(count)]),
    }[axis]().flatten()
    assert float(values.min()) >= 0 and float(values.max()) < 1
    observed = (values * 100).long().bincount(minlength=100).tolist()
    assert chi_square(observed, [count / 100] * 100) < CHI_SQUARE[99]
    pairs = (values[:-1] * 16).long() * 16 + (values[1:] * 16).long()  # neighbours know nothing of each other
    assert chi_square(pairs.bincount(minlength=256).tolist(), [(count - 1) / 256] * 256) < CHI_SQUARE[255]


def test_steps_lines_and_samples_are_independent() -> None:
    first, second = uniforms(keys(7, range(4000), 2), 0), uniforms(keys(7, range(4000), 2), 1)
    for a, b in [(first[:, 0], second[:, 0]), (first[:, 0], first[:, 1]), (first[1:, 0], second[:-1, 0])]:
        cells = (a * 4).long() * 4 + (b * 4).long()
        assert chi_square(cells.bincount(minlength=16).tolist(), [len(a) / 16] * 16) < CHI_SQUARE[15]


def test_draws_follow_the_distribution_of_the_model() -> None:
    found = sample(6000, DecodingSettings(method="sample"))
    tokens = [(*h.tokens, EOS) for (h,) in found]
    assert chi_square([sum(t[0] == v for t in tokens) for v in (EOS, A, B, C)], [600, 1200, 1800, 2400]) < CHI_SQUARE[3]
    after = [t[1] for t in tokens if t[0] == A]
    shares = [len(after) * p for p in (0.5, 0.1, 0.4)]
    assert chi_square([after.count(v) for v in (EOS, A, B)], shares) < CHI_SQUARE[2]
    assert not {0, 1} & {v for t in tokens for v in t}


def test_a_low_temperature_sharpens_the_distribution() -> None:
    # p ** (1 / 0.5): .01, .04, .09, .16 of .30
    found = sample(6000, DecodingSettings(method="sample", temperature=0.5))
    first = [(*h.tokens, EOS)[0] for (h,) in found]
    assert chi_square([first.count(v) for v in (EOS, A, B, C)], [200, 800, 1800, 3200]) < CHI_SQUARE[3]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {C: 0.4, B: 0.3, A: 0.2, EOS: 0.1}),
        ({"top_k": 1}, {C: 1.0}),
        ({"top_k": 2}, {C: 4 / 7, B: 3 / 7}),
        ({"top_k": 99}, {C: 0.4, B: 0.3, A: 0.2, EOS: 0.1}),
        ({"top_p": 0.05}, {C: 0.4}),  # at least one
        ({"top_p": 0.39}, {C: 0.4}),
        ({"top_p": 0.41}, {C: 0.4, B: 0.3}),
        ({"top_p": 0.69}, {C: 0.4, B: 0.3}),
        ({"top_p": 0.71}, {C: 0.4, B: 0.3, A: 0.2}),
        ({"top_p": 0.95}, {C: 0.4, B: 0.3, A: 0.2, EOS: 0.1}),
        ({"top_k": 2, "top_p": 0.5}, {C: 4 / 7}),  # top_p of what top_k has left: 4/7 reaches it
        ({"top_k": 2, "top_p": 0.6}, {C: 4 / 7, B: 3 / 7}),
    ],
)
def test_kept_tokens(settings: dict, expected: dict[int, float]) -> None:
    share, order = filter_tokens(MODEL.logits[BOS][None, None], DecodingSettings(method="sample", **settings))
    found = {int(v): float(p) for v, p in zip(order.flatten(), share.flatten(), strict=True) if p > 0}
    assert found == pytest.approx(expected, abs=1e-6)
    assert list(found) == list(expected)  # the most probable first


@pytest.mark.parametrize(("settings", "allowed"), [({"top_k": 2}, {B, C}), ({"top_p": 0.71}, {A, B, C})])
def test_only_kept_tokens_are_drawn(settings: dict, allowed: set[int]) -> None:
    first = {(*h.tokens, EOS)[0] for (h,) in sample(2000, DecodingSettings(method="sample", **settings))}
    assert first == allowed


def test_inverse_of_the_cumulative_distribution() -> None:
    # the most probable first: C has the interval [0, .4), B [.4, .7), A [.7, .9), EOS [.9, 1)
    uniform = torch.tensor([[0.0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 1 - 2.0**-24]])
    tokens, _ = draw(MODEL.logits[BOS][None, None], uniform, DecodingSettings(method="sample"))
    assert tokens.tolist() == [[C, C, B, B, A, A, EOS, EOS]]


def test_an_edge_belongs_to_the_upper_interval() -> None:
    # four equally probable tokens, in the order of their ids, have [0, .25), [.25, .5), [.5, .75), [.75, 1)
    uniform = torch.tensor([[0.0, 0.25, 0.5, 0.75]])
    tokens, _ = draw(torch.zeros(1, 1, 4), uniform, DecodingSettings(method="sample"))
    assert tokens.tolist() == [[0, 1, 2, 3]]


def test_draws_of_a_line_do_not_depend_on_its_batch() -> None:
    settings = DecodingSettings(method="sample")
    whole = sample(60, settings, seed=9, nbest=3)
    picker = random.Random(2)
    for size in (1, 2, 7, 30):
        lines = picker.sample(range(60), size)
        assert sample(size, settings, lines, seed=9, nbest=3) == [whole[n] for n in lines]
    assert sample(60, settings, seed=10, nbest=3) != whole


def test_more_samples_do_not_change_the_first_ones() -> None:
    settings = DecodingSettings(method="sample")
    for (one,), many in zip(sample(40, settings), sample(40, settings, nbest=4), strict=True):
        assert len(many) == 4  # more than `beam` would allow for a beam of 1: samples are not beams
        assert one in many
        assert [h.score for h in many] == sorted((h.score for h in many), reverse=True)


def test_samples_of_a_line_are_independent() -> None:
    counts = {v: 0 for v in (EOS, A, B, C)}
    for hypotheses in sample(1, DecodingSettings(method="sample", beam=1), nbest=4000):
        for h in hypotheses:
            counts[(*h.tokens, EOS)[0]] += 1
    assert chi_square(list(counts.values()), [400, 800, 1200, 1600]) < CHI_SQUARE[3]


def test_logprobs_are_those_before_temperature() -> None:
    (hypotheses,) = sample(1, DecodingSettings(method="sample", temperature=0.01, length_penalty=0))
    assert hypotheses[0].tokens == (C,)
    assert hypotheses[0].logprobs == pytest.approx([math.log(0.4), 0.0], abs=1e-6)


def crowded(rows: int, size: int, seed: int = 0) -> Tensor:
    """Log-probabilities with many ties (as in bf16), some -inf, some zeros of either sign."""
    values = torch.randn(rows, 2, size, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
    values[..., ::7] = -math.inf
    values[..., 3], values[..., 5] = -0.0, 0.0
    return values


@pytest.mark.parametrize("count", [1, 5, 50])
@pytest.mark.parametrize("size", [400, 3000])
def test_stable_topk_equals_a_stable_sort(size: int, count: int) -> None:
    values = crowded(3, size)
    expected = values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    assert torch.equal(stable_topk(values, count), expected)
    nothing = torch.full_like(values, -math.inf)
    assert torch.equal(stable_topk(nothing, count), torch.arange(count).expand(3, 2, -1))


@pytest.mark.parametrize("settings", [{"top_p": 0.5}, {"top_p": 0.9, "temperature": 0.3}, {"top_k": 20}, {}])
@pytest.mark.parametrize("some", [16, 64])  # 16 are not enough for half of the probability, 64 are for some settings
def test_kept_tokens_do_not_depend_on_how_they_are_selected(
    monkeypatch: pytest.MonkeyPatch, some: int, settings: dict[str, float]
) -> None:
    logp, given = crowded(4, 2000).log_softmax(-1), DecodingSettings(method="sample", **settings)
    monkeypatch.setattr(topk, "MIN_RATIO", 10**9)  # sort everything
    share, order = filter_tokens(logp, given)
    monkeypatch.undo()
    monkeypatch.setattr(sampling, "TOP_P_TOKENS", some)
    quick, where = filter_tokens(logp, given)
    count = quick.shape[-1]
    assert torch.equal(quick, share[..., :count]) and torch.equal(where, order[..., :count])
    assert not share[..., count:].any()
