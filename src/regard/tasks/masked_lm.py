"""Masked language modelling: guessing tokens that are hidden from the model (BERT)."""

from __future__ import annotations

from regard.recipes.schema import Recipe
from regard.registry import TASKS
from regard.tasks.base import Task, TraceSpec
from regard.tasks.language_modelling import check_one_side


@TASKS.register("masked-lm")
class MaskedLM(Task):
    """Trains on documents of plain text; the loss counts the tokens to be guessed."""

    name = "masked-lm"
    about = "fill in masked tokens"
    data = "text"
    measures = ("loss", "exact")
    verb = "fill"
    usage = "'the [MASK] sat on the mat'"
    verbs = frozenset({"fill", "evaluate", "look", "draw", "explain", "bench", "export"})
    has_source = False
    output = "fills"
    scores_pairs = False
    trace = TraceSpec("fill", input_sides=("source", "inputs"))

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        check_one_side(recipe)
        if recipe.data.documents == "stream":
            raise ValueError('masked-lm reads whole documents: data.documents must be "line" or "paragraph"')
