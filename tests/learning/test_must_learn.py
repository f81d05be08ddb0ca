"""Copying, reversing and sorting must be learnt, by the recipes as users get them, from a new seed every time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom

import pytest
import torch

import regard
from regard.data.corpora import held_out
from regard.decoding import SearchRequest, search
from regard.decoding.decisive import decisive
from regard.packed import PackedTokens


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So that the time of the processor is the time of the work, however many tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "reverse", "sort"])
def test_a_toy_is_learnt_in_under_a_minute(task: str, tmp_path: Path) -> None:
    seed = 1 if os.environ.get("CI") == "true" else SystemRandom().randrange(10**6)
    print(f"seed {seed}: regard train {task} --seed {seed}")  # pytest shows it when the test fails
    begun = time.process_time()
    model = regard.train(task, tmp_path / "run", settings=[f"training.seed={seed}"], device="cpu", quiet=True)
    spent = time.process_time() - begun
    pairs = held_out(model.run.recipe.data, "test")
    outputs = model.translate([source for source, _ in pairs])
    exact = sum(found.text == target for found, (_, target) in zip(outputs, pairs, strict=True)) / len(pairs)
    print(f"{exact:.1%} of {len(pairs)} exact after {spent:.0f} s of one core")
    assert len(pairs) == 1000 and exact >= 0.99
    assert spent < 60
    the_batch_changes_nothing(model, [source for source, _ in pairs[:200]])


def the_batch_changes_nothing(model: regard.Model, lines: list[str]) -> None:
    """A trained model says the same of a line alone and among others, and knows what it says by more than rounding."""
    for beam in (1, 4):
        translator = model.translator(beam=beam)
        tokens, _ = translator.encode(lines)
        request = SearchRequest(PackedTokens.from_lists(tokens), translator.settings, banned=translator.forbidden)
        found = search(model.module, request)
        close = [not decided for decided in decisive(model.module, request, found)]
        print(f"beam {beam}: {sum(close)} of {len(lines)} are decided by no more than rounding")
        assert beam > 1 or not any(close)
        for sentence, (best, *_), is_close in zip(tokens, found, close, strict=True):
            ((alone, *_),) = search(
                model.module,
                SearchRequest(PackedTokens.from_lists([sentence]), translator.settings, banned=translator.forbidden),
            )
            assert is_close or alone.tokens == best.tokens
