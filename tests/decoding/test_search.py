"""Beam search finds what can be worked out on paper, or by trying everything."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.decoding import Hypothesis, SearchRequest, score, search
from regard.decoding.constraints import Constraints
from regard.errors import UserError
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import DecodingSettings
from regard.text import BOS, EOS

A, B, C, D, E = 3, 4, 5, 6, 7  # words of the tables below
Distribution = Callable[[tuple[int, ...], tuple[int, ...]], list[float]]  # (source, history from BEGIN) -> logits


class FakeState:
    """Carries what was fed to it, so that a wrong `reorder` or `select` changes the logits; good for one use only."""

    def __init__(self, sources: list[tuple[int, ...]], history: Tensor) -> None:
        self.sources, self.history, self.used = sources, history, False  # history: [N, K, tokens fed]

    def use(self) -> None:
        assert not self.used, "a state was used after it was stepped, reordered or selected"
        self.used = True

    def reorder(self, parents: Tensor) -> FakeState:
        self.use()
        assert parents.shape[0] == len(self.sources) and parents.dtype == torch.long
        assert int(parents.min()) >= 0 and int(parents.max()) < self.history.shape[1]
        return FakeState(self.sources, self.history[torch.arange(len(parents))[:, None], parents])

    def select(self, sentences: Tensor) -> FakeState:
        self.use()
        assert sentences.dim() == 1
        return FakeState([self.sources[n] for n in sentences.tolist()], self.history[sentences])


class FakeModel:
    """A model given by its next-token distributions. `steps` counts model steps, `cells` beams stepped."""

    def __init__(self, logits: Distribution) -> None:
        self.logits, self.steps, self.cells = logits, 0, 0

    def start(self, source: PackedTokens) -> FakeState:
        sources = [tuple(ids.tolist()) for ids in source.layout.split(source.ids)]
        return FakeState(sources, torch.zeros(len(sources), 1, 0, dtype=torch.long))

    def step(self, state: FakeState, tokens: Tensor) -> tuple[Tensor, FakeState]:
        state.use()
        assert tokens.shape == state.history.shape[:2]
        history = torch.cat([state.history, tokens[..., None]], -1)
        self.steps, self.cells = self.steps + 1, self.cells + tokens.numel()
        beams = [[self.logits(s, tuple(h)) for h in hs] for s, hs in zip(state.sources, history.tolist(), strict=True)]
        return torch.tensor(beams), FakeState(state.sources, history)


def table(rows: dict[int, dict[int, float]], size: int = 8) -> FakeModel:
    """Next-token probabilities by the last token; what is not listed is impossible."""

    def logits(source: tuple[int, ...], history: tuple[int, ...]) -> list[float]:
        row = rows.get(history[-1], {EOS: 1.0})
        return [math.log(row[v]) if v in row else -math.inf for v in range(size)]

    return FakeModel(logits)


def hashed(size: int) -> FakeModel:
    """A random but fixed distribution after every history of every source."""

    def logits(source: tuple[int, ...], history: tuple[int, ...]) -> list[float]:
        draw = random.Random(repr((source, history)))
        return [draw.gauss(0, 2) for _ in range(size)]

    return FakeModel(logits)


def one_sentence(model: FakeModel, settings: DecodingSettings, length: int = 3, **options: Any) -> list[Hypothesis]:
    request = SearchRequest(PackedTokens.from_lists([[*[A] * (length - 1), EOS]]), settings, **options)
    return search(model, request)[0]


def words(hypotheses: Sequence[Hypothesis]) -> list[list[int]]:
    return [list(hypothesis.tokens) for hypothesis in hypotheses]


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


def logp(model: FakeModel, source: tuple[int, ...], tokens: Sequence[int]) -> list[float]:
    """Log-probabilities of tokens after BOS, in double precision."""
    history, result = [BOS], []
    for token in tokens:
        row = torch.tensor(model.logits(source, tuple(history)), dtype=torch.float64).log_softmax(-1)
        result.append(float(row[token]))
        history.append(token)
    return result


# --- tables by hand -------------------------------------------------------------------------------------------------

SHORT_OR_LONG = {
    BOS: {A: 0.5, B: 0.4, C: 0.1},
    A: {C: 0.6, B: 0.2, EOS: 0.2},
    B: {EOS: 0.9, C: 0.1},
    C: {D: 1.0},
    D: {EOS: 1.0},
}
# Step 1: A .5, B .4, C .1                                                            a beam of 2 keeps  A, B
# Step 2: B END .4 * .9 = .36, A C .5 * .6 = .30, A B .10, A END .10, B C .04                            B END, A C
# Step 3: B END .36, A C D .30                                                                           both
# Step 4: B END .36, A C D END .30                                                                       both, finished
# Without a length penalty B wins with ln .36 = -1.0217 before A C D with ln .30 = -1.2040.
# With alpha = 1: B has 2 tokens, -1.0217 / (7/6) = -0.8757; A C D has 4, -1.2040 / (9/6) = -0.8026, and wins.


def test_greedy_follows_the_best_next_token() -> None:
    (found,) = one_sentence(table(SHORT_OR_LONG), DecodingSettings(beam=1, length_penalty=0))
    assert found.tokens == (A, C, D)
    assert found.finished
    assert found.logprobs == pytest.approx([math.log(0.5), math.log(0.6), 0, 0], abs=1e-6)
    assert found.score == pytest.approx(math.log(0.30), abs=1e-6)


@pytest.mark.parametrize("early", [True, False])
def test_beam_of_two_finds_what_greedy_misses(early: bool) -> None:
    settings = DecodingSettings(beam=2, length_penalty=0, early_stopping=early)
    first, second = one_sentence(table(SHORT_OR_LONG), settings, nbest=2)
    assert (first.tokens, second.tokens) == ((B,), (A, C, D))
    assert first.logprobs == pytest.approx([math.log(0.4), math.log(0.9)], abs=1e-6)
    assert first.score == pytest.approx(math.log(0.36), abs=1e-6)
    assert second.score == pytest.approx(math.log(0.30), abs=1e-6)


@pytest.mark.parametrize("early", [True, False])
def test_length_penalty_changes_the_winner(early: bool) -> None:
    settings = DecodingSettings(beam=2, length_penalty=1, early_stopping=early)
    first, second = one_sentence(table(SHORT_OR_LONG), settings, nbest=2)
    assert (first.tokens, second.tokens) == ((A, C, D), (B,))
    assert first.score == pytest.approx(math.log(0.30) / (9 / 6), abs=1e-6)
    assert second.score == pytest.approx(math.log(0.36) / (7 / 6), abs=1e-6)


def test_early_stopping_stops_when_nothing_better_can_come() -> None:
    # After step 2, B has finished with ln .36, and A C, at ln .30, cannot rise again: two steps are enough.
    # With alpha = 1 A C could still score ln .30 / lp(26) (it does score -0.8026): the search has to go on.
    for alpha, early, steps in [(0, True, 2), (0, False, 4), (1, True, 4), (1, False, 4)]:
        model = table(SHORT_OR_LONG)
        one_sentence(model, DecodingSettings(beam=2, length_penalty=alpha, early_stopping=early))
        assert model.steps == steps, (alpha, early)


def test_a_finished_hypothesis_counts_towards_the_beam() -> None:
    # Step 1: A .5, B .4, C .1                                               kept  A, B
    # Step 2: B END .36, A C .20, A D .15, A END .15, B C .04                kept  B END, A C
    # Step 3: B END .36, A C END .12, A C E .08                              kept  B END, A C END
    # Were B END set aside at step 2 and its slot given away, A D would have been kept, and A D END .15 been second.
    rows = {
        BOS: {A: 0.5, B: 0.4, C: 0.1},
        A: {C: 0.4, D: 0.3, EOS: 0.3},
        B: {EOS: 0.9, C: 0.1},
        C: {EOS: 0.6, E: 0.4},
        D: {EOS: 1.0},
    }
    found = one_sentence(table(rows), DecodingSettings(beam=2, length_penalty=0), nbest=2)
    assert words(found) == [[B], [A, C]]
    assert [h.score for h in found] == pytest.approx([math.log(0.36), math.log(0.12)], abs=1e-6)


def test_a_finished_hypothesis_wins_a_tie() -> None:
    # A C, which the maximum length cuts, has the probability of B END: the cut one must not be handed back.
    rows = {BOS: {A: 0.5, B: 0.5}, A: {C: 1.0}, B: {EOS: 1.0}}
    for beam in (2, 3):
        found = one_sentence(table(rows), DecodingSettings(beam=beam, max_ratio=1e-9, max_extra=2), nbest=2)
        assert words(found) == [[B], [A, C]]
        assert found[0].score == found[1].score


# --- exhaustive search ----------------------------------------------------------------------------------------------


def exhaustive(model: FakeModel, source: tuple[int, ...], allowed: Sequence[int], limit: int, alpha: float) -> list:
    """Every output there is as (score, tokens, finished), best first."""
    found = []
    for length in range(limit + 1):
        for tokens in itertools.product(allowed, repeat=length):
            finished = length < limit  # with `limit` words there is no room for the end mark
            total = sum(logp(model, source, [*tokens, EOS] if finished else tokens))
            found.append((total / penalty(length + finished, alpha), tokens, finished))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("alpha", [0, 0.6, 1])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("size", "limit", "nbest"), [(4, 4, 1), (4, 4, 7), (4, 3, 40), (5, 4, 12)])
def test_beam_as_wide_as_the_space_is_exhaustive_search(
    alpha: float, early: bool, size: int, limit: int, nbest: int
) -> None:
    model, source = hashed(size), (3, size, limit, EOS)
    allowed = [v for v in range(size) if v != EOS]
    everything = exhaustive(model, source, allowed, limit, alpha)
    settings = DecodingSettings(
        beam=len(everything) + 3, length_penalty=alpha, early_stopping=early, max_ratio=1e-9, max_extra=limit
    )
    (found,) = search(model, SearchRequest(PackedTokens.from_lists([list(source)]), settings, nbest=nbest))
    expected = everything[:nbest]
    assert [(h.tokens, h.finished) for h in found] == [(tokens, finished) for _, tokens, finished in expected]
    assert [h.score for h in found] == pytest.approx([value for value, _, _ in expected], abs=1e-5)


def test_all_of_a_small_space_is_listed_once() -> None:
    # limit 2, words {0, 1, 3}: (), 3 of one word, 9 of two (cut): 13 outputs, however many are asked for
    settings = DecodingSettings(beam=50, max_ratio=1e-9, max_extra=2)
    (found,) = search(hashed(4), SearchRequest(PackedTokens.from_lists([[3, EOS]]), settings, nbest=50))
    assert len(found) == len({h.tokens for h in found}) == 13
    assert sum(not h.finished for h in found) == 9


@pytest.mark.parametrize("beam", [2, 3, 5])
@pytest.mark.parametrize("alpha", [0, 0.6, 1, 2])
def test_early_stopping_never_changes_the_result(beam: int, alpha: float) -> None:
    sources = PackedTokens.from_lists([[n, EOS] for n in range(20)])
    for nbest in (1, 2):
        eager, patient = (
            search(
                hashed(6),
                SearchRequest(
                    sources,
                    DecodingSettings(beam=beam, length_penalty=alpha, early_stopping=early, max_extra=6),
                    nbest=nbest,
                ),
            )
            for early in (True, False)
        )
        assert eager == patient


# --- against a slow twin --------------------------------------------------------------------------------------------


def repeats(tokens: tuple[int, ...], size: int) -> bool:
    """Whether the last n-gram of this size came before."""
    grams = [tokens[i : i + size] for i in range(len(tokens) - size + 1)]
    return bool(size and grams) and grams[-1] in grams[:-1]


def slow_beam(
    model: FakeModel, source: tuple[int, ...], settings: DecodingSettings, banned: list[int], limit: int
) -> list:
    """Beam search with lists: (score, tokens with their EOS), best first.

    At each step the best of candidates and finished ones are kept, as many as there are beams; those that end are put
    aside, and never dropped.
    """
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for step in range(limit):
        candidates = []
        for _, tokens in live:
            row = model.logits(source, (BOS, *tokens))
            following = [
                v
                for v in range(len(row))
                if v not in banned
                and not (v == EOS and len(tokens) < settings.min_length)
                and not repeats((*tokens, v), settings.no_repeat_ngram)
            ]
            for v in following or [EOS]:
                total = sum(logp(model, source, (*tokens, v)))
                candidates.append((total / penalty(len(tokens) + 1, settings.length_penalty), (*tokens, v)))
        kept = sorted(finished + candidates, reverse=True)[: settings.beam]
        finished += [(value, tokens) for value, tokens in kept if tokens[-1] == EOS and len(tokens) == step + 1]
        live = [(value, tokens) for value, tokens in kept if tokens[-1] != EOS]
    return sorted(finished + live, reverse=True)


@pytest.mark.parametrize("beam", [1, 2, 4, 7])
@pytest.mark.parametrize(
    "rules",
    [{}, {"length_penalty": 2}, {"length_penalty": 0, "min_length": 3}, {"no_repeat_ngram": 1}, {"no_repeat_ngram": 2}],
)
def test_beam_search_equals_its_slow_twin(beam: int, rules: dict) -> None:
    settings = DecodingSettings.model_validate({"beam": beam, "max_ratio": 1, "max_extra": 3, **rules})
    sources = [[*range(n % 5), n, EOS] for n in range(12)]
    found = search(
        hashed(6),
        SearchRequest(
            PackedTokens.from_lists(sources), settings.model_copy(update={"early_stopping": False}), nbest=beam
        ),
    )
    eager = search(hashed(6), SearchRequest(PackedTokens.from_lists(sources), settings, banned=[0, 3]))
    for n, source in enumerate(sources):
        expected = slow_beam(hashed(6), tuple(source), settings, [], len(source) + 3)[:beam]
        assert [(*h.tokens, EOS) if h.finished else h.tokens for h in found[n]] == [tokens for _, tokens in expected]
        assert [h.score for h in found[n]] == pytest.approx([value for value, _ in expected], abs=1e-5)
        (value, tokens), *_ = slow_beam(hashed(6), tuple(source), settings, [0, 3], len(source) + 3)
        assert eager[n][0].tokens == tuple(v for v in tokens if v != EOS)
        assert eager[n][0].score == pytest.approx(value, abs=1e-5)


# --- a beam of one --------------------------------------------------------------------------------------------------


def greedy(model: FakeModel, source: tuple[int, ...], limit: int) -> tuple[int, ...]:
    tokens: list[int] = []
    while len(tokens) < limit:
        row = model.logits(source, (BOS, *tokens))
        best = max(range(len(row)), key=row.__getitem__)
        if best == EOS:
            break
        tokens.append(best)
    return tuple(tokens)


@pytest.mark.parametrize("alpha", [0, 0.6])
def test_beam_of_one_is_greedy(alpha: float) -> None:
    sources = [[*range(10, 10 + n % 4), n, EOS] for n in range(40)]
    settings = DecodingSettings(beam=1, length_penalty=alpha, max_ratio=2, max_extra=3)
    found = search(hashed(7), SearchRequest(PackedTokens.from_lists(sources), settings))
    assert [h.tokens for (h,) in found] == [greedy(hashed(7), tuple(s), 2 * len(s) + 3) for s in sources]


# --- batches --------------------------------------------------------------------------------------------------------

VARIED = [
    DecodingSettings(beam=1, max_ratio=1.5, max_extra=1),
    DecodingSettings(beam=3, max_ratio=1.5, max_extra=1),
    DecodingSettings(
        beam=4, max_ratio=0.7, max_extra=2, length_penalty=1, early_stopping=False, no_repeat_ngram=2, min_length=2
    ),
    DecodingSettings(method="sample", max_ratio=1.5, max_extra=1, temperature=1.3, top_p=0.95),
]


@pytest.mark.parametrize("settings", VARIED)
def test_a_sentence_does_not_depend_on_its_batch(settings: DecodingSettings) -> None:
    draw = random.Random(5)
    sources = [[*(draw.randrange(3, 9) for _ in range(draw.randrange(9))), EOS] for _ in range(24)]
    prefixes = [[draw.randrange(3, 9) for _ in range(draw.choice([0, 0, 1, 3]))] for _ in sources]
    nbest = 1 if settings.beam == 1 else 2

    def run(numbers: list[int], fill: int = 0) -> list[list[Hypothesis]]:
        size = sum(len(sources[n]) for n in numbers) + fill
        row = PackedTokens.from_lists([sources[n] for n in numbers], size)
        begins = [prefixes[n] for n in numbers]
        return search(
            hashed(9), SearchRequest(row, settings, prefixes=begins, banned=[0, 1], lines=numbers, nbest=nbest, seed=3)
        )

    alone = [run([n])[0] for n in range(len(sources))]
    assert len({h[0].tokens for h in alone}) > 12  # the sentences do differ
    for size in (2, 5, 11, 24):
        mixed = draw.sample(range(len(sources)), size)
        assert run(mixed, fill=size % 3) == [alone[n] for n in mixed]


def test_sentences_leave_the_batch_when_they_are_done() -> None:
    # limits 2 and 6, no end mark: 2 steps of 2 sentences, 4 of 1, and beams of 2 after the first step
    model = table({BOS: {A: 0.6, B: 0.4}, A: {A: 0.6, B: 0.4}, B: {A: 0.6, B: 0.4}})
    found = search(
        model,
        SearchRequest(
            PackedTokens.from_lists([[A, EOS], [A, A, A, A, A, EOS]]),
            DecodingSettings(beam=2, max_ratio=1, max_extra=0),
        ),
    )
    assert [len(h[0].tokens) for h in found] == [2, 6]
    assert (model.steps, model.cells) == (6, 2 + 4 + 4 * 2)


def test_no_sentences_give_no_results() -> None:
    assert search(hashed(5), SearchRequest(PackedTokens.from_lists([]), DecodingSettings())) == []


# --- constraints ----------------------------------------------------------------------------------------------------


def test_output_is_cut_at_the_maximum_length() -> None:
    # 1.5 * 3 + 0 = 4.5: four tokens, and the end mark is not among them
    (found,) = one_sentence(table({BOS: {A: 1.0}, A: {A: 1.0}}), DecodingSettings(max_ratio=1.5, max_extra=0), length=3)
    assert found == Hypothesis((A, A, A, A), (0.0,) * 4, 0.0, finished=False)


def test_eos_counts_towards_the_maximum_length() -> None:
    (found,) = one_sentence(table({BOS: {A: 1.0}, A: {EOS: 1.0}}), DecodingSettings(max_ratio=0.1, max_extra=2))
    assert found == Hypothesis((A,), (0.0, 0.0), 0.0, finished=True)
    (cut,) = one_sentence(table({BOS: {A: 1.0}, A: {EOS: 1.0}}), DecodingSettings(max_ratio=0.1, max_extra=1))
    assert cut == Hypothesis((A,), (0.0,), 0.0, finished=False)


def test_no_eos_before_the_minimum_length() -> None:
    rows = {BOS: {EOS: 0.9, A: 0.1}, A: {EOS: 0.9, A: 0.1}}
    for least in range(4):
        (found,) = one_sentence(table(rows), DecodingSettings(beam=2, min_length=least, length_penalty=0))
        assert found.tokens == (A,) * least
        assert found.score == pytest.approx(least * math.log(0.1) + math.log(0.9), abs=1e-5)


@pytest.mark.parametrize(("size", "expected"), [(0, [A] * 6), (1, [A, B]), (2, [A, A, B]), (3, [A, A, A, B])])
def test_no_ngram_is_repeated(size: int, expected: list[int]) -> None:
    # Always A if allowed, else B, else the end; a bigram A A once means A A B (A A A has it twice)
    rows = {BOS: {A: 1.0}, A: {A: 0.9, B: 0.09, EOS: 0.01}, B: {EOS: 1.0}}
    settings = DecodingSettings(beam=1, no_repeat_ngram=size, max_ratio=1e-9, max_extra=6)
    assert words(one_sentence(table(rows), settings)) == [expected]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_repeat_holds_for_every_hypothesis(size: int) -> None:
    settings = DecodingSettings(beam=6, no_repeat_ngram=size, max_ratio=1e-9, max_extra=12)
    for hypotheses in search(
        hashed(5), SearchRequest(PackedTokens.from_lists([[n, EOS] for n in range(12)]), settings, nbest=6)
    ):
        for h in hypotheses:
            grams = [h.tokens[i : i + size] for i in range(len(h.tokens) - size + 1)]
            assert len(grams) == len(set(grams))


def test_banned_tokens_are_never_generated() -> None:
    found = search(
        hashed(7),
        SearchRequest(
            PackedTokens.from_lists([[n, EOS] for n in range(10)]), DecodingSettings(), banned=[0, 1, 3], nbest=4
        ),
    )
    assert {token for hypotheses in found for h in hypotheses for token in h.tokens} <= {4, 5, 6}


def test_banning_tokens_does_not_change_log_probabilities() -> None:
    (found,) = one_sentence(table({BOS: {A: 0.8, B: 0.2}}), DecodingSettings(length_penalty=0), banned=[A])
    assert found.tokens == (B,)
    assert found.score == pytest.approx(math.log(0.2), abs=1e-6)


def test_prefixes_are_forced_and_scored_by_the_model() -> None:
    rows = {BOS: {A: 0.7, B: 0.2, C: 0.1}, A: {EOS: 1.0}, B: {A: 0.1, D: 0.9}, C: {EOS: 0.5, D: 0.5}}
    source = PackedTokens.from_lists([[A, EOS]] * 4)
    prefixes = [[], [B], [B, A], [C]]
    found = search(
        table(rows), SearchRequest(source, DecodingSettings(beam=2, length_penalty=0), prefixes=prefixes, banned=[B])
    )
    assert [h[0].tokens for h in found][:3] == [(A,), (B, D), (B, A)]  # a prefix may hold what is forbidden
    assert found[1][0].logprobs == pytest.approx([math.log(0.2), math.log(0.9), 0], abs=1e-6)
    assert found[2][0].logprobs == pytest.approx([math.log(0.2), math.log(0.1), 0], abs=1e-6)
    assert found[3][0].tokens[0] == C


def test_beam_after_a_prefix_is_the_beam_of_the_rest() -> None:
    # limit 4 with a prefix of 2: what is left is every output of up to 2 more tokens
    model, source = hashed(5), (9, EOS)
    settings = DecodingSettings(beam=400, length_penalty=0, max_ratio=1e-9, max_extra=4)
    everything = [e for e in exhaustive(model, source, [0, 1, 3, 4], 4, 0) if e[1][:2] == (3, 4)]
    (found,) = search(
        model, SearchRequest(PackedTokens.from_lists([list(source)]), settings, prefixes=[[3, 4]], nbest=400)
    )
    assert [h.tokens for h in found] == [tokens for _, tokens, _ in everything]


def test_a_prefix_longer_than_the_maximum_is_followed_by_eos() -> None:
    settings = DecodingSettings(max_ratio=1e-9, max_extra=1)
    (found,) = one_sentence(table({BOS: {A: 1.0}, A: {EOS: 0.6, A: 0.4}}), settings, prefixes=[[A, A, A]])
    assert found.tokens == (A, A, A) and found.finished


def test_a_prefix_of_probability_zero_is_followed() -> None:
    (found,) = one_sentence(table({BOS: {A: 1.0}, B: {D: 1.0}}), DecodingSettings(), prefixes=[[B]])
    assert found.tokens == (B, D) and found.finished


@pytest.mark.parametrize("method", ["beam", "sample"])
@pytest.mark.parametrize("beam", [1, 3])
def test_output_ends_where_every_token_is_banned(method: str, beam: int) -> None:
    settings = DecodingSettings(method=method, beam=beam, min_length=5)  # type: ignore[arg-type]
    (found,) = one_sentence(hashed(4), settings, banned=[0, 1, 3])
    assert found.tokens == () and found.finished
    (found,) = one_sentence(table({BOS: {A: 1.0}, A: {A: 1.0}}), settings, banned=[A, B, C, D, E, 0, 1])
    assert found.tokens == () and found.finished and math.isfinite(found.score)


@pytest.mark.parametrize("size", [3, 4])
def test_the_vocabulary_may_be_smaller_than_the_beam(size: int) -> None:
    (found,) = search(
        hashed(size),
        SearchRequest(PackedTokens.from_lists([[0, EOS]]), DecodingSettings(beam=16, max_extra=10), nbest=16),
    )
    assert len(found) == len({h.tokens for h in found}) == 16


def test_more_outputs_than_beams_are_refused() -> None:
    with pytest.raises(UserError, match="beam must be at least 5"):
        one_sentence(hashed(5), DecodingSettings(beam=4), nbest=5)


def test_broken_weights_are_named() -> None:
    with pytest.raises(UserError, match="not a number"):
        one_sentence(FakeModel(lambda source, history: [math.nan] * 5), DecodingSettings(beam=2))


def test_wrong_numbers_of_prefixes_and_lines() -> None:
    with pytest.raises(ValueError, match="2 prefixes for 1"):
        one_sentence(hashed(5), DecodingSettings(), prefixes=[[3], [4]])
    with pytest.raises(ValueError, match="contain EOS"):
        one_sentence(hashed(5), DecodingSettings(), prefixes=[[3, EOS]])
    with pytest.raises(ValueError, match="2 line numbers for 1"):
        one_sentence(hashed(5), DecodingSettings(), lines=[3, 4])


# --- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [*VARIED, DecodingSettings(beam=5, max_extra=3)])
def test_scores_are_those_of_the_tokens(settings: DecodingSettings) -> None:
    sources = [[n, EOS] for n in range(12)]
    for source, hypotheses in zip(
        sources, search(hashed(6), SearchRequest(PackedTokens.from_lists(sources), settings)), strict=True
    ):
        for h in hypotheses:
            expected = logp(hashed(6), tuple(source), [*h.tokens, EOS] if h.finished else h.tokens)
            assert h.logprobs == pytest.approx(expected, abs=1e-5)
            assert h.score == pytest.approx(sum(expected) / penalty(len(expected), settings.length_penalty), abs=1e-5)


def test_given_pairs_are_scored_token_by_token() -> None:
    targets = [[3, 4, EOS], [EOS], [5, EOS]]
    batch = SeqBatch.from_lists([[7, EOS], [8, 8, EOS], [9, EOS]], targets, bos=BOS, target_size=9)
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    found = score(lambda given: logits if given is batch else None, batch)  # type: ignore[arg-type, return-value]
    labels = [3, 4, EOS, EOS, 5, EOS]
    expected = [float(logits[t].double().log_softmax(-1)[label]) for t, label in enumerate(labels)]
    assert [len(f) for f in found] == [3, 1, 2]
    assert [x for f in found for x in f] == pytest.approx(expected, abs=1e-6)


def test_scores_are_float32_under_half_precision() -> None:
    batch = SeqBatch.from_lists([[EOS]], [[3, EOS]], bos=BOS)
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(2)).bfloat16()
    (found,) = score(lambda given: logits, batch)
    expected = logits.double().log_softmax(-1)[[0, 1], [3, EOS]]
    assert found == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("beam", [1, 3])
def test_suppressed_tokens_never_come_and_others_not_first_after_the_prefix(beam: int) -> None:
    """A is likeliest everywhere, then EOS, then B: without A and EOS, B begins, and EOS follows it."""
    row = {A: 0.5, EOS: 0.3, B: 0.15, C: 0.05}
    model = table(dict.fromkeys((BOS, A, B, C, D), row))
    settings = DecodingSettings(beam=beam, length_penalty=0, suppress_ids=[A], begin_suppress_ids=[EOS])
    assert words(one_sentence(model, settings))[0] == [B]
    assert words(one_sentence(model, settings, prefixes=[[D, A]]))[0] == [D, A, B]
    changed = settings.model_copy(update={"suppress_ids": (), "begin_suppress_ids": (A, B)})
    assert words(one_sentence(model, changed, prefixes=[[D]]))[0] == [D]
    assert words(one_sentence(model, settings.model_copy(update={"begin_suppress_ids": ()})))[0] == []


def test_constraints_move_with_all_their_tensors() -> None:
    settings = DecodingSettings(stop_ids=[5], begin_suppress_ids=[4, 3])
    constraints = Constraints.of(settings, [3, 2], torch.device("cpu"))
    assert all(tensor.is_meta for tensor in constraints.to(torch.device("meta")).tensors())
