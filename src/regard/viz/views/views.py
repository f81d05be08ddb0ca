"""The views by name, and which of them apply to a trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.errors import UserError
from regard.interpret.trace import Trace
from regard.viz.grid import Grid
from regard.viz.views import choice as choices
from regard.viz.views.choice import MapChoice
from regard.viz.views.curves import curves
from regard.viz.views.gates import gates
from regard.viz.views.heads import heads
from regard.viz.views.overlay import has_overlay, overlay
from regard.viz.views.picture import Picture, rounded
from regard.viz.views.positions import positions
from regard.viz.views.walk import walk

__all__ = ["VIEWS", "curves", "draw", "fitting", "positions"]

VIEWS = ("overlay", "align", "maps", "heads", "walk", "gates", "positions", "curves")


def fitting(trace: Trace) -> list[str]:
    """Return the views that apply to a trace, the most informative first."""
    header = trace.header
    applicable = {
        "overlay": has_overlay(trace),
        "align": any(entry["part"] == "cross" for entry in header["attention"]),
        "maps": bool(header["attention"]),
        "heads": bool(header["attention"]),
        "gates": bool(header["gates"]),
        "walk": bool(header["layers"]),
    }
    return [view for view, applies in applicable.items() if applies]


def draw(trace: Trace, view: str | None = None, choice: MapChoice | None = None, *, at: str | None = None) -> Picture:
    """Draw a view of a trace; by default the first of `fitting(trace)`. View overlay: `at` is the label of an element.

    >>> draw(model.trace("this cat is very large"), "heads").save("heads.png")          # doctest: +SKIP
    """
    fits, choice = fitting(trace), choice or MapChoice()
    view = view or fits[0]
    if view not in fits:
        also = "positions and curves need no text" if view in ("positions", "curves") else f"it has {', '.join(fits)}"
        raise UserError(f"--view {view}: {_lacking(trace, view)}; {also}")
    if view == "overlay":
        picture = overlay(trace, choice, at)
    elif view in ("align", "maps"):
        picture = _map(trace, view, choice)
    elif view == "gates":
        if choice.layer == "rollout":
            raise UserError("--layer rollout is of attention: --view gates takes a number")
        picture = gates(trace, choice.part, choice.layer)
    else:
        picture = {"heads": heads, "walk": walk}[view](trace)
    return replace(picture, trace=trace)


def _lacking(trace: Trace, view: str) -> str:
    family = trace.header["model"]["family"]
    what = {
        "align": "cross-attention",
        "maps": "attention",
        "heads": "attention",
        "gates": "gates",
        "overlay": "an input to draw on",
    }.get(view, view)
    return f"{trace.header['model']['name']} is a {family} model without {what}"


def _map(trace: Trace, view: str, choice: MapChoice) -> Picture:
    if view == "align":
        choice = MapChoice("cross", choice.layer, choice.head, choice.words)
    map, links, made = choices.map_of(trace, choice)
    names = [entry["name"] for entry in choices.chosen(trace, made)[0]]

    def numbers() -> dict[str, Any]:
        return {
            "attention": names[0] if len(names) == 1 else names,
            "part": made.part,
            "layer": made.layer,
            "head": made.head,
            "words": made.words,
            "title": map.title,
            "queries": list(map.queries),
            "keys": list(map.keys),
            "weights": rounded(map.weights.tolist()),
            "links": [list(link) for link in links],
        }

    return Picture(view, (Grid.of(map, links),), numbers)
