"""Ensembles: a token's probability is the mean over the members."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_runs import make, make_run

import regard
from regard.decoding import SearchRequest, score, search
from regard.errors import UserError
from regard.models.ensemble import Ensemble, mean_logprobs
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import DecodingSettings
from regard.text import BOS

LINES = ["this cat is very large", "the dog sees the cat", "", "a cat"]
PAIRS = [(line, "este gato") for line in LINES if line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make runs that share one vocabulary: two Transformers with different seeds, and others."""
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "one": make_run(folder / "one", "transformer", seed=1),
        "two": make_run(folder / "two", "transformer", seed=2),
        "recurrent": make_run(folder / "recurrent", "recurrent (additive)", seed=3),
        "gpt": make_run(folder / "gpt", "gpt on pairs", seed=4),
        "short": make_run(folder / "short", "transformer", max_positions=24),
        "text": make_run(folder / "text", "gpt"),
        "other-vocabulary": make_run(folder / "other-vocabulary", "gpt on pairs, two vocabularies"),
    }
    for name, data in (("lower", {"lowercase": True}), ("tagged", {"source_tag": "<es>"})):
        settings = made["one"].recipe.model_dump()
        run = made[name] = make(folder / name, {**settings, "data": {"corpus": "en-es", **data}})
        run.save_tokenizers(*made["one"].tokenizers)
    made["unfinished"] = make_run(folder / "unfinished", "transformer")
    made["unfinished"].best.unlink()
    return {name: run.path for name, run in made.items()}


def test_the_mean_of_probabilities_not_of_their_logarithms() -> None:
    """The mean of 0.9 and 0.5 is 0.7; the mean of their logarithms would give sqrt(0.45) = 0.67."""
    one, other = (
        torch.tensor([0.9, 0.1]).log(),
        torch.tensor([0.5, 0.5]).log() + 7,
    )  # logits are defined up to a constant
    assert mean_logprobs([one, other]).softmax(-1).tolist() == pytest.approx([0.7, 0.3])


def test_a_token_that_no_member_allows_stays_impossible() -> None:
    never = torch.tensor([0.0, -math.inf])
    assert mean_logprobs([never, never]).tolist() == [0.0, -math.inf]
    assert mean_logprobs([never, torch.tensor([0.0, 0.0])]).softmax(-1).tolist() == pytest.approx([0.75, 0.25])


def test_ensemble_logits_have_the_mean_offset_of_the_members() -> None:
    logits = torch.tensor([3.0, -1.0, 0.5])
    assert mean_logprobs([logits]).tolist() == pytest.approx(logits.tolist())
    assert mean_logprobs([logits, logits + 2]).tolist() == pytest.approx((logits + 1).tolist())


@pytest.mark.parametrize("others", [["two"], ["recurrent"], ["two", "recurrent"]])
def test_scores_equal_the_mean_of_probabilities(runs: dict[str, Path], others: list[str]) -> None:
    members = [regard.load(runs[name]).score(PAIRS) for name in ("one", *others)]
    joint = regard.load(runs["one"], *(runs[name] for name in others)).score(PAIRS)
    for actual, *each in zip(joint, *members, strict=True):
        expected = [math.log(sum(map(math.exp, at)) / len(at)) for at in zip(*each, strict=True)]
        assert actual == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("names", [["one", "two"], ["one", "recurrent"], ["gpt", "one", "two"]])
@pytest.mark.parametrize("beam", [1, 4])
def test_search_scores_equal_those_of_a_full_pass(runs: dict[str, Path], names: list[str], beam: int) -> None:
    """Also when beams are reordered and finished sentences leave the batch."""
    model = regard.load(*(runs[name] for name in names))
    translator = model.translator(beam=beam)
    sources = [ids for ids in translator.encode(LINES)[0] if ids]
    found = search(
        model.module,
        SearchRequest(
            PackedTokens.from_lists(sources), DecodingSettings(beam=beam, max_ratio=1.0, max_extra=3), nbest=beam
        ),
    )
    for ids, hypotheses in zip(sources, found, strict=True):
        for hypothesis in hypotheses:
            length = len(hypothesis.logprobs)
            target = [*hypothesis.tokens, 2][:length]
            (logprobs,) = score(model.module.logits, SeqBatch.from_lists([ids], [target], bos=BOS))
            assert hypothesis.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.7, "beam": 1}, {"method": "sample"}])
