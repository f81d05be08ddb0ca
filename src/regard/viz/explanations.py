"""Explanations as pictures: a matrix of signed cells, or bars with error bars.

Blue is for inputs that raise the score of an output, orange for inputs that lower it. The sign is also visible without
colour: every cell has its number, and bars start at zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.interpret.explain.curve import Curve
from regard.interpret.explain.rise import Explanation
from regard.text.display import labels, shorten
from regard.viz import scene as scenes
from regard.viz.charts import Chart, Series
from regard.viz.colours import Ramp, signed_rgb
from regard.viz.grid import Grid
from regard.viz.grid import scene as grid_scene
from regard.viz.scene import (
    PAD,
    Item,
    Line,
    Rect,
    Scene,
    SceneText,
    Theme,
    clean,
    hexadecimal,
    isolated,
    text_width,
    title_width,
)

NOTE = "How the output depends on masked inputs, not how the model reasons."
BAR = 380.0  # width from the lowest to the highest end of bars and error bars
LINE = 34.0  # from one bar to the next
WIDEST_TITLE = 760.0
MAX_LABEL = 30  # columns


def number(value: float) -> str:
    """Format a signed number with three digits: +1.24, −15.9; what rounds to zero has no sign."""
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    text = f"{value:+.{digits}f}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def draw(explanation: Explanation, *, theme: Theme = "auto") -> str:
    """Return a complete SVG document."""
    return scene(explanation).svg(theme)


def scene(explanation: Explanation) -> Scene:
    """Lay out an explanation: a matrix if it has several outputs, else bars."""
    return grid_scene(matrix(explanation)) if len(explanation.outputs) > 1 else bars(explanation)


def matrix(explanation: Explanation) -> Grid:
    """Lay out the importance as a matrix, outputs by features, like an attention map."""
    outputs, features = labels(explanation.outputs), labels(explanation.features)

    def tip(o: int, i: int) -> str:
        error = "" if explanation.exact else f" ± {explanation.error[i, o]:.2f}"
        value = number(float(explanation.importance[i, o]))
        return f"{isolated(outputs[o])} depends on {isolated(features[i])}: {value}{error}"

    values = explanation.importance.T  # [outputs, features]
    return Grid(
        values, outputs, features, _title(explanation), "depends on →", f"change in {explanation.score}",
        Ramp.signed(values), number=number, tip=tip, about=_about(explanation), note=NOTE,
    )  # fmt: skip


def bars(explanation: Explanation) -> Scene:
    """Lay out the importance for the whole output: one bar per feature, with two standard errors."""
    names = [shorten(label, MAX_LABEL) for label in labels(explanation.features)]
    values, errors = explanation.overall, 2 * explanation.overall_error
    low, high = min(0.0, float((values - errors).min())), max(0.0, float((values + errors).max()))
    scale = BAR / ((high - low) or 1.0)
    left = PAD + max(text_width(name, 13) for name in names) + 14
    zero, top = left - low * scale, PAD + 44
    bottom = top + LINE * len(names)
    heading_width = min(title_width(_title(explanation)), WIDEST_TITLE)
    width, height = max(left + BAR + 76, PAD + heading_width, PAD + text_width(NOTE, 11)) + PAD, bottom + 66
    items: list[Item] = [scenes.card(width, height), scenes.title(_title(explanation), width)]
    for i, (name, value, error) in enumerate(zip(names, values, errors, strict=True)):
        y, x = top + i * LINE, zero + min(value, 0.0) * scale
        tip = f"{isolated(name)}: {number(value)}" + ("" if explanation.exact else f" ± {error / 2:.2f}")
        paint = hexadecimal(signed_rgb(1.0 if value > 0 else -1.0))
        items += [
            SceneText(left - 14, y + LINE / 2 + 4.5, name, 13, anchor="end"),
            Rect(x, y + 6, max(abs(value) * scale, 0.5), LINE - 12, paint, radius=3, tip=tip),
        ]
        if error > 0:
            items += _whisker(zero + (value - error) * scale, zero + (value + error) * scale, y + LINE / 2)
        end = zero + max(value + error, 0.0) * scale
        items.append(SceneText(end + 10, y + LINE / 2 + 4, number(value), 12, "quiet"))
    precision = "exact" if explanation.exact else "error bars: two standard errors"
    items += [
        scenes.polyline([(zero, top), (zero, bottom)], stroke="quiet"),
        SceneText(
            PAD,
            bottom + 26,
            f"change in {explanation.score}; {precision}; {explanation.calls} model calls",
            11,
            "quiet",
        ),
        SceneText(PAD, bottom + 46, NOTE, 11, "quiet"),
    ]
    return Scene(width, height, _title(explanation), _about(explanation), tuple(items))


def curve_charts(curves: Sequence[Curve], score: str) -> tuple[Chart, Chart]:
    """Draw deletion and insertion curves as two charts, with a line for each order."""
    counts = curves[0].counts
    percent = (100 * counts / counts[-1]).tolist()
    deletion = [
        Series.of(f"{curve.name}, area {curve.deletion_area:.2f}", percent, curve.deletion.tolist()) for curve in curves
    ]
    insertion = [
        Series.of(f"{curve.name}, area {curve.insertion_area:.2f}", percent, curve.insertion.tolist())
        for curve in curves
    ]
    return (
        Chart("Deletion: most important hidden first (lower is better)", "hidden (%)", score, tuple(deletion)),
        Chart("Insertion: most important shown first (higher is better)", "shown (%)", score, tuple(insertion)),
    )


def _whisker(low: float, high: float, y: float) -> tuple[Line, Line]:
    """Return an error bar over a wider stroke in the card's colour, so that it is visible on its bar."""
    strokes = (((low, y), (high, y)), ((low, y - 4), (low, y + 4)), ((high, y - 4), (high, y + 4)))
    return Line(strokes, stroke="card", line=4), Line(strokes, stroke="ink", line=1.4)


def _title(explanation: Explanation) -> str:
    return clean(explanation.title) or "Importance of each part of the input"


def _about(explanation: Explanation) -> str:
    """Return a text alternative of the picture."""
    order = explanation.order[:12]
    top = ", ".join(f"{isolated(clean(explanation.features[i]))} {number(explanation.overall[i])}" for i in order)
    return f"Importance for the whole output, in descending order: {top}. {NOTE}"
