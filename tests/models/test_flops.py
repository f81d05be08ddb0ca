"""The arithmetic of a model by formula is what PyTorch counts while it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.attention import use_backend
from regard.models import build, flops
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import Recipe
from regard.text import BOS

VOCABULARY, SENTENCES, SOURCE, TARGET = 50, 3, 5, 7
SMALL = {"width": 16, "ffn_width": 24, "heads": 2, "dropout": 0.0}
RECURRENT = {
    "width": 16,
    "encoder_width": 16,
    "embedding": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "dropout": 0.0,
}


def pairs(plain: bool) -> SeqBatch:
    """Equally long sentences: PyTorch counts padding too, and here is none."""
    sources = [[] if plain else [5 + i for i in range(SOURCE)] for _ in range(SENTENCES)]
    return SeqBatch.from_lists(sources, [[6 + i for i in range(TARGET)] for _ in range(SENTENCES)], bos=BOS)


def gaps() -> SeqBatch:
    row = PackedTokens.from_lists([[5 + i for i in range(TARGET)] for _ in range(SENTENCES)])
    counted = torch.zeros(len(row.ids), dtype=torch.bool)
    counted[[1, 8, 9, 20]] = True
    return SeqBatch(row, row, row.ids, counted)


def settings_of(model: dict[str, Any], text: bool, shared: bool) -> Any:
    data = {"imported": "text" if text else "pairs"}
    return Recipe.model_validate({"data": data, "text": {"shared": shared}, "model": model}).model


CASES: dict[str, tuple[dict[str, Any], SeqBatch]] = {
    "transformer": ({**SMALL, "encoder_layers": 2, "decoder_layers": 1}, pairs(False)),
    "transformer, gated and squeezed": (
        {
            **SMALL,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "activation": "gated",
            "se_dim": 4,
            "tie_embeddings": False,
        },
        pairs(False),
    ),
    "gpt on text": ({"family": "gpt", **SMALL, "layers": 2, "max_positions": 32}, pairs(True)),
    "gpt on pairs": ({"family": "gpt", **SMALL, "layers": 2, "max_positions": 32}, pairs(False)),
    "gpt, relative": (
        {"family": "gpt", **SMALL, "layers": 2, "max_positions": 32, "positions": "relative"},
        pairs(True),
    ),
    **{
        f"gpt, {score} on text": (
            {"family": "gpt", **SMALL, "layers": 2, "max_positions": 32, "score": score},
            pairs(True),
        )
        for score in ("additive", "bilinear")
    },
    "transformer, additive and bilinear": (
        {"family": "transformer", **SMALL, "encoder_layers": 1, "decoder_layers": 2}
        | {"score": "additive", "cross_score": "bilinear"},
        pairs(False),
    ),
    "bert fills": ({"family": "bert", **SMALL, "layers": 2}, gaps()),
    "bert classifies": ({"family": "bert", **SMALL, "layers": 2, "task": "classify"}, pairs(False)),
    **{
        f"recurrent {cell} {attention} {score} {feed}": (
            {"family": "recurrent", **RECURRENT, "cell": cell, "attention": attention, "score": score, "feed": feed}
            | {"heads": 2},
            pairs(False),
        )
        for cell, attention, score, feed in [
            ("lstm", "none", None, "every"),
            ("gru", "luong", "dot", "start"),
            ("lstm", "luong", "bilinear", "start"),
            ("gru", "bahdanau", "additive", "every"),
            ("gru", "bahdanau", "bilinear", "start"),
            ("lstm", "multihead", "scaled-dot", "start"),
            ("lstm", "multihead", "additive", "start"),
        ]
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_forward_pass_takes_what_the_formula_says(case: str) -> None:
    model, batch = CASES[case]
    text = case.endswith(("on text", "relative", "fills"))
    settings = settings_of(model, text, shared="classif" not in case)
    module = build(settings, VOCABULARY, VOCABULARY, shared="classif" not in case)
    with (
        FlopCounterMode(display=False) as counter,
        use_backend("plain"),
        torch.no_grad(),
    ):  # fused kernels are not counted
        module(batch)
    assert flops.forward(settings, batch, VOCABULARY) == counter.get_total_flops()


def test_the_gradients_take_twice_as_much_again() -> None:
    """The gradients of both factors of every product, each as much as the product itself."""
    model, batch = CASES["transformer"]
    settings = settings_of(model, False, True)
    module = build(settings, VOCABULARY, VOCABULARY, shared=True)
    with FlopCounterMode(display=False) as counter, use_backend("plain"):
        module(batch).backward()
    assert flops.update(settings, batch, VOCABULARY) == counter.get_total_flops()
