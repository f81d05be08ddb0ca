"""The ladder: five recipes with different models and about the same number of parameters."""

from __future__ import annotations

import pytest
import torch

from regard.models import build
from regard.recipes import differences, load

RUNGS = ["lstm", "gru", "dot", "additive", "transformer"]
LADDERS = {"ladder-": 5000, "ladder-multi30k-": 6000}  # with their vocabulary sizes


def parameters(name: str, vocabulary: int) -> int:
    with torch.device("meta"):  # allocates nothing
        model = build(load(name).model, vocabulary, vocabulary, True)
    return sum(tensor.numel() for tensor in model.parameters())


@pytest.mark.parametrize("ladder", LADDERS)
def test_the_rungs_have_about_the_same_number_of_parameters(ladder: str) -> None:
    assert load(ladder + "lstm").text.vocabulary == LADDERS[ladder]
    counts = {rung: parameters(ladder + rung, LADDERS[ladder]) for rung in RUNGS}
    assert max(counts.values()) <= 1.05 * min(counts.values()), counts


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("rung", RUNGS[:-1])
def test_the_rungs_differ_in_the_model_only(ladder: str, rung: str) -> None:
    changed = differences(load(ladder + "transformer"), load(ladder + rung))
    others = {key for key in changed if not key.startswith("model") and key != "about"}
    assert others <= {"training.learning_rate"}
    assert load(ladder + rung).decoding.beam == 1


def test_each_rung_has_the_model_of_its_name() -> None:
    for ladder in LADDERS:
        models = [load(ladder + rung).model for rung in RUNGS]
        settings = [(m.cell, m.attention, m.feed) for m in models if m.family == "recurrent"]
        assert settings == [("lstm", "none", "start"), ("gru", "none", "every"), ("gru", "luong", "start"),
                        ("gru", "bahdanau", "start")]  # fmt: skip
        assert models[-1].family == "transformer"
