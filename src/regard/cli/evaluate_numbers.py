"""regard evaluate, for regression"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer

from regard.cli.progress import progress_bar
from regard.runs import LoadedRun
from regard.tasks.numbers import NumberTask


def evaluate_numbers(loaded: LoadedRun, examples: list[Any], as_json: bool, quiet: bool) -> None:
    """Print the errors of predicted numbers on held-out examples, in the units of the data."""
    task = loaded.prediction_task()
    assert isinstance(task, NumberTask)
    with progress_bar("predicting", len(examples), quiet) as progress:
        predictions = loaded.predictions([given for given, _ in examples], progress)
    scores = task.score(loaded.run, predictions, [target for _, target in examples])
    if as_json:
        typer.echo(json.dumps({"examples": len(examples), "numbers": [asdict(score) for score in scores]}))
        return
    for number, score in enumerate(scores, 1):
        which = f"  number {number}" if len(scores) > 1 else ""
        typer.echo(f"RMSE {score.rmse:.4f}  MAE {score.mae:.4f}  R2 {score.r2:.4f}{which}")
    typer.echo(f"of {len(examples):,} {task.members}")
