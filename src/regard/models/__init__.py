"""Model families. A new one is a file here with `forward` (or `loss`), `start` and `step`, and a line in `build`."""

from __future__ import annotations

from regard.models.family import State, Translator
from regard.recipes.schema import ModelSettings


def build(settings: ModelSettings, source_size: int, target_size: int, shared: bool) -> Translator:
    """A fresh model of the family that the settings name, for vocabularies of these sizes."""
    from regard.models.transformer import Transformer

    return Transformer(settings, source_size, target_size, shared)


__all__ = ["State", "Translator", "build"]
