"""Model families. A new one is a file here with `forward` (or `loss`), `start` and `step`, and a line in `build`."""

from __future__ import annotations

from regard.models.base import DecodingState, SequenceModel
from regard.recipes.schema import BertSettings, GPTSettings, ModelSettings, RecurrentSettings


def build(settings: ModelSettings, source_size: int, target_size: int, shared: bool) -> SequenceModel:
    """A fresh model of the family that the settings name, for vocabularies of these sizes."""
    if isinstance(settings, RecurrentSettings):
        from regard.models.recurrent import Recurrent

        return Recurrent(settings, source_size, target_size, shared)
    if isinstance(settings, GPTSettings):
        from regard.models.gpt import GPT

        return GPT(settings, source_size, target_size, shared)
    if isinstance(settings, BertSettings):
        from regard.models.bert import Bert

        return Bert(settings, source_size, target_size)
    from regard.models.transformer import Transformer

    return Transformer(settings, source_size, target_size, shared)


__all__ = ["DecodingState", "SequenceModel", "build"]
