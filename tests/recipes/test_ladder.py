"""The ladder: five rungs that differ in their model alone, at the same number of parameters."""

from __future__ import annotations

import pytest
import torch

from regard.models import build
from regard.recipes import differences, load

RUNGS = ["lstm", "gru", "dot", "additive", "transformer"]
LADDERS = {"ladder-": 5000, "ladder-multi30k-": 6000}  # and the size of their vocabularies


def parameters(name: str, vocabulary: int) -> int:
    with torch.device("meta"):  # counted, not made
        model = build(load(name).model, vocabulary, vocabulary, True)
    return sum(tensor.numel() for tensor in model.parameters())


@pytest.mark.parametrize("ladder", LADDERS)
def test_the_rungs_have_equally_many_parameters(ladder: str) -> None:
    assert load(ladder + "lstm").text.vocabulary == LADDERS[ladder]
    counts = {rung: parameters(ladder + rung, LADDERS[ladder]) for rung in RUNGS}
    assert max(counts.values()) <= 1.05 * min(counts.values()), counts


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("rung", RUNGS[:-1])
def test_the_rungs_differ_in_their_model_alone(ladder: str, rung: str) -> None:
    changed = differences(load(ladder + "transformer"), load(ladder + rung))
    others = {key for key in changed if not key.startswith("model") and key != "about"}
    assert others <= {"training.learning_rate"}
    assert load(ladder + rung).decoding.beam == 1


def test_the_rungs_are_what_they_are_called() -> None:
    for ladder in LADDERS:
        models = [load(ladder + rung).model for rung in RUNGS]
        told = [(m.cell, m.attention, m.feed) for m in models if m.family == "recurrent"]
        assert told == [("lstm", "none", "start"), ("gru", "none", "every"), ("gru", "luong", "start"),
                        ("gru", "bahdanau", "start")]  # fmt: skip
        assert models[-1].family == "transformer"
