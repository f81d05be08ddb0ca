"""An attention map as text: coloured cells where the terminal can show them, shades of grey where it cannot.

The first of these that fits the width is taken:

1. wide cells with the number in them and the words written level above;
2. cells two columns wide, the words written downwards above them;
3. cells one column wide;
4. several panels of two-column cells, one below another, each for a range of keys.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import IO, Literal

import numpy as np

from regard.inside.colours import rgb, wants_dark_ink, xterm256
from regard.inside.maps import Map, clusters, columns, labels, shorten, visible

Colour = Literal["truecolor", "256", "none"]

SHADES = " ░▒▓█"
WIDEST_CELL = 14  # columns; longer words are cut, or written downwards
TALLEST_HEAD = 14  # lines of words written downwards
SHOWN = 0.05  # smaller weights are not written as numbers
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
    """The map as lines of at most `width` columns: keys along the top, queries down the left, a legend below.

    Whatever the tokens contain, the only escape sequences in the result are the colours written here.
    """
    width = max(width, 12)
    rows = [shorten(label, max(4, width // 3)) for label in labels(map.queries)]
    heads = labels(map.keys)
    margin = max(columns(row) for row in rows)
    room = width - margin - 1
    lines = [shorten(" ".join(visible(word) for word in map.title.split()), width), ""] if map.title else []
    cell = _cell_width(heads, room)
    for start in range(0, len(heads), room // cell):
        keys = slice(start, start + room // cell)
        lines += [""] if start else []
        lines += [" " * (margin + 1) + line for line in _heads(heads[keys], cell)]
        for row, weights in zip(rows, map.weights[:, keys], strict=True):
            line = " " * (margin - columns(row)) + row + " " + "".join(_cell(float(w), cell, colour) for w in weights)
            lines.append(line.rstrip(" "))
    return "\n".join([*lines, "", _legend(margin, width, colour)]) + "\n"


def _cell_width(heads: Sequence[str], room: int) -> int:
    """How wide a cell can be so that all of them stand side by side; two where they cannot."""
    level = min(WIDEST_CELL, max(6, *(columns(head) for head in heads)) + 1)
    if level * len(heads) <= room:
        return level
    narrow = max(columns(cluster) for head in heads for cluster in clusters(head))  # 2 for Chinese and its like
    return 1 if narrow == 1 and len(heads) <= room < 2 * len(heads) else 2


def _heads(heads: Sequence[str], cell: int) -> list[str]:
    """The words above the cells: level where cells are wide, else downwards, each ending just above its column."""
    if cell > 2:
        return ["".join(_centred(shorten(head, cell - 1), cell - 1) + " " for head in heads).rstrip()]
    stacks = []
    for head in heads:
        signs = clusters(head)
        stacks.append(signs if len(signs) <= TALLEST_HEAD else [*signs[: TALLEST_HEAD - 1], "⋮"])
    height = max(len(stack) for stack in stacks)
    full = [[""] * (height - len(stack)) + stack for stack in stacks]
    return ["".join(stack[i] + " " * (cell - columns(stack[i])) for stack in full).rstrip() for i in range(height)]


def _cell(weight: float, cell: int, colour: Colour) -> str:
    """One cell: a coloured ground (or a shade), and the number where there is room for it."""
    number = f"{weight:.2f}" if weight >= SHOWN and cell > 2 else ""
    if colour == "none":
        shade = shade_of(weight)
        return _centred(number, cell - 1, fill=shade) + " " if cell > 2 else shade * cell
    ground = rgb(weight)
    if colour == "256":
        paint = f"\x1b[48;5;{xterm256(ground)};38;5;{16 if wants_dark_ink(weight) else 231}m"
    else:
        paint = "\x1b[48;2;{};{};{};38;2;{}m".format(*ground, "0;0;0" if wants_dark_ink(weight) else "255;255;255")
    return paint + (_centred(number, cell - 1) + " " if cell > 2 else " " * cell) + RESET


def shade_of(weight: float) -> str:
    """The shade for a weight: five of them, for the five fifths of 0..1."""
    return SHADES[min(int(min(max(weight, 0.0), 1.0) * len(SHADES)), len(SHADES) - 1)]


def _legend(margin: int, width: int, colour: Colour) -> str:
    """A line that says which colour or shade is which weight, as long as there is room for."""
    if colour == "none":
        scale = "  ".join(f"{shade} {i / len(SHADES):.1f}+" for i, shade in enumerate(SHADES) if i)
        short = f"0 {SHADES} 1"
        line = next((text for text in (f"blank: below 0.2  {scale}", scale, short) if len(text) <= width), short)
    else:
        steps = min(24, width - 4)
        strip = "".join(_cell(float(w), 1, colour) for w in np.linspace(0.0, 1.0, steps))
        line = f"0 {strip} 1"
        words = "   attention weight: rows look at columns"
        line += words if steps + 4 + len(words) <= width else ""
        if margin + 1 + steps + 4 + len(words) <= width:
            return " " * (margin + 1) + line
    return line


def _centred(text: str, room: int, fill: str = " ") -> str:
    spare = room - columns(text)
    return fill * (spare // 2) + text + fill * (spare - spare // 2)
