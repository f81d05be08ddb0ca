"""Explanations in a terminal: bars with error bars, and the matrix of outputs by inputs."""

from __future__ import annotations

from dataclasses import replace

from rich.color import Color
from rich.style import Style

from regard.interpret.explain.rise import Explanation
from regard.text.display import columns, labels, shorten
from regard.viz import explanations
from regard.viz.colours import signed_rgb
from regard.viz.explanations import number
from regard.viz.terminal import SYSTEMS, Colour, grid

SOLID, SHADED = "█", "░"
MAX_BAR = 48  # columns


def bars(explanation: Explanation, *, width: int, colour: Colour) -> str:
    """Format one line per feature: its name, its importance for the whole output ± its standard error, and a bar.

    The part of the bar within two standard errors of its end is shaded.
    """
    names = [shorten(label, max(8, width // 3)) for label in labels(explanation.features)]
    wide = max(map(columns, names))
    values, errors = explanation.overall, 2 * explanation.overall_error
    numbers = [number(value) for value in values]
    if not explanation.exact:
        numbers = [f"{one} ± {error / 2:.2f}" for one, error in zip(numbers, errors, strict=True)]
    number_width = max(map(len, numbers))
    low, high = min(0.0, float((values - errors).min())), max(0.0, float((values + errors).max()))
    longest = max(4, min(MAX_BAR, width - wide - number_width - 4 - (low < 0)))
    scale = longest / ((high - low) or 1.0)
    lines = []
    for name, text, value, error in zip(names, numbers, values, errors, strict=True):
        bar = _bar(float(value), float(error), low, longest, scale, colour)
        lines.append(f"{name}{' ' * (wide - columns(name))}  {text:>{number_width}}  {bar}".rstrip())
    return "\n".join(lines) + "\n"


def _bar(value: float, error: float, low: float, width: int, scale: float, colour: Colour) -> str:
    """Format one bar from zero to the value; cells within the error bar are shaded."""
    cells = []
    for cell in range(width):
        middle = low + (cell + 0.5) / scale
        within_error = value - error < middle < value + error
        inside = min(0.0, value) < middle < max(0.0, value)
        cells.append(SHADED if within_error else SOLID if inside else " ")
    zero = round(-low * scale)
    bar = "".join(cells)
    if low < 0:
        bar = bar[:zero] + "│" + bar[zero:]
    return _painted(bar, 1.0 if value > 0 else -1.0, colour) if bar.strip(" │") else bar


def _painted(text: str, value: float, colour: Colour) -> str:
    """Return text in the colour of a sign."""
    style = Style(color=Color.from_rgb(*signed_rgb(value)))
    return style.render(text.rstrip(), color_system=SYSTEMS.get(colour))


def matrix(explanation: Explanation, *, width: int, colour: Colour) -> str:
    """Format the importance of features (columns) for outputs (rows)."""
    return grid(replace(explanations.matrix(explanation), title="", note=""), width=width, colour=colour)
