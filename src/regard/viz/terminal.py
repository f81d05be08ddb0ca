"""A map, or any grid of numbers, as text: coloured cells where the terminal can show them, else shades of grey.

The first of these that fits the width is taken:

1. wide cells with the number in them and the words written level above;
2. cells two columns wide, the words written downwards above them;
3. cells one column wide;
4. several panels of two-column cells, one below another, each for a range of keys.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Sequence
from typing import IO, Literal

import numpy as np

from regard.text.display import clusters, columns, shorten
from regard.viz.colours import DARK_INK, readable_ink, xterm256
from regard.viz.grid import Grid, whole
from regard.viz.maps import Map
from regard.viz.scene import clean

Colour = Literal["truecolor", "256", "none"]

SHADES = " ░▒▓█"
WIDEST_CELL = 14  # columns; longer words are cut, or written downwards
TALLEST_HEAD = 14  # lines of words written downwards
RESET = "\x1b[0m"


def capabilities(stream: IO[str]) -> tuple[int, Colour]:
    """The width of the terminal behind a stream, and the colours it can show.

    A file or a pipe gets none, and so does any terminal whose user has set NO_COLOR (see no-color.org).
    """
    width = shutil.get_terminal_size(fallback=(80, 24)).columns
    terminal = os.environ.get("TERM", "")
    if not stream.isatty() or os.environ.get("NO_COLOR") or terminal == "dumb":
        return width, "none"
    if os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return width, "truecolor"
    return width, "256" if "256color" in terminal else "none"


def draw(map: Map, *, width: int, colour: Colour) -> str:
    """The map as lines of at most `width` columns: keys along the top, queries down the left, a legend below."""
    return grid(Grid.of(map), width=width, colour=colour)


def grid(grid: Grid, *, width: int, colour: Colour) -> str:
    """Any grid of numbers, in at most `width` columns; outlined cells stand in brackets, where there is room.

    Whatever the tokens contain, the only escape sequences in the result are the colours written here.
    """
    width = max(width, 12)
    rows = [shorten(label, max(4, width * 2 // 5)) for label in grid.rows]
    heads = grid.columns
    margin = max(columns(row) for row in rows)
    room = width - margin - 1
    lines = [shorten(clean(grid.title), width), ""] if grid.title else []
    cell = _cell_width(grid, room)
    links = set(grid.links)
    for start in range(0, len(heads), room // cell):
        keys = range(start, min(start + room // cell, len(heads)))
        lines += [""] if start else []
        lines += [" " * (margin + 1) + line for line in _heads(heads[start : keys.stop], cell)]
        for r, row in enumerate(rows):
            cells = "".join(_cell(grid, r, c, (r, c) in links, cell, colour) for c in keys)
            lines.append((" " * (margin - columns(row)) + row + " " + cells).rstrip(" "))
    lines += ["", _legend(grid, cell, margin, width, colour)]
    lines += textwrap.wrap(clean(grid.note), width)
    return "\n".join(lines) + "\n"


def _cell_width(grid: Grid, room: int) -> int:
    """How wide a cell can be so that all stand side by side; two where they cannot, unless there are words on them."""
    heads = grid.columns
    words = [word for row in grid.words for word in row]
    level = min(WIDEST_CELL, max(6, *(columns(word) for word in (*heads, *words))) + 1)
    if level * len(heads) <= room or words:
        return min(level, room)
    narrow = max(columns(cluster) for head in heads for cluster in clusters(head))  # 2 for Chinese and its like
    return 1 if narrow == 1 and len(heads) <= room < 2 * len(heads) else 2


def _heads(heads: Sequence[str], cell: int) -> list[str]:
    """The words above the cells: level where cells are wide, else downwards, each ending just above its column."""
    if cell > 2:
        return ["".join(centred(shorten(head, cell - 1), cell - 1) + " " for head in heads).rstrip()]
    stacks = []
    for head in heads:
        signs = clusters(head)
        stacks.append(signs if len(signs) <= TALLEST_HEAD else [*signs[: TALLEST_HEAD - 1], "⋮"])
    height = max(len(stack) for stack in stacks)
    full = [[""] * (height - len(stack)) + stack for stack in stacks]
    return ["".join(stack[i] + " " * (cell - columns(stack[i])) for stack in full).rstrip() for i in range(height)]


def _cell(grid: Grid, r: int, c: int, linked: bool, cell: int, colour: Colour) -> str:
    """One cell: a coloured ground (or a shade), and the number where there is room for it."""
    value, written = float(grid.values[r, c]), grid.written(r, c)
    signed, share = grid.ramp.kind == "signed", float(grid.ramp.shares(np.array(value)))
    shade = shade_of(abs(share)) if colour == "none" and (cell <= 2 or not signed) else " "
    if cell > 2:
        text = shorten(written, cell - 1 - 2 * linked)
        text = centred(f"[{text}]" if linked else text, cell - 1, fill=shade) + " "
    else:  # no room but for the sign, which is never told by colour alone
        text = ("−" if signed and share < 0 and written else shade) + shade * (cell - 1)
    return text if colour == "none" else painted(text, grid.ramp.rgb(value), colour)


def painted(text: str, ground: tuple[int, int, int], colour: Colour) -> str:
    """Text on a coloured ground, in black or white, whichever can be read there."""
    dark = readable_ink(ground) == DARK_INK
    if colour == "256":
        return f"\x1b[48;5;{xterm256(ground)};38;5;{16 if dark else 231}m{text}{RESET}"
    return "\x1b[48;2;{};{};{};38;2;{}m".format(*ground, "0;0;0" if dark else "255;255;255") + text + RESET


def shade_of(weight: float) -> str:
    """The shade for a weight: five of them, for the five fifths of 0..1."""
    return SHADES[min(int(min(max(weight, 0.0), 1.0) * len(SHADES)), len(SHADES) - 1)]


def _legend(grid: Grid, cell: int, margin: int, width: int, colour: Colour) -> str:
    """A line that says which colour or shade is which number, as long as there is room for."""
    low, high = whole(grid.ramp.low), whole(grid.ramp.high)
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
    words = f"   {grid.legend}" + (": rows look at columns" if grid.corner.startswith("looks at") else "")
    used = steps + len(low) + len(high) + 2 + len(words)
    line += words if used <= width else ""
    return " " * (margin + 1) + line if margin + 1 + used <= width else line


def centred(text: str, room: int, fill: str = " ") -> str:
    spare = room - columns(text)
    return fill * (spare // 2) + text + fill * (spare - spare // 2)
