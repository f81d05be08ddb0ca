"""Training runs that take about a second, and helpers that read their files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import tensor_io
from regard.data.stream import BatchShare
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.tasks.validator import Validation, Validator
from regard.training.loop import Trainer
from regard.training.setup import train

CPU = torch.device("cpu")
HELD_OUT = ["a b c", "t t s r", "d e f g h", "k l m"]


def small(
    folder: Path, *, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **training: Any
) -> Recipe:
    """Return a recipe of a few quick steps; its held-out pairs are written to `folder`."""
    files = [folder / "held-out.source", folder / "held-out.target"]
    for file in files:
        if not file.exists():  # several processes may read them
            file.write_text("".join(f"{line}\n" for line in HELD_OUT))
    sizes = {"width": 8, "heads": 2, "ffn_width": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.1}
    return Recipe.model_validate(
        {
            "data": {**(data or {"corpus": "copy", "count": 40}), "valid": [str(file) for file in files]},
            "text": {"unit": "word", "vocabulary": 260},
            "model": {**sizes, **(model or {})},
            "training": {
                "steps": 12,
                "batch_tokens": 64,
                "warmup": 4,
                "average": 0,
                "validate_every": 4,
                "validate_lines": 0,
                "save_every": 4,
                **training,
            },
        }
    )


def train_run(recipe: Recipe, run: Path, **options: Any) -> RunDir:
    return train(recipe, run, device="cpu", **{"quiet": True, **options})


def metrics(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def tensors(file: Path) -> dict[str, Tensor]:
    return tensor_io.load(file)[0]


def content(run: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(run.rglob("*")) if file.is_file()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def current_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return a copy of the current weights."""
    return {name: tensor.clone() for name, tensor in tensor_io.model_tensors(trainer.model).items()}


def script_validations(patch: pytest.MonkeyPatch, results: list[Validation]) -> Iterator[Validation]:
    """Replace validation by these results, one after the other."""
    remaining = iter(results)
    patch.setattr(Validator, "validate", lambda self, model: next(remaining))
    return remaining


def interrupt(patch: pytest.MonkeyPatch, at: int, by: int = signal.SIGINT) -> None:
    """Send this process a signal during step `at`."""
    update = Trainer._take_step

    def interrupted(self: Trainer, share: BatchShare) -> None:
        update(self, share)
        if self.progress.step == at:
            os.kill(os.getpid(), by)

    patch.setattr(Trainer, "_take_step", interrupted)
