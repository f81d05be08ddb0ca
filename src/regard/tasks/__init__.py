"""Tasks: what a model is trained for, and everything that follows from it. `recipe.task` names one.

    task = tasks.of(recipe)
    task.name, task.verb, task.has_source        # "translation", "translate", True

A task is one file in this package with a class that registers itself (see `Task`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.registry import TASKS
from regard.tasks.base import Task, TraceSpec

if TYPE_CHECKING:
    from regard.recipes.schema import Recipe


def of(recipe: Recipe) -> Task:
    """The task of a recipe."""
    task: Task = TASKS[recipe.task](recipe)
    return task


__all__ = ["Task", "TraceSpec", "of"]
