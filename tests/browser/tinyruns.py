"""Runs that learnt nothing, made in no time, and a live server of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHORT = {"decoding": {"max_ratio": 1.0, "max_extra": 2}}  # models that learnt nothing never stop by themselves
PAIRS = {"data": {"corpus": "en-es"}, "text": {"unit": "bpe", "vocabulary": 400, "shared": True}} | SHORT
TEXTS = {"data": {"corpus": "stories"}, "text": {"unit": "bpe", "vocabulary": 400, "shared": True}} | SHORT
SMALL = {"width": 16, "heads": 4, "inner": 32, "dropout": 0.0}
TINY: dict[str, dict[str, Any]] = {
    "tiny-transformer": PAIRS | {"model": {"family": "transformer", "encoder_layers": 1, "decoder_layers": 2, **SMALL}},
    "tiny-additive": PAIRS | {"model": {"family": "recurrent", "attention": "additive", "width": 16, "embedding": 16}},
    "tiny-gpt": TEXTS | {"model": {"family": "gpt", "layers": 2, **SMALL}},
    "tiny-bert": TEXTS | {"model": {"family": "bert", "layers": 2, **SMALL}},
}
STEPS = (10, 20)  # of the snapshots


def make_run(folder: Path, name: str, settings: dict[str, Any]) -> Path:
    """A run with random weights, and others in its snapshots, as if it had been trained."""
    import torch

    from regard import weights
    from regard.data.builtin import pairs
    from regard.recipes.schema import Recipe
    from regard.runs import Run
    from regard.text.sides import MASK
    from regard.text.tokenizers import train

    run = Run.create(folder / name, Recipe.model_validate(settings))
    text = run.recipe.text
    lines = [line for pair in pairs(settings["data"]["corpus"], "train", 300) for line in (pair.source, pair.target)]
    tokenizer = train(lines, text.unit, text.vocabulary, tags=[MASK] if run.recipe.fills else [])
    run.save_tokenizers(tokenizer, tokenizer)
    torch.manual_seed(len(name))
    for step in STEPS:
        tensors = {key: 2 * tensor for key, tensor in weights.of_model(run.fresh_model()).items()}  # with a will
        for path in (run.snapshot(step), run.best):
            weights.save(path, tensors, {"step": step, "weights": "random"})
    return run.path


@contextlib.contextmanager
def served(paths: list[Path], text: str = "") -> Iterator[str]:
    """The address of a live server of these runs."""
    from regard.serving.listening import open_server

    server = open_server(paths, text=text, device="cpu")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield server.address
    server.stop()
    thread.join(timeout=10)
