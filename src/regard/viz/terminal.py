"""A map, or any grid of numbers, as text: coloured cells where the terminal supports them, else shades of grey.

The first layout that fits the width is used:

1. wide cells with numbers, under horizontal labels;
2. cells two columns wide, under vertical labels;
3. cells one column wide;
4. several panels of two-column cells, one below the other, each for a range of keys.

The layout is our own: tables of rich have no vertical labels and no panels. Colours are rich's.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import IO, Literal

import numpy as np
from rich.color import Color, ColorSystem
from rich.console import Console
from rich.style import Style

from regard.text.display import clusters, columns, shorten
from regard.viz.colours import readable_ink
from regard.viz.grid import Grid, short_number
from regard.viz.maps import Map
from regard.viz.scene import clean

Colour = Literal["truecolor", "256", "none"]

SHADES = " ░▒▓█"
MAX_CELL = 14  # columns; longer labels are shortened, or vertical
MAX_HEAD = 14  # lines of vertical labels
SYSTEMS = {"truecolor": ColorSystem.TRUECOLOR, "256": ColorSystem.EIGHT_BIT}


def capabilities(stream: IO[str]) -> tuple[int, Colour]:
    """Return the width and the colours of the terminal behind a stream; a file or a pipe has no colours.

    rich reads TERM, COLORTERM and NO_COLOR (see no-color.org). The width is not rich's, which is 80 where TERM is dumb.
    """
    console = Console(file=stream)
    system = "" if console.no_color else console.color_system
    width = shutil.get_terminal_size(fallback=(80, 24)).columns
    return width, "truecolor" if system == "truecolor" else "256" if system == "256" else "none"


def draw(map: Map, *, width: int, colour: Colour) -> str:
    """Format a map as lines of at most `width` columns: keys along the top, queries at the left, a legend below."""
    return grid(Grid.of(map), width=width, colour=colour)


def grid(grid: Grid, *, width: int, colour: Colour) -> str:
    """Format a grid in at most `width` columns; outlined cells are in brackets if there is space.

    Escape sequences in tokens are made visible, so that the only ones in the result are colours.
    """
    width = max(width, 12)
    rows = [shorten(label, max(4, width * 2 // 5)) for label in grid.rows]
    heads = grid.columns
    margin = max(columns(row) for row in rows)
    space = width - margin - 1
    lines = [shorten(clean(grid.title), width), ""] if grid.title else []
    cell = _cell_width(grid, space)
    links = set(grid.links)
    for start in range(0, len(heads), space // cell):
        keys = range(start, min(start + space // cell, len(heads)))
        lines += [""] if start else []
        lines += [" " * (margin + 1) + line for line in _heads(heads[start : keys.stop], cell)]
        for r, row in enumerate(rows):
            cells = "".join(_cell(grid, r, c, (r, c) in links, cell, colour) for c in keys)
            lines.append((" " * (margin - columns(row)) + row + " " + cells).rstrip(" "))
    lines += ["", _legend(grid, cell, margin, width, colour)]
    lines += textwrap.wrap(clean(grid.note), width)
    return "\n".join(lines) + "\n"


def _cell_width(grid: Grid, space: int) -> int:
    """Return the width of a cell with which all fit side by side; 2 if none does, unless the cells have words."""
    heads = grid.columns
    words = [word for row in grid.words for word in row]
    wide = min(MAX_CELL, max(6, *(columns(word) for word in (*heads, *words))) + 1)
    if wide * len(heads) <= space or words:
        return min(wide, space)
    narrow = max(columns(cluster) for head in heads for cluster in clusters(head))  # 2 for East Asian characters
    return 1 if narrow == 1 and len(heads) <= space < 2 * len(heads) else 2


def _heads(heads: Sequence[str], cell: int) -> list[str]:
    """Return the column labels: horizontal over wide cells, else vertical and aligned at the bottom."""
    if cell > 2:
        return ["".join(centred(shorten(head, cell - 1), cell - 1) + " " for head in heads).rstrip()]
    stacks = []
    for head in heads:
        characters = clusters(head)
        stacks.append(characters if len(characters) <= MAX_HEAD else [*characters[: MAX_HEAD - 1], "⋮"])
    height = max(len(stack) for stack in stacks)
    full = [[""] * (height - len(stack)) + stack for stack in stacks]
    return ["".join(stack[i] + " " * (cell - columns(stack[i])) for stack in full).rstrip() for i in range(height)]


def _cell(grid: Grid, r: int, c: int, linked: bool, cell: int, colour: Colour) -> str:
    """Format one cell: a coloured background or a shade, and the number if there is space."""
    value, content = float(grid.values[r, c]), grid.cell_text(r, c)
    signed, share = grid.ramp.kind == "signed", float(grid.ramp.shares(np.array(value)))
    shade = shade_of(abs(share)) if colour == "none" and (cell <= 2 or not signed) else " "
    if cell > 2:
        text = shorten(content, cell - 1 - 2 * linked)
        text = centred(f"[{text}]" if linked else text, cell - 1, fill=shade) + " "
    else:  # the sign of a number must be visible without colour
        text = ("−" if signed and share < 0 and content else shade) + shade * (cell - 1)
    return text if colour == "none" else painted(text, grid.ramp.rgb(value), colour)


def painted(text: str, background: tuple[int, int, int], colour: Colour) -> str:
    """Return text on a coloured background, in black or white, whichever is readable there."""
    style = Style(color=Color.parse(readable_ink(background)), bgcolor=Color.from_rgb(*background))
    return style.render(text, color_system=SYSTEMS.get(colour))


def shade_of(weight: float) -> str:
    """Return one of five shades for a weight."""
    return SHADES[min(int(min(max(weight, 0.0), 1.0) * len(SHADES)), len(SHADES) - 1)]


def _legend(grid: Grid, cell: int, margin: int, width: int, colour: Colour) -> str:
    """Format the colour bar or the list of shades, as much of it as fits."""
    low, high = short_number(grid.ramp.low), short_number(grid.ramp.high)
    if colour == "none" and grid.ramp.kind == "signed":
        shaded = "" if cell > 2 else f", {SHADES[1:]} by size, − below zero"
        return shorten(f"{low} to {high}: {grid.legend}{shaded}", width)
    if colour == "none":
        step = (grid.ramp.high - grid.ramp.low) / len(SHADES)
        scale = "  ".join(f"{s} {grid.ramp.low + i * step:.2g}+" for i, s in enumerate(SHADES) if i)
        short = f"{low} {SHADES} {high}"
        blank = f"blank: below {grid.ramp.low + step:.2g}  {scale}"
        return next((text for text in (blank, scale, short) if len(text) <= width), short)
    steps = min(24, width - len(low) - len(high) - 2)
    strip = "".join(painted(" ", grid.ramp.rgb(float(value)), colour) for value in grid.ramp.steps(steps))
    line = f"{low} {strip} {high}"
    words = f"   {grid.legend}" + (": rows attend to columns" if grid.corner.startswith("attends to") else "")
    used = steps + len(low) + len(high) + 2 + len(words)
    line += words if used <= width else ""
    return " " * (margin + 1) + line if margin + 1 + used <= width else line


def centred(text: str, width: int, fill: str = " ") -> str:
    spare = width - columns(text)
    return fill * (spare // 2) + text + fill * (spare - spare // 2)
