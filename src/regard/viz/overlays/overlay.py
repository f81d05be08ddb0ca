"""The common part of all overlays: a map of attention, its two axes, and what the model predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.interpret.trace import Trace
from regard.text.display import shorten
from regard.viz.charts import Chart
from regard.viz.grid import Grid
from regard.viz.maps import Map
from regard.viz.panels import Panel

Entry = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Overlay:
    """Attention [Q, K] over the elements of an input; merged elements are one row and one column.

    `queries` and `keys` are axes of the trace's header, `at` the number of a row that is asked for. `query_groups` and
    `groups` are the numbers of the elements of each row and of each column.
    """

    trace: Trace
    map: Map
    queries: Entry
    keys: Entry
    query_groups: Sequence[Sequence[int]]
    groups: Sequence[Sequence[int]]
    at: int | None = None

    def headline(self) -> str:
        """The input, and the output with its probability."""
        text, before = self.trace.header["text"], self.trace.header["before"]
        now = prediction_text(self.trace.header["output"], text["target"])
        then = now if before is None else prediction_text(before, before["text"])
        changed = "" if now == then else f" (nothing hidden: {then})"
        return f"{shorten(text['source'], 60)}: {shorten(now, 60)}{changed}"

    def row(self) -> tuple[str, np.ndarray]:
        """The weights [K] of the row that is asked for; by default the mean of the rows that predictions are made from.

        Also what they are, in words.
        """
        if self.at is not None:
            return f"from {self.map.queries[self.at].strip()}", self.map.weights[self.at]
        if self.queries is self.keys:
            reading = [
                row
                for row, group in enumerate(self.groups)
                if any(self.queries["elements"][n].get("predicts", True) for n in group)
            ]
            selected = self.map.weights[reading or slice(None)]
        else:
            selected = self.map.weights
        return "received, mean of all queries" if len(selected) > 1 else "of the prediction", selected.mean(0)

    def image(self, name: str) -> np.ndarray | None:
        """An array of the keys' axis, such as an image, from 0 to 1; None if there is none."""
        array = self.keys.get("arrays", {}).get(name)
        return None if array is None else self.trace.array(array)


AnyPanel = Grid | Chart | Panel
PanelMaker = Callable[[Overlay], list[AnyPanel]]


def prediction_text(output: Entry, target: str) -> str:
    """The output in words; of a single class with its probability.

    >>> prediction_text({"p": [0.934], "numbers": None}, "red circle")
    'red circle 93 %'
    """
    if output.get("numbers") or len(output["p"]) != 1 or output["p"][0] is None:
        return target
    return f"{target} {100 * output['p'][0]:.0f} %"
