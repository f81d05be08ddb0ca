"""Tiny training runs, and their comparison."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from families import FAMILIES
from torch import Tensor

from regard import tensor_io
from regard.recipes.schema import Recipe

STEPS = 12


def tiny(family: str, seed: int, folder: Path, **training: Any) -> Recipe:
    """Return a recipe of a few quick steps that uses every part of a run's state; held-out pairs go to `folder`."""
    model = {**FAMILIES[family](seed), "dropout": 0.2}
    return Recipe.model_validate(
        {
            **_data(model, seed, folder),
            "model": model,
            "training": {
                "steps": STEPS,
                "batch_tokens": 16 if family == "vit" else 64,  # images or tokens
                "accumulate": 2,
                "warmup": 4,
                "ema": 0.8 if seed % 2 else 0.0,
                "average": 2,
                "validate_every": 3,
                "validate_lines": 2,
                "save_every": 4,
                "seed": seed,
                **training,
            },
        }
    )


def _data(model: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Pairs to copy, or plain text (for masked LMs and every other GPT), as documents or as one stream."""
    words = {"unit": "word", "vocabulary": 260}
    if model["family"] == "vit":
        return {"data": {"corpus": "shapes", "count": 40}}
    if model["family"] == "captioner":
        return {"data": {"corpus": "scenes", "count": 40}, "text": words}
    if model["family"] == "graph":
        return {"data": {"corpus": "citations"}}
    if model["family"] == "decision":
        return {"data": {"corpus": "key-door", "count": 30}}
    if model["family"] == "speech":
        return {"data": {"corpus": "tones", "count": 24}, "text": words, "decoding": {"max_ratio": 0.1}}
    if model.get("task") == "fill" or (model["family"] == "gpt" and seed % 2):
        text, held_out = folder / "text", folder / "held-out"
        random = Random(seed)
        for file, lines in ((text, 60), (held_out, 3)):
            file.write_text("".join(" ".join(random.choices("abcdefgh", k=8)) + "\n" for _ in range(lines)))
        model["max_positions"] = 12
        documents = "stream" if seed % 4 == 1 and model["family"] == "gpt" else "line"
        return {"data": {"text": str(text), "valid": [str(held_out)], "documents": documents}, "text": words}
    if model["family"] == "bert":
        train, held_out = folder / "train.tsv", folder / "held-out.tsv"
        random = Random(seed)
        for file, lines in ((train, 40), (held_out, 3)):
            rows = [random.choices("abcdefgh", k=random.randint(1, 8)) for _ in range(lines)]
            file.write_text("".join(f"{' '.join(letters)}\t{letters[0]}\n" for letters in rows))
        return {"data": {"pairs": str(train), "valid": [str(held_out)]}, "text": words}
    files = [folder / "held-out.source", folder / "held-out.target"]
    for file in files:
        file.write_text("".join(f"{' '.join(letters)}\n" for letters in ("abc", "ttsr", "defgh")))
    data = {"corpus": "copy", "count": 40, "max_length": 64, "valid": [str(file) for file in files]}
    return {"data": data, "text": words}


def remembered(run: Path) -> dict[str, Tensor]:
    """Return every tensor of every weights file of a run."""
    files = sorted(run.glob("**/*.safetensors"))
    assert {"model.safetensors", "resume.safetensors"} <= {file.name for file in files}
    return {
        f"{file.relative_to(run)} {name}": tensor for file in files for name, tensor in tensor_io.load(file)[0].items()
    }


def measured(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics and samples, without times."""
    lines = [line for name in ("metrics.jsonl", "samples.jsonl") for line in (run / name).read_text().splitlines()]
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def assert_same_runs(one: Path, other: Path) -> None:
    left, right = remembered(one), remembered(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    assert measured(one) == measured(other)
    about = [tensor_io.load(run / "resume.safetensors")[1] for run in (one, other)]
    times = {"seconds": 0, "logs": {}}  # the logs contain times; they were compared without them
    assert {**about[0], **times} == {**about[1], **times}
