"""Attention drawn over the input: an image, a spectrogram, an episode, a graph."""

from __future__ import annotations

from typing import Any

from regard.errors import UserError
from regard.interpret.trace import Trace
from regard.viz.overlays import PANELS, Overlay
from regard.viz.overlays.frames import SoundPanel
from regard.viz.views import choice as choices
from regard.viz.views.choice import MapChoice
from regard.viz.views.picture import Picture, rounded


def has_overlay(trace: Trace) -> bool:
    """Whether attention can be drawn over the input of a trace."""
    axes = trace.header["axes"]
    return any(axes[entry["keys"]]["kind"] in PANELS for entry in trace.header["attention"])


def overlay(trace: Trace, choice: MapChoice, at: str | None = None) -> Picture:
    """Draw the attention of one element of the input or output (`at`, its label), or of all."""
    map, _, made = choices.map_of(trace, choice)
    entries, _ = choices.chosen(trace, made)
    axes = trace.header["axes"]
    queries, keys = (axes[entries[0][axis]] for axis in ("queries", "keys"))
    if keys["kind"] not in PANELS:
        raise UserError(f"--part {made.part}: its attention is over a text; --view maps draws it")
    rows, columns = (
        choices.groups(axis["elements"]) if made.words else [[n] for n in range(len(axis["elements"]))]
        for axis in (queries, keys)
    )
    laid = Overlay(trace, map, queries, keys, rows, columns, None if at is None else _row(map.queries, at))
    panels = tuple(PANELS[keys["kind"]](laid))

    def numbers() -> dict[str, Any]:
        label, row = laid.row()
        timed = panels[0]
        sound = {"tokens": timed.times()} if isinstance(timed, SoundPanel) else {}
        return sound | {
            "part": made.part,
            "layer": made.layer,
            "head": made.head,
            "title": map.title,
            "queries": list(map.queries),
            "keys": list(map.keys),
            "weights": rounded(map.weights.tolist()),
            "shown": {"label": label, "weights": rounded(row.tolist())},
            "output": trace.header["output"] | {"text": trace.header["text"]["target"]},
            "before": trace.header["before"],
        }

    return Picture("overlay", panels, numbers)


def _row(labels: tuple[str, ...], at: str) -> int:
    """The first row with this label; of "12 left", the number is enough."""
    names = [label.strip() for label in labels]
    for row, name in enumerate(names):
        if name == at or name.split(" ")[0] == at:
            return row
    raise UserError(f"--at {at[:60]}: there is no such element; there are {', '.join(names[:3])}, ..., {names[-1]}")
