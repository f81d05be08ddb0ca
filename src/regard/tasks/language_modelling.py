"""Language modelling: continuing plain text."""

from __future__ import annotations

from regard.recipes.schema import Recipe
from regard.registry import TASKS
from regard.tasks.base import Task, TraceSpec


@TASKS.register("language-modelling")
class LanguageModelling(Task):
    """Trains on plain text, documents or one stream; the loss counts every token."""

    name = "language-modelling"
    about = "continue plain text"
    data = "text"
    measures = ("loss",)
    verb = "generate"
    usage = "'Once upon a time'"
    verbs = frozenset({"generate", "evaluate", "look", "draw", "explain", "bench", "export"})
    has_source = False
    output = "sequence"
    scores_pairs = True
    trace = TraceSpec("generate", input_sides=("inputs",), joined=True)

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        check_one_side(recipe)


def check_one_side(recipe: Recipe) -> None:
    """Raise a ValueError if plain text is to have two vocabularies."""
    if not recipe.text.shared:
        raise ValueError("plain text has one side: text.shared must be true")
