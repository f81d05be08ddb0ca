"""Copying, reversing and sorting must be learnt, by the recipes as users get them, from a new seed every time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom

import pytest
import torch

import regard
from regard.data.sources import held_out


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So that the time of the processor is the time of the work, however many tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("task", ["copy", "reverse", "sort"])
def test_a_toy_is_learnt_in_under_a_minute(task: str, tmp_path: Path) -> None:
    seed = SystemRandom().randrange(10**6)
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
