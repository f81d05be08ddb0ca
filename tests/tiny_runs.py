"""Runs of every family with small random weights, made without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regard import tasks, tensor_io
from regard.data.builtin import pairs
from regard.recipes import load
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.tasks.feature_text import FeatureTextTask
from regard.text import Tokenizer
from regard.text.encode import MASK
from regard.text.tokenizers import train

SMALL = {"width": 16, "heads": 2, "ffn_width": 24, "dropout": 0.0, "max_positions": 48}
RECURRENT = {"family": "recurrent", "width": 8, "encoder_width": 8, "embedding": 6, "dropout": 0.0, "max_positions": 48}

FAMILIES: dict[str, dict[str, Any]] = {
    "transformer": {"data": "en-es", "model": {**SMALL, "encoder_layers": 2, "decoder_layers": 2}},
    "transformer (norm after, gated)": {
        "data": "en-es",
        "model": {**SMALL, "encoder_layers": 1, "decoder_layers": 1, "norm_first": False, "activation": "gated"},
    },
    "recurrent (additive)": {"data": "en-es", "model": {**RECURRENT, "attention": "bahdanau", "cell": "gru"}},
    "recurrent (heads)": {
        "data": "en-es",
        "model": {**RECURRENT, "attention": "multihead", "heads": 2, "cell": "lstm", "decoder_layers": 2},
    },
    "recurrent (no attention)": {"data": "en-es", "model": {**RECURRENT, "attention": "none", "cell": "lstm"}},
    "gpt": {"data": "stories", "model": {**SMALL, "family": "gpt", "layers": 2}},
    "gpt (rotary, window)": {
        "data": "stories",
        "model": {**SMALL, "family": "gpt", "layers": 2, "positions": "rotary", "mask": "window", "mask_size": 3},
    },
    "gpt on pairs": {"data": "en-es", "model": {**SMALL, "family": "gpt", "layers": 2}},
    "gpt on pairs, two vocabularies": {
        "data": "en-es",
        "shared": False,
        "model": {**SMALL, "family": "gpt", "layers": 1},
    },
    "bert (fill)": {"data": "stories", "model": {**SMALL, "family": "bert", "task": "fill", "layers": 2}},
    "bert (classify)": {
        "data": "moods",
        "model": {**SMALL, "family": "bert", "task": "classify", "layers": 2, "norm_first": True},
    },
}

TEXTS = {"en-es": "this cat is very large", "stories": "Once upon a time", "moods": "Tom was sad."}


def text_for(family: str) -> str:
    """Return a text for a run of this family."""
    return "Once upon a [MASK] there" if "fill" in family else TEXTS[FAMILIES[family]["data"]]


def make_run(path: Path, family: str, seed: int = 0, **changes: Any) -> RunDir:
    """Make a run directory with random weights; `changes` are settings of the model."""
    about = FAMILIES[family]
    return make(
        path,
        {
            "data": {"corpus": about["data"]},
            "text": {"unit": "bpe", "vocabulary": 400, "shared": about.get("shared", True)},
            "model": {**about["model"], **changes},
            **({} if family.startswith("bert") else {"decoding": {"beam": 3, "max_ratio": 1.0, "max_extra": 2}}),
        },
        seed,
    )


def make(path: Path, settings: dict[str, Any], seed: int = 0) -> RunDir:
    """Make a run directory from any recipe on a built-in corpus."""
    run = RunDir.create(path, Recipe.model_validate(settings))
    run.save_tokenizers(*_tokenizers(run.recipe, settings["data"]["corpus"]))
    if run.recipe.task == "classification":
        run.save_classes(sorted({pair.target for pair in pairs(settings["data"]["corpus"], "test", 60)}))
    _save_weights(run, seed)
    return run


INPUTS = {  # recipes whose inputs are not texts, and an input for each
    "shapes": "test 2",
    "citations": "paper-3",
    "molecules": "CC(=O)CCO",
    "key-door": "key-door return 1 seed 3",
}
WRITTEN = {"scenes": "test 2", "tones": "test 2"}  # the same for recipes that write texts
SMALLER = {
    "shapes": ["data.count=400"],
    "key-door": ["data.count=20"],
    "molecules": ["data.count=40"],
    "scenes": ["data.corpus=scenes", "data.count=40"],
    "tones": ["data.count=20"],
}


def make_input_run(path: Path, recipe: str, *changes: str, seed: int = 0) -> RunDir:
    """Make a run of a recipe whose inputs are not texts."""
    run = RunDir.create(path, load(recipe, [*SMALLER.get(recipe, []), "model.dropout=0", *changes]))
    task = tasks.of(run.recipe)
    if names := task.class_names():
        run.save_classes(names)
    if names := task.feature_names():
        run.save_features(names)
    if scales := task.scales():
        run.save_scales(scales)
    if isinstance(task, FeatureTextTask):
        run.save_tokenizers(*task.learn_tokenizers())
    _save_weights(run, seed)
    return run


def _save_weights(run: RunDir, seed: int) -> None:
    """Save random weights, as two snapshots and the best ones."""
    torch.manual_seed(seed)
    model = run.fresh_model()
    with torch.no_grad():  # biases and gains that start as zeros or ones would hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    for step, file in ((10, run.snapshot(10)), (20, run.snapshot(20)), (20, run.best)):
        tensor_io.save(file, tensor_io.model_tensors(model), {"step": step})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def _tokenizers(recipe: Recipe, corpus: str) -> tuple[Tokenizer, Tokenizer]:
    some = list(pairs(corpus, "test", 60))
    sources, targets = [pair.source for pair in some], [pair.target for pair in some]
    unit, size = recipe.text.unit, recipe.text.vocabulary
    if recipe.text.shared:
        both = train(sources + targets, unit, size, tags=[MASK] if recipe.task == "masked-lm" else [])
        return both, both
    return train(sources, unit, size), train(targets, unit, size)
