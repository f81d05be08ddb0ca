"""Decisions: which past steps each attends to, and the returns that were achieved over those that were requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regard.viz.charts import Chart, Point, Series
from regard.viz.grid import Grid
from regard.viz.views.picture import Picture, rounded


def decisions(weights: np.ndarray, actions: Sequence[str] | None, steps: int, env: str) -> Picture:
    """Draw how much each of the last decisions [S, S] of an episode attends to each step."""
    first = steps - len(weights) + 1
    numbers = range(first, steps + 1)
    rows = [f"{n} {actions[n - 1]}" if actions is not None else str(n) for n in numbers]
    grid = Grid(
        weights,
        tuple(rows),
        tuple(map(str, numbers)),
        f"{env}: which steps each decision attends to",
        "attends to →",
        "attention weight",
        about="For each step of an episode, the attention of its decision to the steps so far: over layers and heads.",
    )
    return Picture("decisions", (grid,), lambda: {"steps": list(numbers), "weights": rounded(weights.tolist())})


def returns_chart(rows: Sequence[Mapping[str, float]], env: str) -> Picture:
    """Draw the returns that were achieved, with deviations, over those that were requested."""
    rows = sorted(rows, key=lambda row: row["requested"])
    achieved = tuple(
        Point(r["requested"], r["mean"], r["mean"] - r["deviation"], r["mean"] + r["deviation"]) for r in rows
    )
    asked = tuple(Point(r["requested"], r["requested"]) for r in rows)
    lines = (Series("achieved", achieved), Series("requested", asked))
    chart = Chart(f"{env}: achieved over requested return", "requested return", "return", lines)

    def numbers() -> dict[str, Any]:
        return {"returns": [dict(row) for row in rows]}

    return Picture("returns", (chart,), numbers)
