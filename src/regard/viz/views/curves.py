"""Training curves of one or more runs: loss, validation score, learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from regard.errors import UserError
from regard.files import parse_json, read_text
from regard.run_dir import RunDir
from regard.viz.charts import Chart, Series
from regard.viz.views.picture import Picture

SCORES = (("bleu", "BLEU"), ("chrf", "chrF"), ("exact", "exact match (%)"), ("accuracy", "accuracy (%)"))
MAX_POINTS = 400  # per line; longer ones are thinned out


def curves(runs: Sequence[RunDir]) -> Picture:
    """Draw training and validation loss, one validation score if there is any, and the learning rate by step."""
    measured = {name: metrics(run) for name, run in zip(_names(runs), runs, strict=True)}
    loss = [
        _series(_named(name, what, len(runs)), rows, kind, "loss")
        for name, rows in measured.items()
        for what, kind in (("training", "train"), ("validation", "valid"))
    ]
    charts = [_chart(_loss_title(runs), "loss (nats per token)", loss)]
    for key, title in SCORES:
        scores = [_series(name, rows, "valid", key) for name, rows in measured.items()]
        if any(series.points for series in scores):
            charts.append(_chart("Validation score", title, scores))
            break
    rates = [_series(name, rows, "train", "learning_rate") for name, rows in measured.items()]
    charts.append(_chart("Learning rate", "learning rate", rates))
    shown = [chart for chart in charts if chart is not None]
    if not shown:
        raise UserError(f"{runs[0].path} has no metrics to draw yet")
    return Picture("curves", tuple(shown), lambda: {"runs": measured})


def _loss_title(runs: Sequence[RunDir]) -> str:
    """Return a title that names what raises the training loss only, since the two losses are then not comparable."""
    recipes = [run.recipe for run in runs]
    active = {
        "dropout": any(recipe.model.dropout for recipe in recipes),
        "label smoothing": any(recipe.training.label_smoothing for recipe in recipes),
        "R-Drop": any(recipe.training.r_drop for recipe in recipes),
    }
    means = " and ".join(name for name, is_on in active.items() if is_on)
    return f"Loss (in training with {means})" if means else "Loss"


def metrics(run: RunDir) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; of a step that was trained twice (after a crash) the last one."""
    file = run.log("metrics.jsonl")
    if not file.exists():
        raise UserError(f"{run.path} has no metrics.jsonl: it was imported, or has not trained yet")
    rows: dict[tuple[Any, Any, Any], dict[str, Any]] = {}
    for line in read_text(file, errors="replace").splitlines():
        try:
            row = parse_json(line)
            if not isinstance(row["step"], int):
                continue
            rows[row["step"], row["kind"], row.get("weights")] = row
        except (ValueError, KeyError, TypeError):
            continue  # a line truncated by a crash
    return sorted(rows.values(), key=lambda row: row["step"])


def _names(runs: Sequence[RunDir]) -> list[str]:
    """Return the names of the run directories, or their paths if two have the same name."""
    short = [run.path.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.path) for run in runs]


def _named(name: str, what: str, runs: int) -> str:
    return what if runs == 1 else f"{name}, {what}"


def _series(name: str, rows: Sequence[Mapping[str, Any]], kind: str, key: str) -> Series:
    """Return one line; validation rows of averaged weights are left out."""
    points = [
        (row["step"], row[key])
        for row in rows
        if row["kind"] == kind
        and row.get("weights", "step") == "step"
        and isinstance(row.get(key), int | float)
        and math.isfinite(row[key])
    ]
    every = math.ceil(len(points) / MAX_POINTS) or 1
    selected = points[::-1][::every][::-1]
    return Series.of(name, [step for step, _ in selected], [value for _, value in selected])


def _chart(title: str, y_title: str, series: Sequence[Series]) -> Chart | None:
    lines = tuple(one for one in series if one.points)
    return Chart(title, "step", y_title, lines) if lines else None
