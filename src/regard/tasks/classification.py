"""Classification of texts."""

from __future__ import annotations

from regard.recipes.schema import Recipe
from regard.registry import TASKS
from regard.tasks.base import Task, TraceSpec


@TASKS.register("classification")
class Classification(Task):
    """Trains on pairs of a text and the name of its class; the loss counts one target per text."""

    name = "classification"
    about = "name the class of a text"
    data = "pairs"
    measures = ("loss", "exact")
    verb = "translate"
    usage = "'a sentence'"
    verbs = frozenset({"translate", "evaluate", "compare", "look", "draw", "explain", "bench", "export"})
    has_source = True
    output = "class"
    scores_pairs = True
    trace = TraceSpec("classify")

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        if recipe.text.shared:
            raise ValueError("classification needs text.shared = false: classes have a vocabulary of their own")
