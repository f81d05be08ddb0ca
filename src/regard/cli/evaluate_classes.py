"""regard evaluate, for classifiers"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import typer

from regard.cli.progress import progress_bar
from regard.errors import printable
from regard.metrics.classes import ClassScores
from regard.runs import LoadedRun
from regard.tasks.classes import ClassTask
from regard.text.display import columns, shorten
from regard.viz.charts import columned
from regard.viz.terminal import capabilities

MAX_CLASSES = 20  # maximum for which the confusion matrix is printed; --json has it for any number
NAME_COLUMNS = 16  # maximum length of a class name in the matrix


def evaluate_classes(loaded: LoadedRun, examples: list[Any], as_json: bool, quiet: bool) -> None:
    """Print the scores of a classifier on held-out examples."""
    task = loaded.prediction_task()
    assert isinstance(task, ClassTask)
    task.class_ids(loaded.run, [name for _, name in examples], "the held-out data")  # before anything is predicted
    with progress_bar("predicting", len(examples), quiet) as progress:
        predictions = loaded.predictions([given for given, _ in examples], progress)
    scores = task.score(loaded.run, predictions, [name for _, name in examples])
    if as_json:
        entry: dict[str, Any] = {"examples": scores.examples, "accuracy": scores.accuracy, "macro_f1": scores.macro_f1}
        entry["f1"] = dict(zip(scores.classes, scores.f1, strict=True))
        typer.echo(json.dumps({**entry, "classes": scores.classes, "confusion": scores.confusion}, ensure_ascii=False))
        return
    typer.echo(f"accuracy    {scores.accuracy:6.2f} % of {scores.examples:,} {task.members}")
    typer.echo(f"macro-F1    {scores.macro_f1:6.2f}   mean of {len(scores.classes):,} classes")
    if len(scores.classes) <= MAX_CLASSES:
        typer.echo("\nExamples of each class by predicted class:\n" + _confusion(scores), nl=False)


def _confusion(scores: ClassScores) -> str:
    """The confusion matrix as a table: a row for each class, a column for each prediction.

    If it is too wide with the names of the classes as heads, the classes are numbered.
    """
    width = max(capabilities(sys.stdout)[0], 80)
    names = [shorten(printable(name), NAME_COLUMNS) for name in scores.classes]
    numbers = [str(number) for number in range(1, len(names) + 1)]

    def table(labels: Sequence[str], heads: Sequence[str], width: int) -> str:
        rows = zip(labels, scores.confusion, scores.f1, strict=True)
        cells = [[label, *map(str, counts), f"{f1:.1f}"] for label, counts, f1 in rows]
        return columned(["class", *heads, "F1"], cells, width)

    named = table(names, names, sys.maxsize)
    if max(map(columns, named.splitlines())) <= width:
        return named
    return table([f"{number:>2} {name}" for number, name in zip(numbers, names, strict=True)], numbers, width)
