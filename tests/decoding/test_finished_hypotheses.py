"""Finished hypotheses are kept apart from live ones: none is lost to a hypothesis that never finishes."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import BOS, EOS, A, B, C, D, E, FakeModel, exhaustive, greedy, slow_beam, table
from torch import Tensor

from regard.decoding import SearchRequest, search
from regard.decoding.beam_state import SearchState
from regard.decoding.constraints import length_penalty
from regard.decoding.results import read_results
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings


def decoding(limit: int, **more: Any) -> DecodingSettings:
    return DecodingSettings.model_validate({"max_ratio": 1e-9, "max_extra": limit, **more})


@pytest.mark.parametrize("early", [True, False])
def test_a_live_hypothesis_that_never_finishes_displaces_no_finished_one(early: bool) -> None:
    # Step 2 keeps B D .5 and A END .15, which scores ln .15 / (7/6) = -1.63. Both halves of B D, .25 each, score
    # ln .25 / (8/6) = -1.04 at step 3 and would fill a beam of two; but they halve again at every step and never end:
    # at the maximum length they score 11 ln .5 / (17/6) = -2.69.
    rows = {
        BOS: {A: 0.5, B: 0.5},
        A: {EOS: 0.3, C: 0.25, 0: 0.25, 1: 0.2},
        B: {D: 1.0},
        D: {D: 0.5, E: 0.5},
        E: {D: 0.5, E: 0.5},
    }
    how = decoding(12, beam=2, length_penalty=1, early_stopping=early)
    ((best, second),) = search(table(rows), SearchRequest(PackedTokens.from_lists([[A, EOS]]), how, nbest=2))
    assert best.tokens == (A,) and best.finished
    assert best.score == pytest.approx(math.log(0.15) / (7 / 6), abs=1e-6)
    assert not second.finished and second.score == pytest.approx(11 * math.log(0.5) / (17 / 6), abs=1e-6)


def sharp(seed: int, size: int, spread: float, end: float) -> FakeModel:
    """Random distributions of a chosen sharpness, in which EOS is less likely the lower `end` is."""

    def logits(source: tuple[int, ...], history: tuple[int, ...]) -> list[float]:
        draw = Random(repr((seed, source, history)))
        return [draw.gauss(0, spread) + (end if v == EOS else 0.0) for v in range(size)]

    return FakeModel(logits)


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "size": st.integers(4, 9),
        "spread": st.sampled_from([0.3, 1.0, 3.0]),
        "end": st.sampled_from([-4.0, -1.0, 0.0, 2.0]),
    }
)
SEARCHES = st.fixed_dictionaries(
    {
        "beam": st.integers(1, 5),
        "length_penalty": st.sampled_from([0.0, 0.6, 1.0, 2.0]),
        "early_stopping": st.booleans(),
        "min_length": st.integers(0, 2),
        "no_repeat_ngram": st.integers(0, 2),
    }
)


@settings(max_examples=30)
@given(CASES, SEARCHES, st.integers(1, 9), st.booleans())
def test_what_is_returned_is_no_worse_than_anything_that_finished(
    case: dict, how: dict, limit: int, static: bool
) -> None:
    finished: list[float] = []
    original = SearchState.finish

    def spy(self: SearchState, which: Tensor, penalty: Tensor) -> None:
        score = self.total / self.penalty[self.step]
        finished.extend(score[which & (self.total > -math.inf)].tolist())
        original(self, which, penalty)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchState, "finish", spy)
        request = SearchRequest(PackedTokens.from_lists([[3, EOS]]), decoding(limit, **how))
        ((best,),) = search(sharp(**case), request, run=in_fixed_shapes if static else None)
    assert best.score >= max(finished, default=-math.inf) - 1e-5
    (expected, _), *_ = slow_beam(sharp(**case), (3, EOS), request.settings, [], limit)
    assert best.score == pytest.approx(expected, abs=1e-4)


@settings(max_examples=30)
@given(CASES, st.sampled_from([0.0, 0.6, 1.0]), st.booleans(), st.integers(1, 3))
def test_a_beam_as_wide_as_the_space_is_exhaustive_search(case: dict, alpha: float, early: bool, nbest: int) -> None:
    model, size, limit = sharp(**{**case, "size": 4}), 4, 3
    everything = exhaustive(model, (3, EOS), [v for v in range(size) if v != EOS], limit, alpha)
    how = decoding(limit, beam=len(everything), length_penalty=alpha, early_stopping=early)
    (found,) = search(model, SearchRequest(PackedTokens.from_lists([[3, EOS]]), how, nbest=nbest))
    assert [h.score for h in found] == pytest.approx([value for value, _, _ in everything[:nbest]], abs=1e-4)


@settings(max_examples=30)
@given(CASES, SEARCHES, st.booleans())
def test_a_batch_of_one_is_a_batch_of_many(case: dict, how: dict, static: bool) -> None:
    sources, run = [[n, EOS] for n in range(5)], in_fixed_shapes if static else None
    together = search(sharp(**case), SearchRequest(PackedTokens.from_lists(sources), decoding(6, **how)), run=run)
    for n, source in enumerate(sources):
        assert search(sharp(**case), SearchRequest(PackedTokens.from_lists([source]), decoding(6, **how)), run=run) == [
            together[n]
        ]


@settings(max_examples=30)
@given(CASES, st.sampled_from([0.0, 0.6, 1.0]), st.integers(1, 9))
def test_a_beam_of_one_is_greedy(case: dict, alpha: float, limit: int) -> None:
    ((found,),) = search(
        sharp(**case), SearchRequest(PackedTokens.from_lists([[3, EOS]]), decoding(limit, beam=1, length_penalty=alpha))
    )
    assert found.tokens == greedy(sharp(**case), (3, EOS), limit)


def test_the_bound_of_early_stopping_is_the_score_at_the_maximum_length() -> None:
    """Stopping where a live hypothesis could score the same is right; a step earlier would be wrong.

    B END scores ln .3 / lp(2). A C, at ln .4, can at best score ln .4 / lp(limit), which it does if all that follows
    is certain.
    """
    rows = {BOS: {A: 0.5, B: 0.5}, A: {C: 0.8, D: 0.2}, B: {EOS: 0.6, D: 0.4}, C: {C: 1.0}, D: {D: 0.5, E: 0.5}}
    for limit in range(3, 9):
        model, how = table(rows), decoding(limit, beam=2, length_penalty=1.0)
        ((best,),) = search(model, SearchRequest(PackedTokens.from_lists([[A, EOS]]), how))
        bound, finished = math.log(0.4) / length_penalty(1.0, limit), math.log(0.3) / length_penalty(1.0, 2)
        assert best.finished == (finished >= bound)
        assert model.steps == (2 if finished >= bound else limit)


def in_fixed_shapes(model: FakeModel, request: SearchRequest, constraints: Any, watch: Any) -> Any:
    """The steps of `SearchState` as on a GPU: all beams from the beginning, and sentences that are done stay."""
    hypotheses = SearchState.create(request.settings, request.nbest, constraints, constraints.longest, static=True)
    begin = torch.tensor(request.first_tokens())
    hypotheses.restart(constraints, begin, request.line_numbers(), request.seed)
    state = model.start(request.source).reorder(torch.zeros_like(hypotheses.last))
    for _ in range(constraints.longest):
        logits, state = model.step(state, hypotheses.last)
        state = state.reorder(hypotheses.advance(logits))
    return dict(enumerate(read_results(hypotheses, range(len(begin)))))
