"""Translation: from a source text to a target text, also by a language model that continues the source."""

from __future__ import annotations

from regard.registry import TASKS
from regard.tasks.base import Task, TraceSpec


@TASKS.register("translation")
class Translation(Task):
    """Trains on pairs; the loss counts every target token."""

    name = "translation"
    about = "from a source text to a target text"
    data = "pairs"
    measures = ("loss", "bleu", "exact")
    verb = "translate"
    usage = "'a sentence'"
    verbs = frozenset({"translate", "evaluate", "compare", "look", "draw", "explain", "bench", "export"})
    has_source = True
    output = "sequence"
    scores_pairs = True
    trace = TraceSpec("translate", has_alignment=True)
