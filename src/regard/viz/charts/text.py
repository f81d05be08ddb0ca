"""A line chart as text: drawn in braille dots, or as a plain table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise

from rich.color import Color
from rich.style import Style

from regard.text.display import columns, shorten
from regard.viz.charts.chart import COLOURS, Chart, marked, value_label, x_label
from regard.viz.scene import clean
from regard.viz.terminal import SYSTEMS, Colour

MARKERS = "●■▲◆▼✚✖"
LINES = 16  # lines of a plot
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of braille dots, [row][column]


def terminal(chart: Chart, *, width: int, colour: Colour) -> str:
    """Format the chart in at most `width` columns: lines of braille dots, with a marker for each series."""
    width = max(width, 30)
    y = chart.y
    ticks = y.ticks(5)
    margin = max(columns(label) for _, label in ticks)
    across = min(width - margin - 2, 100)
    ink, owner = _dots(chart, across, LINES)
    markers = _markers(chart, across, LINES)
    rows = {round((1 - y(number)) * (LINES - 1)): label for number, label in ticks}
    lines = [shorten(clean(chart.title), width), ""] if chart.title else []
    lines.append(shorten(clean(chart.y_title), width))
    for r in range(LINES):
        cells = [
            _painted(MARKERS[markers[r, c] % len(MARKERS)], markers[r, c], colour) if (r, c) in markers
            else _painted(chr(0x2800 + ink[r][c]), owner[r][c], colour) if ink[r][c] else " "
            for c in range(across)
        ]  # fmt: skip
        label = rows.get(r, "")
        lines.append((" " * (margin - columns(label)) + label + (" ┤" if label else " │") + "".join(cells)).rstrip(" "))
    lines += [" " * margin + " └" + "─" * across, *_below(chart, margin, across), ""]
    lines += _legend(chart, width, colour)
    return "\n".join(lines) + "\n"


def _column(chart: Chart, x: float, across: int) -> float:
    """Return the column of a number, with one free column at either side."""
    return 1 + chart.x(x) * (across - 3)


def _dots(chart: Chart, across: int, down: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the lines as braille: the dots of each cell, and the last series that set one of them."""
    ink, owner = ([[0] * across for _ in range(down)] for _ in range(2))
    for i, series in enumerate(chart.series):
        points = [(2 * _column(chart, p.x, across) + 0.5, (1 - chart.y(p.y)) * (4 * down - 4) + 1.5)
                  for p in series.points]  # fmt: skip
        for (x0, y0), (x1, y1) in pairwise(points):
            steps = max(
                1, math.ceil(2 * max(abs(x1 - x0), abs(y1 - y0)))
            )  # finer than the dots, so that there are no gaps
            for s in range(steps + 1):
                x, y = round(x0 + (x1 - x0) * s / steps), round(y0 + (y1 - y0) * s / steps)
                if 0 <= x < 2 * across and 0 <= y < 4 * down:
                    ink[y // 4][x // 2] |= DOTS[y % 4][x % 2]
                    owner[y // 4][x // 2] = i
    return ink, owner


def _markers(chart: Chart, across: int, down: int) -> dict[tuple[int, int], int]:
    """Return the series whose marker is in each cell, the first one if there are several."""
    markers: dict[tuple[int, int], int] = {}
    for i, series in enumerate(chart.series):
        for p in marked(series.points):
            cell = round((1 - chart.y(p.y)) * (down - 1)), round(_column(chart, p.x, across))
            if 0 <= cell[0] < down:
                markers.setdefault(cell, i)
    return markers


def _painted(text: str, series: int, colour: Colour) -> str:
    code = COLOURS[series % len(COLOURS)]
    return Style(color=Color.parse(code)).render(text, color_system=SYSTEMS.get(colour)) if code else text


def _below(chart: Chart, margin: int, across: int) -> list[str]:
    """Return the labels of the x axis that do not overlap, and its title."""
    line, end = "", 0
    for number, label in chart.x_ticks or chart.x.ticks(max(2, across // 12)):
        label = clean(label)
        start = min(max(round(_column(chart, number, across)) - columns(label) // 2, 0), across - columns(label))
        if start >= end + (end > 0):
            line += " " * (start - end) + label
            end = start + columns(label)
    title = shorten(clean(chart.x_title), across)
    return [" " * (margin + 2) + line, " " * (margin + 2 + (across - columns(title)) // 2) + title]


def _legend(chart: Chart, width: int, colour: Colour) -> list[str]:
    lines, used = [""], 0
    for i, series in enumerate(chart.series):
        name = shorten(clean(series.name), width - 2)
        wide = columns(name) + 2
        if used and used + 3 + wide > width:
            lines, used = [*lines, ""], 0
        lines[-1] += ("   " if used else "") + _painted(MARKERS[i % len(MARKERS)], i, colour) + " " + name
        used += wide + (3 if used else 0)
    return [*lines, *textwrap.wrap(clean(chart.note), width)]


def table(chart: Chart, width: int = 100) -> str:
    """Format the numbers of the chart as a table, one row per x and one column per series."""
    xs = sorted({point.x for point in chart.points()})
    values = [{point.x: value_label(point) for point in series.points} for series in chart.series]
    heads = [clean(chart.x_title), *(clean(series.name) for series in chart.series)]
    return columned(heads, [[x_label(chart, x), *(value.get(x, "–") for value in values)] for x in xs], width)


def columned(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: int = 1) -> str:
    """Format a table; the first `left` columns are left-aligned, the others right-aligned.

    Columns that do not fit into `width` continue below, after the first column again.
    """
    wide = [max(columns(row[c]) for row in (heads, *rows)) for c in range(len(heads))]
    blocks: list[list[int]] = [[0]]
    for c in range(1, len(heads)):
        if len(blocks[-1]) > 1 and sum(wide[k] + 2 for k in (*blocks[-1], c)) - 2 > width:
            blocks.append([0])
        blocks[-1].append(c)

    def cell(text: str, c: int) -> str:
        space = " " * (wide[c] - columns(text))
        return text + space if c < left else space + text

    def block(chosen: Sequence[int]) -> str:
        return "\n".join("  ".join(cell(row[c], c) for c in chosen).rstrip() for row in (heads, *rows))

    return "\n\n".join(block(chosen) for chosen in blocks) + "\n"
