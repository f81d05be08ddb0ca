"""The trace adapters of all kinds of tasks (`Task.trace`)."""

from __future__ import annotations

from regard.errors import UserError
from regard.interpret.trace.adapter import TraceAdapter
from regard.interpret.trace.feature_adapters import FeatureTextAdapter, SpellingAdapter
from regard.interpret.trace.input_adapters import DecisionAdapter, PredictionAdapter
from regard.interpret.trace.text_adapters import (
    ClassificationAdapter,
    DecoderOnlyAdapter,
    FillAdapter,
    GenerationAdapter,
    TranslationAdapter,
)
from regard.runs import LoadedRun

ADAPTERS: dict[str, type[TraceAdapter]] = {
    "translate": TranslationAdapter,
    "classify": ClassificationAdapter,
    "generate": GenerationAdapter,
    "fill": FillAdapter,
    "predict": PredictionAdapter,
    "decide": DecisionAdapter,
    "write": FeatureTextAdapter,
    "spell": SpellingAdapter,
}


def adapter_for(loaded: LoadedRun) -> TraceAdapter:
    """Make the adapter for a run's task."""
    task = loaded.task
    if task.trace is None or task.trace.kind not in ADAPTERS:
        raise UserError(f"{loaded.run.path}: a run for {task.name} cannot be traced")
    if task.has_source and loaded.module.is_decoder_only:
        return DecoderOnlyAdapter(loaded, task.trace)
    return ADAPTERS[task.trace.kind](loaded, task.trace)
