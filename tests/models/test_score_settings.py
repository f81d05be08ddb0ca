"""Every attention score in every model family: it learns, and caches and recorders change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import models
from regard.attention import Additive, MultiHeadAttention, ScaledDot, Score, use_backend
from regard.errors import UserError
from regard.interpret.recorder import Recorder
from regard.models import SequenceModel
from regard.models.bert import TextClassBatch
from regard.models.decoder_state import StaticShape
from regard.models.recurrent import SourceAttention
from regard.packed import SeqBatch
from regard.recipes import load
from regard.registry import MODELS, SCORES
from regard.text import BOS, EOS

SOURCES = [[5, 6, 7, EOS], [EOS], [8, 9, 10, 11, 12, EOS]]
TARGETS = [[4, EOS], [5, 6, 7, EOS], [EOS]]
VOCABULARY = 16
SMALL: dict[str, Any] = {"width": 8, "heads": 2, "dropout": 0.0}
DEEP = {"encoder_layers": 1, "decoder_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "transformer": {"family": "transformer", "ffn_width": 8, **DEEP},
    "recurrent, bahdanau": {"family": "recurrent", "encoder_width": 8, "embedding": 6, **DEEP},
    "recurrent, luong": {"family": "recurrent", "attention": "luong", "encoder_width": 8, "embedding": 6, **DEEP},
    "recurrent, multihead": {
        "family": "recurrent",
        "attention": "multihead",
        "encoder_width": 6,
        "embedding": 6,
        **DEEP,
    },
    "gpt": {"family": "gpt", "ffn_width": 8, "layers": 2},
    "gpt, window": {"family": "gpt", "ffn_width": 8, "layers": 2, "mask": "window", "mask_size": 3},
    "bert": {"family": "bert", "task": "classify", "ffn_width": 8, "layers": 2},
}


class Cosine(Score):
    """A new score, as a user would write it: neither a dot product nor learned."""

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return nn.functional.cosine_similarity(query.unsqueeze(-2), key.unsqueeze(-3), dim=-1)


def make_model(kind: str, score: str, **changes: Any) -> SequenceModel:
    """Return a model in float64 with random biases."""
    given = {**SMALL, **KINDS[kind], "score": score, **changes}
    torch.manual_seed(1)
    model = models.build(MODELS[given["family"]].Settings.model_validate(given), VOCABULARY, VOCABULARY, True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.double().eval()


def scores_of(model: nn.Module) -> list[Score]:
    return [m.score for m in model.modules() if isinstance(m, MultiHeadAttention | SourceAttention)]


def pairs() -> SeqBatch:
    return SeqBatch.from_lists(SOURCES, TARGETS, bos=BOS, source_size=14, target_size=9)


def examples(kind: str) -> Any:
    return TextClassBatch.from_lists(SOURCES, [5, 6, 7][: len(SOURCES)]) if kind == "bert" else pairs()


every_score = pytest.mark.parametrize("score", [*SCORES, "cosine"])


def in_every_family(test: Any) -> Any:
    return every_score(pytest.mark.parametrize("kind", KINDS)(test))


@pytest.fixture(autouse=True)
def new_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the score "cosine" during a test."""
    monkeypatch.setitem(SCORES._entries, "cosine", Cosine)


@in_every_family
def test_every_attention_uses_the_score_and_its_weights_get_gradients(kind: str, score: str) -> None:
    model = make_model(kind, score).train()
    assert scores_of(model) and {type(each) for each in scores_of(model)} == {SCORES[score]}
    model(examples(kind), 0.1).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:  # a model need not use all of its embeddings
            assert parameter.grad.isfinite().all(), name
        if ".score." in name and not name.endswith("key.bias"):
            assert parameter.grad is not None and parameter.grad.any(), name


@every_score
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bert"])
def test_cached_steps_equal_a_full_pass(kind: str, score: str) -> None:
    """Also with caches of constant shapes, as CUDA graphs need them."""
    model, batch = make_model(kind, score), pairs()
    with torch.no_grad():
        full_pass = batch.inputs.layout.split(model.logits(batch))
        inputs = batch.inputs.layout.pad(batch.inputs.ids)  # [N, L]
        states = [model.start(batch.source)]
        if model.has_static_state:
            shape = StaticShape(len(SOURCES), 1, inputs.shape[1], max(map(len, SOURCES)))
            states.append(model.static_state(model.start(batch.source), shape))
        for state in states:
            for t, tokens in enumerate(inputs.unbind(1)):
                logits, state = model.step(state, tokens[:, None])
                for n, target in enumerate(TARGETS):
                    if t < len(target):
                        torch.testing.assert_close(logits[n, 0], full_pass[n][t], msg=f"sentence {n}, token {t}")


@in_every_family
def test_a_recorder_changes_nothing_and_its_weights_sum_to_1(kind: str, score: str) -> None:
    model, batch = make_model(kind, score), examples(kind)
    logits = model.logits(batch)
    with Recorder(model) as seen:
        assert torch.equal(model.logits(batch), logits)
    for attended in seen.attention.values():
        weights = attended.sentence(2)
        torch.testing.assert_close(torch.as_tensor(weights).sum(-1), torch.ones(weights.shape[:-1]).to(weights))


@in_every_family
def test_a_requested_backend_is_used_for_the_scores_that_it_supports(kind: str, score: str) -> None:
    model, batch = make_model(kind, score), examples(kind)
    outputs = []
    for backend in ("plain", "fused", "small", "auto"):
        with use_backend(backend):
            outputs.append(model.logits(batch))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])


def test_cross_attention_may_have_another_score() -> None:
    model = make_model("transformer", "scaled-dot", cross_score="additive")
    attentions = {name: m.score for name, m in model.named_modules() if isinstance(m, MultiHeadAttention)}
    assert {name.rpartition(".")[2]: type(score) for name, score in attentions.items()} == {
        "self_attn": ScaledDot,
        "cross_attn": Additive,
    }
    assert not model.static_shapes and make_model("transformer", "bilinear").static_shapes


@every_score
def test_rotary_and_relative_positions_in_an_encoder_decoder_with_any_cross_score(score: str) -> None:
    for positions in ("rotary", "relative"):
        model, batch = make_model("transformer", "scaled-dot", cross_score=score, positions=positions), pairs()
        with torch.no_grad():
            full_pass, state = batch.inputs.layout.split(model.logits(batch))[1], model.start(batch.source)
            for t, tokens in enumerate(batch.inputs.layout.pad(batch.inputs.ids).unbind(1)):
                logits, state = model.step(state, tokens[:, None])
                torch.testing.assert_close(logits[1, 0], full_pass[t])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["score=cosin"], f"--set model.score=cosin: must be {', '.join(SCORES)} or cosine"),
        (["score=dot", "positions=rotary"], 'positions = "rotary" needs score = "scaled-dot"'),
        (["family=recurrent", "attention=none", "score=dot"], 'attention = "none" has no score'),
        (
            ["family=recurrent", "score=dot", "width=10"],
            'needs width = encoder_width (bilinear, additive, graph-additive and attention = "multihead" do not)',
        ),
    ],
)
def test_a_score_that_does_not_fit_is_refused_in_one_line(changes: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        load("copy", [f"model.{change}" for change in changes])
    assert message in str(raised.value)
