"""Position encodings: the vectors as a heat map, dot products by distance, and four criteria."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from regard.interpret.position_study import Criterion, PositionStudy
from regard.viz import scene as scenes
from regard.viz.charts import Chart, Point, Series
from regard.viz.colours import Ramp
from regard.viz.grid import Grid
from regard.viz.scene import PAD, Item, Rect, Scene, SceneText, text_width
from regard.viz.terminal import Colour
from regard.viz.views.picture import Picture, rounded

HOLDS_COLOUR, FAILS_COLOUR = "#0072b2", "#d55e00"


def positions(study: PositionStudy, whose: str = "") -> Picture:
    """Draw a study of one kind of position vectors; `whose` names the run that learned them."""
    length, width = study.vectors.shape
    name = f"{study.kind.capitalize()} positions" + (f" of {whose}" if whose else "")
    heat = Grid(
        study.vectors, tuple(map(str, range(length))), tuple(map(str, range(width))), name, "position, feature →",
        "value", Ramp.signed(study.vectors), stretched=True,
        about=f"The vectors of {length} positions, {width} features each.",
    )  # fmt: skip
    points = (
        Point(k, mean, mean - spread, mean + spread)
        for k, (mean, spread) in enumerate(zip(study.dot, study.spread, strict=True))
    )
    dots = Chart(
        "Dot product by distance", "distance", "dot product", (Series(study.kind, tuple(points)),), spread="band",
        note="line: mean over all pairs at this distance; band: standard deviation (none if only the distance matters)",
    )  # fmt: skip

    def numbers() -> dict[str, Any]:
        arrays = ("array", "dot", "spread")
        return {"positions": {k: rounded(v) if k in arrays else v for k, v in study.to_json().items()}}

    return Picture("positions", (heat, dots, Criteria(study.criteria)), numbers)


@dataclass(frozen=True)
class Criteria:
    """A table of the criteria and whether each is met."""

    criteria: tuple[Criterion, ...]

    def scene(self) -> Scene:
        title = "Criteria for position encodings"
        wide = max(text_width(f"{one.value:.3g}: {one.why}", 12) for one in self.criteria)
        names = PAD + 74
        width, height = names + 130 + wide + PAD, PAD + 52 + 34.0 * len(self.criteria)
        items: list[Item] = [scenes.card(width, height), scenes.title(title, width)]
        for i, one in enumerate(self.criteria):
            y = PAD + 44 + 34.0 * i
            items += [
                Rect(PAD, y, 54, 22, HOLDS_COLOUR if one.holds else FAILS_COLOUR, radius=11),
                SceneText(PAD + 27, y + 15.5, "yes" if one.holds else "no", 12, "#ffffff", "middle", bold=True),
                SceneText(names, y + 16, one.name, 13, bold=True),
                SceneText(names + 130, y + 16, f"{one.value:.3g}: {one.why}", 12, "quiet"),
            ]
        results = "; ".join(f"{one.name}: {'yes' if one.holds else 'no'}, {one.value:.3g}" for one in self.criteria)
        return Scene(width, height, title, results, tuple(items))

    def text(self, *, width: int, colour: Colour) -> str:
        margin = " " * 20
        lines = [
            line
            for one in self.criteria
            for line in textwrap.wrap(f"{one.name:15}{'yes' if one.holds else 'no':5}{one.value:.3g}: {one.why}", width,
                                      subsequent_indent=margin)
        ]  # fmt: skip
        return "\n".join(lines) + "\n"
