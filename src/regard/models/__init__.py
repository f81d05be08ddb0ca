"""Model families. A new one is a file here with a class that registers itself (`SequenceModel` says what it offers)."""

from __future__ import annotations

from regard.models.base import SequenceModel
from regard.models.decoder_state import DecodingState
from regard.recipes.schema import SizedSettings
from regard.registry import MODELS


def build(settings: SizedSettings, source_size: int, target_size: int, shared: bool) -> SequenceModel:
    """A fresh model of the family that the settings name, for vocabularies of these sizes."""
    model: SequenceModel = MODELS[settings.family](settings, source_size, target_size, shared)
    return model


__all__ = ["DecodingState", "SequenceModel", "build"]
