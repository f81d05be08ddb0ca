"""Models that decide together: a token's probability is the mean of those that the members give it."""

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
    """Of one vocabulary, that of the first sixty test pairs: a Transformer of each of two seeds, and others."""
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "one": make_run(folder / "one", "transformer", seed=1),
        "two": make_run(folder / "two", "transformer", seed=2),
        "recurrent": make_run(folder / "recurrent", "recurrent (additive)", seed=3),
        "gpt": make_run(folder / "gpt", "gpt on pairs", seed=4),
        "short": make_run(folder / "short", "transformer", max_positions=24),
        "text": make_run(folder / "text", "gpt"),
        "stranger": make_run(folder / "stranger", "gpt on pairs, two vocabularies"),
    }
    for name, data in (("lower", {"lowercase": True}), ("tagged", {"source_tag": "<es>"})):
        settings = made["one"].recipe.model_dump()
        run = made[name] = make(folder / name, {**settings, "data": {"corpus": "en-es", **data}})
        run.save_tokenizers(*made["one"].tokenizers)
    made["unfinished"] = make_run(folder / "unfinished", "transformer")
    made["unfinished"].best.unlink()
    return {name: run.path for name, run in made.items()}


def test_the_mean_of_probabilities_not_of_their_logarithms() -> None:
    """0.9 and 0.5 are 0.7 together; the mean of their logarithms would be that of sqrt(0.45), 0.67."""
    one, other = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log() + 7  # logits are up to a constant
    assert mean_logprobs([one, other]).softmax(-1).tolist() == pytest.approx([0.7, 0.3])


def test_what_no_member_can_write_stays_impossible() -> None:
    never = torch.tensor([0.0, -math.inf])
    assert mean_logprobs([never, never]).tolist() == [0.0, -math.inf]
    assert mean_logprobs([never, torch.tensor([0.0, 0.0])]).softmax(-1).tolist() == pytest.approx([0.75, 0.25])


def test_logits_are_at_the_members_mean_level() -> None:
    logits = torch.tensor([3.0, -1.0, 0.5])
    assert mean_logprobs([logits]).tolist() == pytest.approx(logits.tolist())
    assert mean_logprobs([logits, logits + 2]).tolist() == pytest.approx((logits + 1).tolist())


@pytest.mark.parametrize("others", [["two"], ["recurrent"], ["two", "recurrent"]])
def test_scores_are_those_of_the_mean(runs: dict[str, Path], others: list[str]) -> None:
    members = [regard.load(runs[name]).score(PAIRS) for name in ("one", *others)]
    together = regard.load(runs["one"], *(runs[name] for name in others)).score(PAIRS)
    for got, *each in zip(together, *members, strict=True):
        expected = [math.log(sum(map(math.exp, at)) / len(at)) for at in zip(*each, strict=True)]
        assert got == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("names", [["one", "two"], ["one", "recurrent"], ["gpt", "one", "two"]])
@pytest.mark.parametrize("beam", [1, 4])
def test_a_search_scores_what_it_finds_as_the_whole_pass_does(
    runs: dict[str, Path], names: list[str], beam: int
) -> None:
    """Step by step, with beams that change places and sentences that leave, as in one pass over the finished output."""
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
def test_one_model_twice_is_that_model(runs: dict[str, Path], settings: dict[str, Any]) -> None:
    """Also where logits are changed before probabilities are made of them."""
    alone, twice = regard.load(runs["one"]), regard.load(runs["one"], runs["one"])
    texts = [t.text for t in alone.translate(LINES, **settings)]
    assert [t.text for t in twice.translate(LINES, **settings)] == texts
    if "repetition_penalty" in settings:
        assert texts != [t.text for t in alone.translate(LINES, beam=1)]
    for a, b in zip(twice.score(PAIRS), alone.score(PAIRS), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_int8_reaches_every_member(runs: dict[str, Path]) -> None:
    exact, rough = (regard.load(runs["one"], runs["two"], precision=p).score(PAIRS) for p in ("fp32", "int8"))
    one = regard.load(runs["one"], precision="int8")
    assert exact != rough
    two = regard.load(runs["two"], precision="int8")
    for got, a, b in zip(rough, one.score(PAIRS), two.score(PAIRS), strict=True):
        expected = [math.log((math.exp(x) + math.exp(y)) / 2) for x, y in zip(a, b, strict=True)]
        assert got == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ("text", "text was trained on plain text"),
        ("stranger", "another vocabulary"),
        ("short", r"has fewer positions \(24\) than .* needs \(48\): name it first"),
        ("gpt", r"gpt has fewer positions \(48\) than .* needs \(96\): name it first"),  # source and target share them
        ("lower", "data.lowercase differs"),
        ("tagged", "not trained with the tags"),
        ("unfinished", "unfinished has no model.safetensors yet"),
    ],
)
def test_strangers_are_refused(runs: dict[str, Path], other: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        regard.load(runs["one"], runs[other])


def test_a_run_on_text_that_comes_first_is_refused_too(runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="text was trained on plain text"):
        regard.load(runs["text"], runs["one"])


def test_whoever_has_fewer_places_says_how_long_a_line_may_be(runs: dict[str, Path]) -> None:
    """A GPT's places are for source and target together: what does not fit into it is cut, for all."""
    model = regard.load(runs["gpt"], runs["one"])
    line = "the cat " * 40
    assert len(model.score([(line, line)])[0]) <= 48
    assert len(model.translate(line, min_length=30).tokens) <= 48
    short = regard.load(runs["short"], runs["one"])
    assert len(short.translate(line).source_tokens) <= 24


def test_classifiers_decide_together(tmp_path: Path) -> None:
    one, two = (make_run(tmp_path / str(seed), "bert (classify)", seed=seed).path for seed in (1, 2))
    pair = [("Tom was sad.", "sad")]
    alone = [regard.load(run).score(pair)[0] for run in (one, two)]
    (together,) = regard.load(one, two).score(pair)
    expected = [math.log((math.exp(a) + math.exp(b)) / 2) for a, b in zip(*alone, strict=True)]
    assert together == pytest.approx(expected, abs=1e-5)


def test_there_is_no_one_attention_to_see(runs: dict[str, Path]) -> None:
    model = regard.load(runs["one"], runs["two"])
    assert isinstance(model.module, Ensemble)
    with pytest.raises(UserError, match="load one of its runs"):
        model.translate(LINES[0]).attention  # noqa: B018
    with pytest.raises(UserError, match="load one of its runs"):
        model.trace(LINES[0])
    assert model.explain(LINES[0], masks=8).importance.shape[0] == len(LINES[0].split())
