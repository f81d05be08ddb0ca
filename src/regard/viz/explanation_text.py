"""Explanations in a terminal: bars with their uncertainty, and the matrix of inputs by outputs."""

from __future__ import annotations

from dataclasses import replace

from regard.interpret.explain.rise import Explanation
from regard.text.display import columns, labels, shorten
from regard.viz import explanations
from regard.viz.colours import signed_rgb, xterm256
from regard.viz.explanations import number
from regard.viz.terminal import RESET, Colour, grid

SURE, UNSURE = "█", "░"
WIDEST_BAR = 48


def bars(explanation: Explanation, *, width: int, colour: Colour) -> str:
    """A line a feature: its name, its importance for the whole output ± its standard error, and a bar.

    The bar is solid as far as the importance is sure (two standard errors off), and shaded as far as it may reach.
    """
    names = [shorten(label, max(8, width // 3)) for label in labels(explanation.features)]
    wide = max(map(columns, names))
    values, errors = explanation.overall, 2 * explanation.overall_error
    numbers = [number(value) for value in values]
    if not explanation.exact:
        numbers = [f"{one} ± {error / 2:.2f}" for one, error in zip(numbers, errors, strict=True)]
    written = max(map(len, numbers))
    low, high = min(0.0, float((values - errors).min())), max(0.0, float((values + errors).max()))
    room = max(4, min(WIDEST_BAR, width - wide - written - 4 - (low < 0)))
    scale = room / ((high - low) or 1.0)
    lines = []
    for name, text, value, error in zip(names, numbers, values, errors, strict=True):
        bar = _bar(float(value), float(error), low, room, scale, colour)
        lines.append(f"{name}{' ' * (wide - columns(name))}  {text:>{written}}  {bar}".rstrip())
    return "\n".join(lines) + "\n"


def _bar(value: float, error: float, low: float, room: int, scale: float, colour: Colour) -> str:
    """One bar from zero to the value, to either side; cells within the error bar are shaded."""
    cells = []
    for cell in range(room):
        middle = low + (cell + 0.5) / scale
        unsure = value - error < middle < value + error
        inside = min(0.0, value) < middle < max(0.0, value)
        cells.append(UNSURE if unsure else SURE if inside else " ")
    zero = round(-low * scale)
    bar = "".join(cells)
    if low < 0:
        bar = bar[:zero] + "│" + bar[zero:]
    return _painted(bar, 1.0 if value > 0 else -1.0, colour) if bar.strip(" │") else bar


def _painted(text: str, value: float, colour: Colour) -> str:
    """The text in the colour of a sign."""
    if colour == "none":
        return text
    red, green, blue = signed_rgb(value)
    code = f"38;5;{xterm256((red, green, blue))}" if colour == "256" else f"38;2;{red};{green};{blue}"
    return f"\x1b[{code}m{text.rstrip()}{RESET}"


def matrix(explanation: Explanation, *, width: int, colour: Colour) -> str:
    """Outputs down the left, features along the top, and how much the one depends on the other."""
    return grid(replace(explanations.matrix(explanation), title="", note=""), width=width, colour=colour)
