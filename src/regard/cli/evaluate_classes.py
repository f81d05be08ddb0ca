"""regard evaluate, for classifiers"""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from regard.cli.progress import progress_bar
from regard.errors import printable
from regard.metrics.classes import ClassScores
from regard.runs import LoadedRun
from regard.tasks.classes import ClassTask
from regard.text.display import shorten
from regard.viz.charts import columned
from regard.viz.terminal import capabilities

MAX_CLASSES = 20  # of a confusion matrix that is printed; --json has it for any number
NAME_COLUMNS = 16  # of a class name in it


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
    """The confusion matrix as a table: a row for each class, a column for each prediction."""
    names = [shorten(printable(name), NAME_COLUMNS) for name in scores.classes]
    rows = [
        [name, *map(str, row), f"{f1:.1f}"] for name, row, f1 in zip(names, scores.confusion, scores.f1, strict=True)
    ]
    return columned(["class", *names, "F1"], rows, width=max(capabilities(sys.stdout)[0], 80))
