"""Models that decide together: a token's probability is the mean of those that the members give it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.tiny_runs import make_run

import regard
from regard.decoding import score, search
from regard.errors import UserError
from regard.models.ensemble import Ensemble, agreed
from regard.recipes.schema import Decoding
from regard.rows import PairBatch, TokenRow
from regard.text import BEGIN

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
    return {name: run.path for name, run in made.items()}


def test_the_mean_of_probabilities_not_of_their_logarithms() -> None:
    """0.9 and 0.5 are 0.7 together; the mean of their logarithms would be that of sqrt(0.45), 0.67."""
    one, other = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log() + 7  # logits are up to a constant
    assert agreed([one, other]).exp().tolist() == pytest.approx([0.7, 0.3])


def test_what_no_member_can_write_stays_impossible() -> None:
    never = torch.tensor([0.0, -math.inf])
    assert agreed([never, never]).tolist() == [0.0, -math.inf]
    assert agreed([never, torch.tensor([0.0, 0.0])]).exp().tolist() == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize("others", [["two"], ["recurrent"], ["two", "gpt"]])
def test_scores_are_those_of_the_mean(runs: dict[str, Path], others: list[str]) -> None:
    members = [regard.load(runs[name]).score(PAIRS) for name in ("one", *others)]
    together = regard.load(runs["one"], *(runs[name] for name in others)).score(PAIRS)
    for got, *each in zip(together, *members, strict=True):
        expected = [math.log(sum(map(math.exp, at)) / len(at)) for at in zip(*each, strict=True)]
        assert got == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("others", [["two"], ["recurrent"], ["two", "gpt"]])
@pytest.mark.parametrize("beam", [1, 4])
def test_a_search_scores_what_it_finds_as_the_whole_pass_does(
    runs: dict[str, Path], others: list[str], beam: int
) -> None:
    """Step by step, with beams that change places and sentences that leave, as in one pass over the finished output."""
    model = regard.load(runs["one"], *(runs[name] for name in others))
    translator = model.translator(beam=beam)
    sources = [ids for ids in translator.encode(LINES)[0] if ids]
    found = search(model.module, TokenRow.of(sources), Decoding(beam=beam, max_ratio=1.0, max_extra=3), nbest=beam)
    for ids, hypotheses in zip(sources, found, strict=True):
        for hypothesis in hypotheses:
            length = len(hypothesis.logprobs)
            target = [*hypothesis.tokens, 2][:length]
            (logprobs,) = score(model.module, PairBatch.of([ids], [target], begin=BEGIN))
            assert hypothesis.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_one_model_twice_is_that_model(runs: dict[str, Path]) -> None:
    alone, twice = regard.load(runs["one"]), regard.load(runs["one"], runs["one"])
    assert [t.text for t in twice.translate(LINES)] == [t.text for t in alone.translate(LINES)]
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
        ("text", "trained on pairs"),
        ("stranger", "another vocabulary"),
        ("short", "name the one that reads fewest first"),
    ],
)
def test_strangers_are_refused(runs: dict[str, Path], other: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        regard.load(runs["one"], runs[other])


def test_there_is_no_one_attention_to_see(runs: dict[str, Path]) -> None:
    model = regard.load(runs["one"], runs["two"])
    assert isinstance(model.module, Ensemble)
    with pytest.raises(UserError, match="load one of them"):
        model.translate(LINES[0]).attention  # noqa: B018
    with pytest.raises(UserError, match="load one of them"):
        model.trace(LINES[0])
    assert model.explain(LINES[0], masks=8).importance.shape[0] == len(LINES[0].split())
