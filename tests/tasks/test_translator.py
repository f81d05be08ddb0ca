"""Lines in and as many lines out, also where what is read and what is written share one context."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from regard.models import build
from regard.models.gpt import GPTSettings
from regard.models.transformer_settings import TransformerSettings
from regard.recipes.schema import DecodingSettings, Recipe
from regard.tasks.translator import Translator
from regard.text import EOS, train

CONTEXT = 16
WORDS = train(["a b c d e f"], "word", 260)
LINES = ["a b c", "", "a " * 9, "b " * 11, "c " * 12, "d " * 40, "e"]


class Endless(torch.nn.Module):
    """A model that never generates EOS."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def start(self, source):
        return self.model.start(source)

    def step(self, state, tokens):
        logits, state = self.model.step(state, tokens)
        return logits.index_fill(-1, torch.tensor(EOS), -1e9), state


def translator(positions="learned", family="gpt", **settings):
    sizes = {"width": 8, "heads": 2, "ffn_width": 16, "max_positions": CONTEXT, "positions": positions}
    layers = {"layers": 1} if family == "gpt" else {"encoder_layers": 1, "decoder_layers": 1}
    kind = GPTSettings if family == "gpt" else TransformerSettings
    chosen = kind.model_validate({**sizes, **layers, "dropout": 0.0})
    recipe = Recipe.model_validate({"data": {"corpus": "copy"}, "text": {"unit": "word"}, "model": chosen})
    torch.manual_seed(1)
    model = Endless(build(chosen, len(WORDS), len(WORDS), True).eval())
    return Translator.for_recipe(model, (WORDS, WORDS), recipe, DecodingSettings(**{"beam": 2, **settings}))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_output_without_eos_fills_the_context(positions):
    answers = translator(positions)(LINES)
    assert [len(answer.source) for answer in answers] == [4, 0, 10, 12, 12, 12, 2]  # 12 of 16: room to write is left
    assert [answer.truncated for answer in answers] == [False, False, False, False, True, True, False]
    for line, answer in zip(LINES, answers, strict=True):
        assert (answer.hypotheses == ()) == (line == "")
        for hypothesis in answer.hypotheses:
            assert len(answer.source) + len(hypothesis.tokens) == CONTEXT and not hypothesis.finished


def test_a_forced_prefix_leaves_a_position_for_eos():
    translate = translator()
    forced = ["b " * 40] * len(LINES)
    for answer in translate(LINES, prefixes=forced):
        for hypothesis in answer.hypotheses:
            room = CONTEXT - len(answer.source)
            assert list(hypothesis.tokens[: room - 1]) == WORDS.encode("b " * (room - 1))
            assert len(hypothesis.tokens) == room


def test_a_sampled_translation_does_not_depend_on_the_batch():
    translate = replace(translator(method="sample"), seed=3)
    together = translate(LINES)
    for number, line in enumerate(LINES):
        [alone], other = translate([line], first=number), together[number]
        assert (alone.texts, alone.source, alone.truncated) == (other.texts, other.source, other.truncated)


def test_an_encoder_decoder_has_the_maximum_length_on_each_side():
    answers = translator("sinusoidal", "transformer")(LINES)
    assert [len(answer.source) for answer in answers] == [4, 0, 10, 12, 13, 16, 2]
    assert {len(h.tokens) for answer in answers for h in answer.hypotheses} == {CONTEXT}
