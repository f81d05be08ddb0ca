"""Search from a prompt: its last token is fed first, repetition is penalised, and a watcher may stop beams."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from causal import Causal
from regard.decoding import Hypothesis, SearchRequest, search
from regard.decoding.constraints import Constraints
from regard.decoding.watching import Beams
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings
from regard.text import BOS, EOS

SIZE = 12


def decoding(tokens: int, **more: object) -> DecodingSettings:
    """As many tokens as are asked for, whatever the source."""
    return DecodingSettings.model_validate(
        {"max_ratio": 1e-9, "max_extra": tokens, "length_penalty": 0, "beam": 1, **more}
    )


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(4, SIZE) for _ in range(draw.randint(1, 6))] for _ in range(count)]


@pytest.mark.parametrize("beam", [1, 3])
def test_a_prompt_as_source_equals_the_prompt_as_forced_prefix(beam: int) -> None:
    model, given = Causal(SIZE, 100), prompts(12)
    source = PackedTokens.from_lists([[BOS, *prompt[:-1]] for prompt in given])
    after = search(
        model, SearchRequest(source, decoding(8, beam=beam), begin=[prompt[-1] for prompt in given], banned=[0, 1, 3])
    )
    for prompt, (found, *_) in zip(given, after, strict=True):
        settings = decoding(len(prompt) + 8, beam=beam)
        ((forced, *_),) = search(
            model, SearchRequest(PackedTokens.from_lists([[]]), settings, prefixes=[prompt], banned=[0, 1, 3])
        )
        assert forced.tokens == (*prompt, *found.tokens) and forced.finished == found.finished
        assert forced.logprobs[len(prompt) :] == pytest.approx(found.logprobs, abs=1e-5)


def test_bos_is_fed_first_by_default() -> None:
    model, source = Causal(SIZE, 100), PackedTokens.from_lists(prompts(5))
    assert search(model, SearchRequest(source, decoding(6))) == search(
        model, SearchRequest(source, decoding(6), begin=[BOS] * 5)
    )
    assert search(model, SearchRequest(source, decoding(6))) != search(
        model, SearchRequest(source, decoding(6), begin=[7] * 5)
    )


def test_each_sentence_has_its_own_maximum_length() -> None:
    source = PackedTokens.from_lists(prompts(4))
    found = search(
        Causal(SIZE, 100), SearchRequest(source, decoding(9, method="sample"), banned=[EOS], max_length=[3, 1, 20, 5])
    )
    assert [len(h.tokens) for (h,) in found] == [3, 1, 9, 5]


# --- repetition penalty ---------------------------------------------------------------------------------------------

A, B, C, D = 4, 5, 6, 7


def rules(penalty: float, said: list[list[int]]) -> Constraints:
    settings = DecodingSettings(repetition_penalty=penalty)
    return Constraints.of(settings, [1] * len(said), torch.device("cpu"), prompts=said)


def test_logits_of_repeated_tokens_are_divided_if_positive_and_multiplied_if_negative() -> None:
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0, 3.0, -2.0, 1.0, -1.0]]] * 2)
    history = torch.tensor([[[C]], [[D]]])
    found = rules(2.0, [[A, B], [A, A, A]]).penalize_repetition(logits, history)
    assert found[0, 0].tolist() == [0, 0, 0, 0, 1.5, -4.0, 0.5, -1.0]  # A and B in the prompt, C since
    assert found[1, 0].tolist() == [0, 0, 0, 0, 1.5, -2.0, 1.0, -2.0]  # A once, however often; D since; not 0 for None


def test_no_penalty_changes_nothing() -> None:
    logits = torch.randn(1, 2, 8)
    assert rules(1.0, [[A]]).penalize_repetition(logits, torch.tensor([[[B], [C]]])) is logits


class Always:
    """The same logits at every step."""

    def __init__(self, logits: list[float]) -> None:
        self.logits = torch.tensor(logits)

    def start(self, source: PackedTokens) -> Always:
        return self

    def reorder(self, parents: Tensor) -> Always:
        return self

    def select(self, sentences: Tensor) -> Always:
        return self

    def step(self, state: Always, tokens: Tensor) -> tuple[Tensor, Always]:
        return self.logits.expand(*tokens.shape, -1), self


def test_greedy_with_a_penalty_by_hand() -> None:
    """Logits A 3, B 2, C 1 and the rest 0, halved once said: A (3), then B (2 before A's 1.5), then A (1.5), and so on.

    Log-probabilities are those of the discouraged distribution, the one that decided.
    """
    model = Always([0, 0, 0, 0, 3, 2, 1, 0])
    ((found,),) = search(model, SearchRequest(PackedTokens.from_lists([[]]), decoding(4, repetition_penalty=2.0)))
    assert found.tokens == (A, B, A, A)

    def logp(chosen: float, *others: float) -> float:
        return chosen - math.log(sum(map(math.exp, [chosen, *others])) + 5)  # five logits of 0

    assert found.logprobs == pytest.approx([logp(3, 2, 1), logp(2, 1.5, 1), logp(1.5, 1, 1), logp(1.5, 1, 1)], abs=1e-6)
    ((prompted,),) = search(
        model, SearchRequest(PackedTokens.from_lists([[]]), decoding(2, repetition_penalty=2.0), prompts=[[A]])
    )
    assert prompted.tokens == (B, A)


@pytest.mark.parametrize("method", ["beam", "sample"])
def test_the_penalty_does_not_depend_on_the_batch(method: str) -> None:
    settings, given = decoding(10, method=method, repetition_penalty=1.7, beam=2), prompts(9)
    model = Causal(SIZE, 100)
    together = search(model, SearchRequest(PackedTokens.from_lists(given), settings, prompts=given, seed=3))
    for n, prompt in enumerate(given):
        (alone,) = search(
            model, SearchRequest(PackedTokens.from_lists([prompt]), settings, prompts=[prompt], seed=3, lines=[n])
        )
        assert [h.tokens for h in alone] == [h.tokens for h in together[n]]


# --- watchers -------------------------------------------------------------------------------------------------------


def watched(found_at: dict[int, int], method: str = "sample", count: int = 4) -> list[Hypothesis]:
    """Sentence n is stopped once it has found_at[n] tokens."""

    def watch(sentences: list[int], beams: Beams) -> Tensor:
        length = beams.tokens.shape[-1]
        stop = torch.tensor([found_at.get(n) == length for n in sentences])
        return stop[:, None].expand_as(beams.alive)

    source = PackedTokens.from_lists(prompts(count))
    found = search(Causal(SIZE, 100), SearchRequest(source, decoding(7, method=method), banned=[EOS]), watch=watch)
    return [h for (h,) in found]


@pytest.mark.parametrize("method", ["beam", "sample"])
def test_a_stopped_hypothesis_keeps_its_tokens_and_is_not_finished(method: str) -> None:
    whole, stopped = watched({}, method), watched({1: 3, 3: 1}, method)
    assert [len(h.tokens) for h in whole] == [7, 7, 7, 7]
    assert [len(h.tokens) for h in stopped] == [7, 3, 7, 1]
    for long, short in zip(whole, stopped, strict=True):
        assert short.tokens == long.tokens[: len(short.tokens)]
        assert short.logprobs == long.logprobs[: len(short.tokens)] and not short.finished


def test_a_stopped_beam_competes_with_its_final_score() -> None:
    """A .5 and B .3 and the end .2 at every step: stopped, A scores ln .5, before A A with ln .25."""

    def watch(sentences: list[int], beams: Beams) -> Tensor | None:
        return beams.tokens[..., -1] == A if beams.tokens.shape[-1] == 1 else None

    logits = [-math.inf, -math.inf, math.log(0.2), -math.inf, math.log(0.5), math.log(0.3)]
    (found,) = search(
        Always(logits), SearchRequest(PackedTokens.from_lists([[]]), decoding(5, beam=3), nbest=2), watch=watch
    )
    assert [(h.tokens, h.finished) for h in found] == [((A,), False), ((), True)]
    assert [h.score for h in found] == pytest.approx([math.log(0.5), math.log(0.2)], abs=1e-6)


def test_a_watcher_sees_every_step_and_may_stop_nothing() -> None:
    seen: list[tuple[list[int], int]] = []
    source, settings = PackedTokens.from_lists(prompts(3)), decoding(4, method="sample")

    def watch(sentences: list[int], beams: Beams) -> None:
        seen.append((list(sentences), beams.tokens.shape[-1]))

    model = Causal(SIZE, 100)
    found = search(model, SearchRequest(source, settings, banned=[EOS], max_length=[4, 2, 4]), watch=watch)
    assert found == search(model, SearchRequest(source, settings, banned=[EOS], max_length=[4, 2, 4]))
    assert seen == [([0, 1, 2], 1), ([0, 1, 2], 2), ([0, 2], 3), ([0, 2], 4)]


def test_wrong_numbers_of_first_tokens_and_prompts() -> None:
    with pytest.raises(ValueError, match="2 first tokens for 1"):
        search(Causal(SIZE, 9), SearchRequest(PackedTokens.from_lists([[]]), decoding(1), begin=[4, 5]))
    with pytest.raises(ValueError, match="2 prompts for 1"):
        search(Causal(SIZE, 9), SearchRequest(PackedTokens.from_lists([[]]), decoding(1), prompts=[[4], [5]]))
