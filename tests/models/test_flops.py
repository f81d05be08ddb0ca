"""The FLOPs of a model by formula equal those that PyTorch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.attention import use_backend
from regard.models import build, flops
from regard.models.bert import TextClassBatch
from regard.models.vit import ImageBatch
from regard.packed import Batch, FeatureBatch, PackedTokens, SeqBatch
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


def seq_batch(has_source: bool) -> SeqBatch:
    """A batch of equally long sentences: PyTorch also counts padding, and here is none."""
    sources = [[] if not has_source else [5 + i for i in range(SOURCE)] for _ in range(SENTENCES)]
    return SeqBatch.from_lists(sources, [[6 + i for i in range(TARGET)] for _ in range(SENTENCES)], bos=BOS)


def class_batch() -> TextClassBatch:
    return TextClassBatch.from_lists([[5 + i for i in range(SOURCE)] for _ in range(SENTENCES)])


def masked_batch() -> SeqBatch:
    tokens = PackedTokens.from_lists([[5 + i for i in range(TARGET)] for _ in range(SENTENCES)])
    loss_mask = torch.zeros(len(tokens.ids), dtype=torch.bool)
    loss_mask[[1, 8, 9, 20]] = True
    return SeqBatch(tokens, tokens, tokens.ids, loss_mask)


def settings_of(model: dict[str, Any], batch: Batch, text: bool, shared: bool) -> Any:
    corpus = "shapes" if isinstance(batch, ImageBatch) else "scenes" if isinstance(batch, FeatureBatch) else None
    data = {"imported": "text" if text else "pairs"} if corpus is None else {"corpus": corpus}
    return Recipe.model_validate({"data": data, "text": {"shared": shared}, "model": model}).model


CASES: dict[str, tuple[dict[str, Any], Batch]] = {
    "transformer": ({**SMALL, "encoder_layers": 2, "decoder_layers": 1}, seq_batch(True)),
    "transformer, gated with squeeze-and-excite": (
        {
            **SMALL,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "activation": "gated",
            "se_dim": 4,
            "tie_embeddings": False,
        },
        seq_batch(True),
    ),
    "gpt on text": ({"family": "gpt", **SMALL, "layers": 2, "max_positions": 32}, seq_batch(False)),
    "gpt on pairs": ({"family": "gpt", **SMALL, "layers": 2, "max_positions": 32}, seq_batch(True)),
    "gpt, relative on text": (
        {"family": "gpt", **SMALL, "layers": 2, "max_positions": 32, "positions": "relative"},
        seq_batch(False),
    ),
    **{
        f"gpt, {score} on text": (
            {"family": "gpt", **SMALL, "layers": 2, "max_positions": 32, "score": score},
            seq_batch(False),
        )
        for score in ("additive", "bilinear")
    },
    "transformer, additive and bilinear": (
        {"family": "transformer", **SMALL, "encoder_layers": 1, "decoder_layers": 2}
        | {"score": "additive", "cross_score": "bilinear"},
        seq_batch(True),
    ),
    "transformer, relative": (
        {**SMALL, "encoder_layers": 1, "decoder_layers": 2, "positions": "relative"},
        seq_batch(True),
    ),
    **{
        f"vit, {stem}, {pooling}": (
            {"family": "vit", **SMALL, "layers": 2, "patch": 8, "stem": stem, "pooling": pooling},
            ImageBatch(torch.rand(3, 24, 24, 3), torch.tensor([0, 1, 2])),
        )
        for stem, pooling in [("patches", "mean"), ("convolutions", "class-token")]
    },
    **{
        f"captioner, {stem}": (
            {"family": "captioner", **SMALL, "encoder_layers": 1, "decoder_layers": 2, "patch": 8, "stem": stem},
            FeatureBatch.from_lists([torch.rand(36, 192)] * 2, [[5, 6, 2], [7, 8, 2]], bos=BOS),
        )
        for stem in ("patches", "convolutions")
    },
    "recurrent bilinear, encoder narrower": (
        {"family": "recurrent", **RECURRENT, "encoder_width": 8, "attention": "luong", "score": "bilinear"},
        seq_batch(True),
    ),
    "bert masked-lm on text": ({"family": "bert", **SMALL, "layers": 2}, masked_batch()),
    "bert classifies": ({"family": "bert", **SMALL, "layers": 2, "task": "classify"}, class_batch()),
    **{
        f"recurrent {cell} {attention} {score} {feed}": (
            {"family": "recurrent", **RECURRENT, "cell": cell, "attention": attention, "score": score, "feed": feed}
            | {"heads": 2},
            seq_batch(True),
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
def test_forward_flops_equal_those_that_pytorch_counts(case: str) -> None:
    model, batch = CASES[case]
    settings = settings_of(model, batch, case.endswith("on text"), shared=True)
    module = build(settings, VOCABULARY, VOCABULARY, shared=True)
    with (
        FlopCounterMode(display=False) as counter,
        use_backend("plain"),
        torch.no_grad(),
    ):  # fused kernels are not counted
        module(batch)
    assert settings.forward_flops(batch, VOCABULARY) == counter.get_total_flops()


def test_a_backward_pass_takes_twice_the_flops_of_a_forward_pass() -> None:
    """It computes the gradients of both factors of every matmul, each as costly as the matmul itself."""
    model, batch = CASES["transformer"]
    settings = settings_of(model, batch, False, True)
    module = build(settings, VOCABULARY, VOCABULARY, shared=True)
    with FlopCounterMode(display=False) as counter, use_backend("plain"):
        module(batch).backward()
    assert flops.update(settings, batch, VOCABULARY) == counter.get_total_flops()
