"""Recipes of tiny models."""

from __future__ import annotations

from regard.recipes import load
from regard.recipes.schema import Recipe

SMALL = ["model.width=32", "model.heads=2", "model.ffn_width=64", "training.batch_tokens=512", "text.vocabulary=300"]
PAIRS = ["model.encoder_layers=2", "model.decoder_layers=2"]


def small(name: str, *more: str) -> Recipe:
    return load(name, [*SMALL, *more])
