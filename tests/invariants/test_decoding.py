"""Invariants of decoding: step by step, beam by beam, batch by batch, line by line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from families import FIRST_WORD, SEEDS, Case, logits_of
from torch import Tensor

from regard.decoding import Hypothesis, SearchRequest, score, search
from regard.decoding.decisive import decisive
from regard.recipes.schema import DecodingSettings
from regard.tasks.translator import Translator
from regard.text import BOS, EOS, PAD, Tokenizer
from regard.text import train as train_tokenizer

seeds = pytest.mark.parametrize("seed", SEEDS)


def full_pass(made: Case, sources: list[Any], histories: list[list[int]]) -> Tensor:
    """[len(histories), V] logits of the token after each history, by teacher forcing without a cache."""
    batch = made.pack(sources, [[*history[1:], EOS] for history in histories])
    batch = made.cast(batch, next(made.model.parameters()).dtype)
    return torch.stack([part[-1] for part in logits_of(made, batch)])


@pytest.mark.invariant("cached = uncached")
@seeds
def test_steps_with_a_cache_are_full_passes_over_the_histories(case: Any, seed: int) -> None:
    """Beams multiply, change places, die out; sentences leave and change places; the cache outgrows its room of 16."""
    made: Case = case(seed, pairs=4)
    made.model.double()  # without norms in effect, features are large, and so is the rounding of float32
    random = Random(seed)
    inside, beams = list(range(4)), 1
    histories = [[[BOS]] for _ in inside]
    with torch.no_grad():
        state = made.model.start(made.cast(made.batch(), torch.float64).source)
        for step in range(20):
            tokens = torch.tensor([[history[-1] for history in own] for own in histories])
            logits, state = made.model.step(state, tokens)
            sources = [made.sources[n] for n in inside for _ in range(beams)]
            expected = full_pass(made, sources, [history for own in histories for history in own])
            torch.testing.assert_close(logits.flatten(0, 1), expected, atol=1e-8, rtol=1e-8)
            if step in (3, 11):  # one sentence leaves, the others change places
                stay = random.sample(range(len(inside)), len(inside) - 1)
                state = state.select(torch.tensor(stay))
                inside, histories = [inside[n] for n in stay], [histories[n] for n in stay]
            if step != 7:  # and once nothing is reordered
                beams = random.choice([1, 2, 3])
                parents = [[random.randrange(len(own)) for _ in range(beams)] for own in histories]
                state = state.reorder(torch.tensor(parents))
                histories = [[own[k] for k in chosen] for own, chosen in zip(histories, parents, strict=True)]
            histories = [[[*h, random.randrange(made.vocabulary)] for h in own] for own in histories]
    assert len(inside) == 2 and len(histories[0][0]) == 21


@pytest.mark.invariant("beam of one = greedy")
@seeds
def test_a_beam_of_one_takes_the_best_token_each_time(
    case: Any, seed: int, record_property: Callable[[str, object], None]
) -> None:
    made: Case = case(seed, pairs=5)
    settings = DecodingSettings(beam=1, max_ratio=1.5, max_extra=4)
    request = SearchRequest(made.source(), settings, banned=[PAD, BOS])
    found = search(made.model, request)
    close = 0
    for n, (source, (hypothesis,)) in enumerate(zip(made.sources, found, strict=True)):
        history, total = [BOS], 0.0
        limit = math.floor(1.5 * len(source) + 4)
        while len(history) <= limit and history[-1] != EOS:
            with torch.no_grad():
                logp = made.next_logits(source, history).log_softmax(-1)
            logp[[PAD, BOS]] = -math.inf
            history.append(int(logp.argmax()))
            total += float(logp.max())
        expected = tuple(t for t in history[1:] if t != EOS)
        if hypothesis.tokens != expected and not decisive(made.model, request, found)[n]:
            close += 1
        else:
            assert hypothesis.tokens == expected
            assert hypothesis.finished == (history[-1] == EOS)
            assert sum(hypothesis.logprobs) == pytest.approx(total, abs=1e-4)
    record_property("close", [close, len(found)])


def everything(made: Case, source: Any, longest: int, alpha: float) -> list[Hypothesis]:
    """Every output of at most `longest` tokens (the end mark counted) with its score, best first."""
    words = range(FIRST_WORD - 1, made.vocabulary)  # unknown words may be said here: one token more to choose from
    outputs = [tokens for length in range(longest + 1) for tokens in itertools.product(words, repeat=length)]
    targets = [[*tokens, EOS] for tokens in outputs]
    scored = score(made.model.logits, made.pack([source] * len(targets), targets))
    found = []
    for tokens, logprobs in zip(outputs, scored, strict=True):
        finished = len(tokens) < longest
        counted = logprobs if finished else logprobs[:-1]  # cut before it could end
        penalty = ((5 + len(counted)) / 6) ** alpha
        found.append(Hypothesis(tokens, tuple(counted), sum(counted) / penalty, finished))
    return sorted(found, key=lambda one: -one.score)


@pytest.mark.invariant("widest beam = exhaustive search")
@pytest.mark.parametrize(
    ("alpha", "early", "seed"),
    [  # every day, half of the models with each pair of settings, and half of the pairs with each model
        pytest.param(alpha, early, seed, marks=pytest.mark.slow if (n + early + seed) % 2 else ())
        for n, alpha in enumerate([0.0, 0.6, 1.0])
        for early in (True, False)
        for seed in SEEDS
    ],
)
def test_a_beam_as_wide_as_the_space_finds_and_ranks_everything(
    case: Any, seed: int, alpha: float, early: bool
) -> None:
    made: Case = case(seed, pairs=2, vocabulary=6)  # three tokens to say (3, 4, 5) and the end mark
    everywhere = 1 + 3 + 9 + 27  # outputs of 0, 1 and 2 words that ended, and of 3 that were cut
    settings = DecodingSettings(beam=64, length_penalty=alpha, early_stopping=early, max_ratio=0.01, max_extra=3)
    complete = [everything(made, source, 3, alpha) for source in made.sources]
    for nbest in (everywhere, 1):
        found = search(made.model, SearchRequest(made.source(), settings, banned=[PAD, BOS], nbest=nbest))
        for expected, hypotheses in zip(complete, found, strict=True):
            assert len(expected) == everywhere and len(hypotheses) == nbest
            assert [h.score for h in hypotheses] == pytest.approx(
                [e.score for e in expected[:nbest]], rel=1e-5, abs=1e-4
            )
            best = {(e.tokens, e.finished): e for e in expected}
            for hypothesis in hypotheses:
                twin = best.pop((hypothesis.tokens, hypothesis.finished))  # none comes twice
                assert hypothesis.score == pytest.approx(twin.score, rel=1e-5, abs=1e-4)
                assert hypothesis.logprobs == pytest.approx(twin.logprobs, rel=1e-5, abs=1e-4)


@pytest.mark.invariant("batch size and order change nothing")
@pytest.mark.generates
@pytest.mark.parametrize(
    ("beam", "seed"),
    [
        pytest.param(beam, seed, marks=pytest.mark.slow if (beam == 1) != (seed % 3 == 0) else ())
        for beam in (1, 4)
        for seed in SEEDS
    ],
)
def test_a_sentence_does_not_notice_its_batch(
    case: Any, seed: int, beam: int, record_property: Callable[[str, object], None]
) -> None:
    made: Case = case(seed, pairs=6, longest=12)
    settings = DecodingSettings(beam=beam, max_extra=5)
    outputs, close = [], set()
    for batches in batches_of_six(seed):
        hypotheses = {}
        for chosen in batches:
            found = search(made.model, SearchRequest(made.source(chosen), settings, nbest=beam))
            hypotheses.update(zip(chosen, found, strict=True))
        outputs.append(hypotheses)

    @cache
    def decided() -> list[bool]:
        request = SearchRequest(made.source(list(range(6))), settings, nbest=beam)
        return decisive(made.model, request, [outputs[0][n] for n in range(6)])

    for n in range(6):
        for other in outputs[1:]:
            same = [h.tokens for h in other[n]] == [h.tokens for h in outputs[0][n]]
            if not same and not decided()[n]:
                close.add(n)
            else:
                assert [h.tokens for h in other[n]] == [h.tokens for h in outputs[0][n]]
                scores = [h.score for h in outputs[0][n]]
                assert [h.score for h in other[n]] == pytest.approx(scores, abs=1e-4)
    record_property("close", [len(close), 6])


def batches_of_six(seed: int) -> list[list[list[int]]]:
    """Return six sentences in one batch, each alone, in another order, and in two batches."""
    order = Random(seed).sample(range(6), 6)
    return [[list(range(6))], [[n] for n in range(6)], [order], [order[:2], order[2:]]]


@pytest.mark.invariant("batch size and order change nothing")
@pytest.mark.generates
@seeds
def test_logits_in_float64_do_not_depend_on_the_batch(case: Any, seed: int) -> None:
    """Rounding hides nothing."""
    made: Case = case(seed, pairs=6, longest=12)
    exact = replace(made, model=deepcopy(made.model).double())
    logits = [
        {
            n: part
            for chosen in batches
            for n, part in zip(
                chosen, logits_of(exact, made.cast(made.batch(only=chosen), dtype=torch.float64)), strict=True
            )
        }
        for batches in batches_of_six(seed)
    ]
    for n in range(6):
        for other in logits[1:]:
            torch.testing.assert_close(other[n], logits[0][n], atol=1e-10, rtol=1e-10)


@pytest.mark.invariant("batch size and order change nothing")
@seeds
def test_what_is_made_of_a_sentence_does_not_depend_on_its_batch(case: Any, seed: int) -> None:
    made: Case = case(seed, pairs=12, longest=12)
    together = logits_of(made, made.batch())
    order = Random(seed).sample(range(12), 12)
    for chosen in (order[:5], order[5:]):
        for n, logits in zip(chosen, logits_of(made, made.batch(only=chosen)), strict=True):
            torch.testing.assert_close(logits, together[n], atol=1e-5, rtol=1e-5)


# -- lines of text -----------------------------------------------------------------------------------------------------

LINES = [
    "a cat",
    "",
    "the dog saw a cat .",
    "   ",
    "a",
    "\t",
    "the cat",
    "",
    "zebra \u00e9\u4e2d <s> </s>",
    "a cat",
    " a  dog ",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(LINES * 3, "char", 300)


def translator(made: Case, tokenizer: Tokenizer, **settings: Any) -> Translator:
    chosen = DecodingSettings.model_validate({"beam": 2, "max_ratio": 1.0, "max_extra": 3, **settings})
    return Translator(made.model, (tokenizer, tokenizer), chosen, longest=16)


@pytest.mark.invariant("n lines in = n lines out")
@pytest.mark.parametrize("method", ["beam", "sample"])
@seeds
def test_as_many_lines_come_out_as_went_in(case: Any, seed: int, tokenizer: Tokenizer, method: str) -> None:
    made: Case = case(seed, vocabulary=len(tokenizer))
    translate = translator(made, tokenizer, method=method)
    answers = translate(LINES)
    assert len(answers) == len(LINES)
    for line, answer in zip(LINES, answers, strict=True):
        assert "\n" not in answer.texts[0] and "\r" not in answer.texts[0]
        assert bool(answer.hypotheses) == bool(line.strip())  # a blank line is never searched
        if not line.strip():
            assert answer.texts == ("",)
    assert translate([]) == []
    assert [a.texts for a in translate(["", "  "])] == [("",), ("",)]
    assert answers[8].truncated and not answers[0].truncated  # of 16 source tokens the ninth line has more


@pytest.mark.invariant("batch size and order change nothing")
@pytest.mark.generates
@pytest.mark.reads_lines
@pytest.mark.parametrize("method", ["beam", "sample"])
@seeds
def test_a_line_does_not_notice_the_lines_around_it(case: Any, seed: int, tokenizer: Tokenizer, method: str) -> None:
    """The text is the same for any batch size; for any order too, as long as nothing is drawn by line number."""
    made: Case = case(seed, vocabulary=len(tokenizer))
    texts = [a.texts for a in translator(made, tokenizer, method=method)(LINES)]
    for batch_tokens in (1, 40):
        assert [a.texts for a in translator(made, tokenizer, method=method, batch_tokens=batch_tokens)(LINES)] == texts
    later = translator(made, tokenizer, method=method)(LINES[4:], first=4)
    assert [a.texts for a in later] == texts[4:]
    if method == "beam":
        order = Random(seed).sample(range(len(LINES)), len(LINES))
        shuffled = translator(made, tokenizer)([LINES[n] for n in order])
        assert [a.texts for a in shuffled] == [texts[n] for n in order]
        assert texts[0] == texts[9]  # the same line twice