def test_a_model_combined_with_itself_is_that_model(runs: dict[str, Path], settings: dict[str, Any]) -> None:
    """Also where logits are modified before the softmax."""
    alone, twice = regard.load(runs["one"]), regard.load(runs["one"], runs["one"])
    texts = [t.text for t in alone.translate(LINES, **settings)]
    assert [t.text for t in twice.translate(LINES, **settings)] == texts
    if "repetition_penalty" in settings:
        assert texts != [t.text for t in alone.translate(LINES, beam=1)]
    for a, b in zip(twice.score(PAIRS), alone.score(PAIRS), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_int8_applies_to_every_member(runs: dict[str, Path]) -> None:
    exact, quantised = (regard.load(runs["one"], runs["two"], precision=p).score(PAIRS) for p in ("fp32", "int8"))
    one = regard.load(runs["one"], precision="int8")
    assert exact != quantised
    two = regard.load(runs["two"], precision="int8")
    for actual, a, b in zip(quantised, one.score(PAIRS), two.score(PAIRS), strict=True):
        expected = [math.log((math.exp(x) + math.exp(y)) / 2) for x, y in zip(a, b, strict=True)]
        assert actual == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("text", "text was trained on plain text"),
        ("other-vocabulary", "another vocabulary"),
        ("short", r"has fewer positions \(24\) than .* needs \(48\): name it first"),
        (
            "gpt",
            r"gpt has fewer positions \(48\) than .* needs \(96\): name it first",
        ),  # source and target share positions
        ("lower", "data.lowercase differs"),
        ("tagged", "not trained with the tags"),
        ("unfinished", "unfinished has no model.safetensors yet"),
    ],
)
def test_incompatible_runs_are_refused(runs: dict[str, Path], other: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        regard.load(runs["one"], runs[other])


def test_a_language_model_is_refused_as_first_member_too(runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="text was trained on plain text"):
        regard.load(runs["text"], runs["one"])


def test_the_first_member_limits_the_length(runs: dict[str, Path]) -> None:
    """The positions of a GPT hold source and target together; longer inputs are cut for all members."""
    model = regard.load(runs["gpt"], runs["one"])
    line = "the cat " * 40
    assert len(model.score([(line, line)])[0]) <= 48
    assert len(model.translate(line, min_length=30).tokens) <= 48
    short = regard.load(runs["short"], runs["one"])
    assert len(short.translate(line).source_tokens) <= 24


def test_an_ensemble_of_classifiers(tmp_path: Path) -> None:
    one, two = (make_run(tmp_path / str(seed), "bert (classify)", seed=seed).path for seed in (1, 2))
    alone = [regard.load(run).predict("Tom was sad.").probabilities for run in (one, two)]
    joint = regard.load(one, two).predict("Tom was sad.").probabilities
    assert joint == pytest.approx({name: (alone[0][name] + alone[1][name]) / 2 for name in joint}, abs=1e-5)
    assert [*joint.values()] == sorted(joint.values(), reverse=True)


def test_an_ensemble_has_no_attention_to_show(runs: dict[str, Path]) -> None:
    model = regard.load(runs["one"], runs["two"])
    assert isinstance(model.module, Ensemble)
    with pytest.raises(UserError, match="load one of its runs"):
        model.translate(LINES[0]).attention  # noqa: B018
    with pytest.raises(UserError, match="load one of its runs"):
        model.trace(LINES[0])
    assert model.explain(LINES[0], masks=8).importance.shape[0] == len(LINES[0].split())
