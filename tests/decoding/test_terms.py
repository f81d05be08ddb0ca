"""Outputs contain the terms they must contain and none they must avoid; and are the best of those."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.decoding.test_search import FakeModel, exhaustive, hashed, one_sentence, table, words
from tests.decoding.test_static_search import Taped, assert_same, found, model_of, sources

from regard.decoding import Hypothesis, SearchRequest, search, static_search, terms
from regard.decoding.continuous import Engine, EngineRunner
from regard.decoding.static_search import StaticRunner
from regard.decoding.terms import INNER, LEFT, RIGHT, Term, TermProgress, TermTable, TokenClasses, share_out
from regard.errors import UserError
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings
from regard.text import BOS, EOS

A, B, C, D, E = 3, 4, 5, 6, 7  # words of the tables below


def contains(tokens: Sequence[int], phrase: Sequence[int]) -> bool:
    return any(tuple(tokens[i : i + len(phrase)]) == tuple(phrase) for i in range(len(tokens) - len(phrase) + 1))


def satisfies(tokens: Sequence[int], terms: Sequence[Term]) -> bool:
    return all(any(contains(tokens, phrase) for phrase in term.alternatives) != term.avoid for term in terms)


# --- tables by hand -------------------------------------------------------------------------------------------------

ANIMALS = {
    BOS: {A: 0.6, B: 0.4},
    A: {EOS: 0.7, C: 0.3},
    B: {EOS: 0.4, C: 0.6},
    C: {EOS: 0.8, D: 0.2},
    D: {EOS: 1.0},
}
# Everything there is: A .42, B C .4*.6*.8 = .192, B .16, A C .6*.3*.8 = .144, B C D .048, A C D .036


@pytest.mark.parametrize(
    ("terms", "expected", "probability"),
    [
        ([], [A], 0.42),
        ([Term(((B,),))], [B, C], 0.192),
        ([Term(((C,),))], [B, C], 0.192),
        ([Term(((C,),)), Term(((A,),))], [A, C], 0.144),
        ([Term(((C, D),))], [B, C, D], 0.048),
        ([Term(((C, D),)), Term(((A,),))], [A, C, D], 0.036),
        ([Term(((D,), (C,)))], [B, C], 0.192),  # either: C is the more likely one
        ([Term(((A,),), avoid=True)], [B, C], 0.192),
        ([Term(((A,),), avoid=True), Term(((C,),), avoid=True)], [B], 0.16),
        ([Term(((B, C),), avoid=True), Term(((C,),))], [A, C], 0.144),
        ([Term(((D,),)), Term(((A,),), avoid=True)], [B, C, D], 0.048),
    ],
)
def test_the_best_output_that_satisfies_the_terms_of_a_table(
    terms: list[Term], expected: list[int], probability: float
) -> None:
    (best,) = one_sentence(table(ANIMALS), DecodingSettings(beam=4, length_penalty=0), terms=[terms])
    assert list(best.tokens) == expected
    assert best.score == pytest.approx(math.log(probability), abs=1e-5)


def test_one_beam_goes_on_with_the_term_where_it_would_end() -> None:
    # Greedy: A, then EOS .7 before C .3; the term demands C, after which D .2 would lose to EOS .8
    (best,) = one_sentence(table(ANIMALS), DecodingSettings(beam=1), terms=[[Term(((C,),))]])
    assert list(best.tokens) == [A, C]
    (best,) = one_sentence(table(ANIMALS), DecodingSettings(beam=1), terms=[[Term(((C, D),))]])
    assert list(best.tokens) == [A, C, D] and best.finished
    # A term that the model finds impossible comes where greedy search would end, and all of it
    (best,) = one_sentence(table(ANIMALS), DecodingSettings(beam=1), terms=[[Term(((D, B, E),))]])
    assert list(best.tokens) == [A, D, B, E] and best.finished


def test_overlapping_and_repeated_beginnings_are_matched() -> None:
    # A A B inside A A A B: after A A A the last two are its beginning, which a restart from zero would miss
    rows = {BOS: {A: 1.0}, A: {A: 0.5, B: 0.5}, B: {EOS: 1.0}}
    (best,) = one_sentence(
        table(rows), DecodingSettings(beam=3, length_penalty=0), terms=[[Term(((A, A, B),))]], prefixes=[[A, A, A]]
    )
    assert list(best.tokens) == [A, A, A, B]


def test_classes_tell_whole_words_from_parts() -> None:
    # A begins a word, B continues it, C is the next word: "A" as a whole word is met by A C, not by A B
    rows = {BOS: {A: 1.0}, A: {B: 0.9, C: 0.06, EOS: 0.04}, B: {EOS: 1.0}, C: {A: 0.5, EOS: 0.5}}
    ordinary = torch.arange(8) >= A
    continues = torch.arange(8) == B
    classes = TokenClasses(~ordinary, ordinary, ~continues)
    whole = Term(((LEFT, A, RIGHT), (INNER, A, RIGHT)))
    plain = DecodingSettings(beam=4, length_penalty=0)
    (best,) = one_sentence(table(rows), plain, terms=[[Term(((A,),))]], classes=classes)
    assert list(best.tokens) == [A, B]
    (best,) = one_sentence(table(rows), plain, terms=[[whole]], classes=classes)
    assert list(best.tokens) == [A]  # .04, before A C with .03; EOS ends the word
    (best,) = one_sentence(table(rows), plain, terms=[[Term(((INNER, A, RIGHT),))]], classes=classes)
    assert list(best.tokens) == [A, C, A]  # not at the beginning: .06 * .5 * .04; A A is impossible
    (best,) = one_sentence(table(rows), plain, terms=[[Term(((LEFT, C),))]], classes=classes)
    assert best.tokens[0] == C


def test_more_than_fits_is_not_met_and_what_fits_is() -> None:
    impossible = Term((tuple([A, B] * 10),))
    options: dict[str, Any] = dict(max_length=6, terms=[[impossible, Term(((C,),))]])
    (best,) = one_sentence(table(ANIMALS), DecodingSettings(beam=4), **options)
    assert best.finished and len(best.tokens) < 6
    short = Term(((E, E, E),))
    (best,) = one_sentence(table(ANIMALS), DecodingSettings(beam=4), max_length=6, terms=[[short]])
    assert satisfies(best.tokens, [short])
    # The limit of the settings leaves tokens for terms; that of the model does not
    settings = DecodingSettings(beam=4, max_ratio=1e-9, max_extra=2)
    (best,) = one_sentence(table(ANIMALS), settings, terms=[[short]])
    assert satisfies(best.tokens, [short]) and best.finished


def test_terms_need_a_beam_search_and_tokens() -> None:
    with pytest.raises(UserError, match="beam search"):
        one_sentence(table(ANIMALS), DecodingSettings(method="sample"), terms=[[Term(((A,),))]])
    with pytest.raises(ValueError, match="EOS"):
        one_sentence(table(ANIMALS), DecodingSettings(), terms=[[Term(((A, EOS),))]])
    with pytest.raises(ValueError, match="2 terms for 1"):
        one_sentence(table(ANIMALS), DecodingSettings(), terms=[[], []])


# --- banks ----------------------------------------------------------------------------------------------------------


def slow_share_out(total: list[float], bank: list[int], count: int) -> list[int]:
    """The best of every bank, the more likely first; then the second best; and so on."""
    kept: list[int] = []
    remaining = [i for i in sorted(range(len(total)), key=lambda i: -total[i]) if total[i] > -math.inf]
    while remaining and len(kept) < count:
        heads = [i for n, i in enumerate(remaining) if bank[i] not in [bank[j] for j in remaining[:n]]]
        kept += heads
        remaining = [i for i in remaining if i not in heads]
    return kept[:count]


def test_beams_are_shared_out_among_banks() -> None:
    total, bank = [-1.0, -2, -3, -4, -5, -6], [2, 2, 2, 1, 0, 0]
    assert slow_share_out(total, bank, 4) == [0, 3, 4, 1]
    assert share_out(torch.tensor([total]), torch.tensor([bank]), 4).tolist() == [[0, 3, 4, 1]]
    draw = random.Random(1)
    for _ in range(200):
        total = [draw.choice([draw.random(), -math.inf]) for _ in range(draw.randint(4, 12))]
        bank = [draw.randrange(4) for _ in total]
        expected = slow_share_out(total, bank, 4)
        assert share_out(torch.tensor([total]), torch.tensor([bank]), 4)[0].tolist()[: len(expected)] == expected


# --- every output there is ------------------------------------------------------------------------------------------

phrases = st.lists(st.integers(3, 5), min_size=1, max_size=2).map(tuple)
some_terms = st.lists(
    st.builds(Term, st.lists(phrases, min_size=1, max_size=2).map(tuple), st.booleans()), min_size=1, max_size=2
)


def slow_needed(tokens: tuple[int, ...], terms: Sequence[Term]) -> int:
    """The shortest alternatives of all unmet terms one after the other, less the longest match at the end."""
    unmet = [term for term in terms if not term.avoid and not satisfies(tokens, [term])]
    fewest = [min(map(len, term.alternatives)) for term in unmet]
    left = [
        min(
            len(a) - n
            for a in term.alternatives
            for n in range(len(a))
            if n <= len(tokens) and a[:n] == tokens[len(tokens) - n :]
        )
        for term in unmet
    ]
    return sum(fewest) - max((f - n for f, n in zip(fewest, left, strict=True)), default=0)


def stays_in_time(tokens: tuple[int, ...], terms: Sequence[Term], limit: int) -> bool:
    """Whether after every token enough tokens are left for the terms and EOS."""
    needs = [slow_needed(tokens[:n], terms) for n in range(1, len(tokens) + 1)]
    return all(need == 0 or need + n < limit for n, need in enumerate(needs, 1))


def stays_before_the_end(model: FakeModel, source: tuple[int, ...], tokens: tuple[int, ...], terms: list[Term]) -> bool:
    """Whether, where EOS was the most likely of what may follow and terms were unmet, a term was continued.

    There is no such restriction where avoided terms exclude every token that continues one.
    """
    avoided = [term for term in terms if term.avoid]
    for n, token in enumerate(tokens):
        row = model.logits(source, (BOS, *tokens[:n]))
        may_follow = [next_one for next_one in (3, 4, 5) if satisfies((*tokens[:n], next_one), avoided)]
        ends = max((EOS, *may_follow), key=row.__getitem__) == EOS
        if ends and slow_needed(tokens[:n], terms) and slow_needed(tokens[: n + 1], terms):
            unmet = [term for term in terms if not term.avoid and not satisfies(tokens[:n], [term])]
            continuing = {next_token(tokens[:n], phrase) for term in unmet for phrase in term.alternatives}
            if token not in continuing and continuing & {*may_follow}:
                return False
    return True


def next_token(tokens: tuple[int, ...], phrase: tuple[int, ...]) -> int:
    """The token that continues the longest beginning of a phrase at the end of the tokens."""
    begun = [n for n in range(len(phrase)) if n <= len(tokens) and phrase[:n] == tokens[len(tokens) - n :]]
    return phrase[max(begun)]


@settings(max_examples=25, deadline=None)
@given(some_terms, st.integers(0, 1000), st.sampled_from([0.0, 0.6]))
def test_beam_as_wide_as_the_space_finds_the_best_of_all_that_satisfy_the_terms(
    terms: list[Term], seed: int, alpha: float
) -> None:
    limit, model, source = 4, hashed(6), (seed, EOS)
    assume(slow_needed((), terms) < limit)  # else they may not fit, and hypotheses are not restricted
    everything = exhaustive(model, source, [3, 4, 5], limit, alpha)
    expected = [tokens for _, tokens, finished in everything if finished and satisfies(tokens, terms)]
    expected = [tokens for tokens in expected if stays_in_time(tokens, terms, limit)]
    expected = [tokens for tokens in expected if stays_before_the_end(model, source, tokens, terms)]
    how = DecodingSettings(beam=200, length_penalty=alpha, max_ratio=1e-9, max_extra=limit)
    request = SearchRequest(
        PackedTokens.from_lists([list(source)]), how, banned=[0, 1], terms=[terms], nbest=150, max_length=limit
    )
    hypotheses = search(model, request)[0]
    got = [h.tokens for h in hypotheses if h.finished and satisfies(h.tokens, terms)]
    assert got == expected
    if expected:  # those that satisfy the terms come first
        best = hypotheses[0]
        assert satisfies(best.tokens, [term for term in terms if not term.avoid])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(phrases, min_size=1, max_size=3).map(lambda many: Term(tuple(many))), max_size=3),
    st.integers(0, 1000),
    st.sampled_from([1, 2, 4]),
)
def test_every_term_is_met_whatever_the_beam(terms: list[Term], seed: int, beam: int) -> None:
    how = DecodingSettings(beam=beam, max_ratio=1, max_extra=2)
    request = SearchRequest(PackedTokens.from_lists([[seed, EOS]]), how, banned=[0, 1], terms=[terms], nbest=beam)
    for hypothesis in search(hashed(7), request)[0]:
        assert satisfies(hypothesis.tokens, terms)


@pytest.mark.parametrize("beam", [1, 3])
def test_avoided_terms_never_occur(beam: int) -> None:
    lines = [[n, EOS] for n in range(12)]
    avoided = [Term(((3,), (4, 5)), avoid=True), Term(((6, 6),), avoid=True)]
    how = DecodingSettings(beam=beam, max_ratio=1, max_extra=6)
    request = SearchRequest(PackedTokens.from_lists(lines), how, banned=[0, 1], terms=[avoided] * 12, nbest=beam)
    for hypotheses in search(hashed(8), request):
        assert all(satisfies(h.tokens, avoided) for h in hypotheses)


# --- bits -----------------------------------------------------------------------------------------------------------

patterns = st.builds(
    lambda first, ids, last: (*first, *ids, *last),
    st.sampled_from([(), (LEFT,), (INNER,)]),
    st.lists(st.integers(3, 6), min_size=1, max_size=4),
    st.sampled_from([(), (RIGHT,)]),
)
many_terms = st.lists(
    st.builds(Term, st.lists(patterns, min_size=1, max_size=20).map(tuple), st.booleans()), max_size=3
)


@settings(max_examples=60, deadline=None)
@given(st.lists(many_terms, min_size=1, max_size=3), st.integers(0, 1000))
def test_bits_count_the_tokens_that_the_definition_counts(each: list[list[Term]], seed: int) -> None:
    """With patterns of several words of bits (20 alternatives of 8 symbols), after every token of three."""
    assume(any(each))
    random_bits = torch.Generator().manual_seed(seed)
    classes = TokenClasses(*(torch.rand(8, generator=random_bits) < 0.5 for _ in range(3)))
    table = TermTable.of(each, torch.device("cpu"), classes)
    assert table is not None
    progress = TermProgress.create(table, beams=2)
    progress.reset()
    for _ in range(4):
        tokens = torch.randint(0, 8, (len(each), 2, 5), generator=random_bits)
        assert torch.equal(progress.needed_after(tokens), progress.needed(progress.after(tokens)))
        progress.advance(torch.randint(0, 2, (len(each), 2), generator=random_bits), tokens[..., 0])


def test_a_term_of_more_than_64_tokens() -> None:
    long = tuple(range(3, 73))
    table = TermTable.of([[Term((long,))]], torch.device("cpu"))
    assert table is not None
    progress = TermProgress.create(table, beams=1)
    progress.reset()
    progress.advance(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[3]]))
    assert progress.needed_after(torch.tensor([[[4, 3, 9]]])).tolist() == [[[68, 69, 70]]]


# --- batches and static shapes --------------------------------------------------------------------------------------


def random_terms(count: int, seed: int) -> list[list[Term]]:
    draw = random.Random(seed)

    def phrase() -> tuple[int, ...]:
        return tuple(draw.randrange(4, 24) for _ in range(draw.randint(1, 3)))

    return [
        [
            Term(tuple(phrase() for _ in range(draw.randint(1, 3))), draw.random() < 0.3)
            for _ in range(draw.choice([0, 1, 2]))
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize("beam", [1, 4])
def test_a_sentence_with_terms_does_not_depend_on_its_batch(beam: int) -> None:
    lines, terms = [[n, EOS] for n in range(16)], random_terms(16, 3)
    how = DecodingSettings(beam=beam, max_ratio=1, max_extra=6)

    def run(numbers: list[int], model: FakeModel) -> list[list[Hypothesis]]:
        row = PackedTokens.from_lists([lines[n] for n in numbers])
        return search(model, SearchRequest(row, how, banned=[0, 1], terms=[terms[n] for n in numbers]))

    alone = [run([n], hashed(24))[0] for n in range(16)]
    assert run(list(range(16)), hashed(24)) == alone
    for n in (n for n in range(16) if not terms[n]):  # and without terms, it is that of an ordinary search
        row = PackedTokens.from_lists([lines[n]])
        assert search(hashed(24), SearchRequest(row, how, banned=[0, 1]))[0] == alone[n]


@pytest.mark.parametrize("name", ["transformer", "gpt"])
@pytest.mark.parametrize("how", [dict(beam=1), dict(beam=4), dict(beam=3, no_repeat_ngram=2)])
def test_static_and_captured_steps_find_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str, how: dict[str, Any]
) -> None:
    monkeypatch.setattr(static_search, "CAPACITY", 10)
    monkeypatch.setattr(static_search, "MIN_BEAMS_TO_SHRINK", 0)
    model, run = model_of(name), Taped(bf16=False)
    for seed in (1, 2, 1):
        lines, terms = sources(7, seed), random_terms(7, seed)
        options: dict[str, Any] = dict(terms=terms, prefixes=[[4, 5][: n % 3] for n in range(7)])
        expected = found(model, lines, how, None, **options)
        for runner in (StaticRunner(), StaticRunner(round_sizes=True), run):
            assert_same(found(model, lines, how, runner, **options), expected)
        for (best, *_), required in zip(expected[0], terms, strict=True):
            assert satisfies(best.tokens, [term for term in required if not term.avoid])


def test_a_required_term_may_be_improbable_repeated_or_banned_by_ngrams() -> None:
    model = table({BOS: {A: 1.0}, A: {A: 1.0}}, size=8)
    how = DecodingSettings(beam=2, no_repeat_ngram=1, max_ratio=1e-9, max_extra=8)
    (best,) = one_sentence(model, how, terms=[[Term(((A, A),))]])
    assert contains(best.tokens, (A, A))
    assert words([best]) == [[A, A]]


def test_sentences_with_terms_join_running_batches() -> None:
    """Some arrive while others are searched; each finds what it finds alone."""
    model, lines, terms = model_of("transformer"), sources(8), random_terms(8, 5)
    how = DecodingSettings(beam=3, max_ratio=1.0, max_extra=6)
    requests = [SearchRequest(PackedTokens.from_lists([lines[n]]), how, terms=[terms[n]]) for n in range(8)]
    engine, results = Engine(model), {}
    runner = EngineRunner(engine)
    for n, request in enumerate(requests):
        (job,) = runner._jobs(request, request.constraints(), lambda end: results.update({end.number: end}), False)
        job.number = n
        engine.submit([job])
        engine.turn()
    while engine.waiting or engine.running:
        engine.turn()
    for n, request in enumerate(requests):
        expected = search(model, request)[0]
        found_here = results[n].outcome
        assert [h.tokens for h in found_here] == [h.tokens for h in expected]
        assert satisfies(found_here[0].tokens, terms[n])


@pytest.mark.parametrize("beam", [1, 4])
def test_columns_without_a_candidate_change_nothing(monkeypatch: pytest.MonkeyPatch, beam: int) -> None:
    lines, term_lists = sources(8), random_terms(8, 7)
    model, how = model_of("transformer"), dict(beam=beam, max_ratio=1.0, max_extra=6)
    compacted = found(model, lines, how, None, terms=term_lists)
    monkeypatch.setattr(terms, "_compacted", lambda tokens, valid: (tokens, valid))
    assert_same(found(model, lines, how, None, terms=term_lists), compacted)
