"""A matrix of numbers with words on both axes, as a picture: attention maps, gates, importances.

`Grid` is what is shown; `scene` lays it out as coloured cells, and `terminal.grid` writes it as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from regard.text.display import labels, shorten
from regard.viz import scene as scenes
from regard.viz.colours import WEIGHTS, Ramp, readable_ink
from regard.viz.maps import Map
from regard.viz.scene import PAD, Cells, Group, Item, Rect, Scene, SceneText, isolated, text_width

LONGEST = 20  # columns of a label; the rest of a longer token is in the tooltips
SHOWN = 0.05  # weights below this are not written into their cell: they would only be noise
SPACE = 720.0  # what the cells of one side share, as long as they stay big enough to be seen
LEGEND = 168.0


def hundredths(value: float) -> str:
    return f"{value:.2f}"


@dataclass(frozen=True, eq=False)
class Grid:
    """Numbers [R, C], a label a row and a label a column, and how they are to be read.

    `corner` stands where the labels meet; `links` are cells to outline; `number` writes a value, and `tip(r, c)` says
    what a cell shows (by default: row → column: number). `words` [R][C] are written on the cells in place of numbers.
    """

    values: np.ndarray
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    title: str = ""
    corner: str = ""
    legend: str = ""
    ramp: Ramp = WEIGHTS
    links: tuple[tuple[int, int], ...] = ()
    number: Callable[[float], str] = hundredths
    tip: Callable[[int, int], str] | None = None
    words: tuple[tuple[str, ...], ...] = ()
    about: str = ""
    note: str = ""
    shown: float = SHOWN  # numbers below this part of the scale are not written
    longest: int = LONGEST  # columns of a row's label
    stretched: bool = False  # cells need not be square: the picture is wide, however many rows and columns there are

    @classmethod
    def of(cls, map: Map, links: Iterable[tuple[int, int]] = ()) -> Grid:
        """An attention map: keys along the top, queries down the left; `links` are the gold alignment's cells."""
        chosen = tuple(links)
        for q, k in chosen:
            if not (0 <= q < len(map.queries) and 0 <= k < len(map.keys)):
                raise ValueError(f"link ({q}, {k}) lies outside a map of {len(map.queries)} x {len(map.keys)}")
        rows, columns = labels(map.queries, map.words), labels(map.keys, map.words)
        return cls(map.weights, rows, columns, map.title, "looks at →", "attention weight", links=chosen,
                   about=_description(map, chosen))  # fmt: skip

    def says(self, r: int, c: int) -> str:
        if self.tip is not None:
            return self.tip(r, c)
        row, column = (isolated(shorten(label, 200)) for label in (self.rows[r], self.columns[c]))
        return f"{row} → {column}: {self.number(float(self.values[r, c]))}"

    def row_says(self, r: int) -> str:
        """Of a picture with too many cells to speak for each: where the row has its greatest number."""
        return self.says(r, int(np.abs(self.values[r]).argmax()))

    def written(self, r: int, c: int) -> str:
        """What stands on a cell: its word, or its number, unless that is next to nothing."""
        if self.words:
            return self.words[r][c]
        value = float(self.values[r, c])
        return self.number(value) if abs(float(self.ramp.shares(np.array(value)))) >= self.shown else ""


def _description(map: Map, links: tuple[tuple[int, int], ...]) -> str:
    """What a reader who cannot see the picture needs: its size, and where each row looks most."""
    shown = 24
    queries, keys = labels(map.queries, map.words), labels(map.keys, map.words)
    said = [f"A heat map of attention weights, {len(queries)} rows by {len(keys)} columns; each row looks at columns."]
    for q, row in enumerate(map.weights[:shown]):
        k = int(row.argmax())
        said.append(f"{isolated(queries[q])} looks most at {isolated(keys[k])} ({row[k]:.2f}).")
    if len(queries) > shown:
        said.append(f"And {len(queries) - shown} more rows.")
    if links:
        said.append(f"{len(links)} cells are outlined as gold alignment.")
    return " ".join(said)


@dataclass(frozen=True)
class _Layout:
    """Where everything lies. A cell takes `across` x `down`, of which `gap` stays empty."""

    across: float
    down: float
    gap: float
    radius: float
    font: float
    angle: int  # of the column labels: 0 level, -45 slanted, -90 upright
    left: float  # of the first cell
    top: float
    width: float  # of the whole picture
    height: float
    row_step: int  # every how many rows there is a label
    column_step: int


def scene(grid: Grid) -> Scene:
    """The grid as a heat map: one coloured cell a number."""
    rows = [shorten(label, grid.longest) for label in grid.rows]
    heads = [shorten(label, LONGEST) for label in grid.columns]
    layout = _lay_out(grid, rows, heads)
    cells = Cells(
        layout.left, layout.top, layout.across, layout.down, grid.ramp.rgbs(grid.values), layout.gap, layout.radius,
        grid.says, grid.row_says,
    )  # fmt: skip
    items: list[Item] = [scenes.card(layout.width, layout.height)]
    items += [scenes.title(grid.title, layout.width)] if grid.title else []
    items += [*_row_labels(rows, layout), *_column_labels(grid, heads, layout), cells]
    items += [_numbers(grid, layout), _outlines(grid, layout), *_legend(grid, layout)]
    if grid.note:
        items.append(SceneText(PAD, layout.height - PAD + 4, scenes.clean(grid.note), 11, "quiet"))
    name = scenes.clean(grid.title) or "Attention map"
    return Scene(layout.width, layout.height, name, grid.about, tuple(items))


def _lay_out(grid: Grid, rows: list[str], heads: list[str]) -> _Layout:
    across, down, font, angle = _cell_size(grid, heads)
    widest = max(text_width(head, font) for head in heads)
    slant = math.radians(-angle)
    head_height = font + (widest * math.sin(slant) if angle else 0.0)
    overhang = (
        max(text_width(head, font) * math.cos(slant) - (len(heads) - 1 - k) * across for k, head in enumerate(heads))
        if angle == -45
        else 0.0
    )
    left = PAD + max([text_width(grid.corner, 11)] + [text_width(row, font) for row in rows]) + 12
    top = PAD + (34 if grid.title else 0) + head_height + 12
    row_step, column_step = math.ceil(11 / down), math.ceil(11 / across)
    legend = LEGEND + _beside(grid) + (150 if grid.links else 0) + (230 if max(row_step, column_step) > 1 else 0)
    needs = [left + across * len(heads) + max(0.0, overhang), left + legend, PAD + text_width(grid.note, 11),
             PAD + min(scenes.title_width(grid.title), SPACE)]  # fmt: skip
    return _Layout(
        across=across, down=down,
        gap=2.5 if down >= 24 else 1.0 if down >= 10 and not grid.stretched else 0.0,
        radius=5.0 if down >= 24 else 1.5 if down >= 10 and not grid.stretched else 0.0,
        font=font, angle=angle, left=left, top=top,
        width=max(needs) + PAD,
        height=top + down * len(rows) + 51 + (24 if grid.note else 0) + PAD,
        row_step=row_step, column_step=column_step,
    )  # fmt: skip


def _cell_size(grid: Grid, heads: list[str]) -> tuple[float, float, float, int]:
    """How wide and how tall a cell is, the size of the labels, and the angle of those of the columns.

    Columns are as wide as their labels need to stand level, where there is room; else cells are square and labels turn.
    """
    longer = max(grid.values.shape)
    down = min(44.0, max(4.0 if longer <= 400 else 2.0, SPACE // longer))
    font = min(14.0, max(9.0, down * 0.6))
    widest = max(text_width(head, font) for head in heads)
    if grid.words:
        written = max(text_width(word, 12) for row in grid.words for word in row)
        return max(widest, written) + 14, max(down, 34.0), 13.0, 0
    across = down
    if grid.stretched:
        across, down = (
            max(2.0, min(16.0, room // count)) for room, count in ((SPACE, len(heads)), (SPACE / 2, len(grid.rows)))
        )
    level = max(down * 1.15, widest + 14)
    if level <= 96 and level * len(heads) <= SPACE:
        return level, down, font, 0
    return across, down, font, -45 if across >= font * 1.5 else -90


def _row_labels(rows: list[str], layout: _Layout) -> list[Item]:
    x, middle = layout.left - 12, layout.down / 2 + layout.font * 0.35
    return [
        SceneText(x, layout.top + r * layout.down + middle, row, layout.font, anchor="end")
        for r, row in enumerate(rows)
        if r % layout.row_step == 0
    ]


def _column_labels(grid: Grid, heads: list[str], layout: _Layout) -> list[Item]:
    y = layout.top - 12
    items: list[Item] = [SceneText(layout.left - 12, y, grid.corner, 11, "quiet", "end")] if grid.corner else []
    for c, head in enumerate(heads):
        if c % layout.column_step == 0:
            x = layout.left + (c + 0.5) * layout.across + (layout.font * 0.35 if layout.angle == -90 else 0.0)
            items.append(
                SceneText(x, y, head, layout.font, anchor="start" if layout.angle else "middle", turn=layout.angle)
            )
    return items


def _numbers(grid: Grid, layout: _Layout) -> Group:
    if layout.down < 30:
        return Group(())
    size = min(12.0, layout.across * 0.32)
    return Group(
        tuple(
            SceneText(layout.left + (c + 0.5) * layout.across, layout.top + (r + 0.5) * layout.down + 4,
                 written, size, readable_ink(grid.ramp.rgb(float(value))), "middle")
            for (r, c), value in np.ndenumerate(grid.values)
            if (written := grid.written(r, c))
        ),
        "numbers",
    )  # fmt: skip


def _outlines(grid: Grid, layout: _Layout) -> Group:
    cell = partial(outline, width=layout.across - layout.gap, height=layout.down - layout.gap, radius=layout.radius,
                   line=max(1.0, min(2.4, layout.down / 8)))  # fmt: skip
    return Group(
        tuple(
            part
            for r, c in grid.links
            for part in cell(
                layout.left + c * layout.across + layout.gap / 2, layout.top + r * layout.down + layout.gap / 2
            )
        ),
        "links",
    )


def outline(x: float, y: float, width: float, height: float, radius: float, line: float) -> tuple[Rect, Rect]:
    """An outline in the card's colour under one in the accent's: it stands out on dark and on bright cells alike."""
    return (
        Rect(x, y, width, height, stroke="card", line=line * 2.2, radius=radius),
        Rect(x, y, width, height, stroke="link", line=line, radius=radius),
    )


def strip(x: float, y: float, ramp: Ramp, legend: str, number: Callable[[float], str], width: float = LEGEND) -> Group:
    """A scale from its one end to the other, with the numbers at its ends and what they are."""
    steps = int(width // 2)
    ends = [
        SceneText(x, y + 23, number(ramp.low), 11, "quiet"),
        SceneText(x + width, y + 23, number(ramp.high), 11, "quiet", "end"),
    ]
    if _fits(ramp, legend, number, width):
        said = SceneText(x + width / 2, y + 23, legend, 11, "quiet", "middle")
    else:
        said = SceneText(x + width + 14, y + 8.5, legend, 11, "quiet")
    return Group((Cells(x, y, width / steps, 8, ramp.rgbs(ramp.steps(steps))[None]), *ends, said), "legend")


def _fits(ramp: Ramp, legend: str, number: Callable[[float], str], width: float) -> bool:
    """Whether there is room for the words between the numbers at the ends of a scale."""
    end = max(text_width(number(value), 11) for value in (ramp.low, ramp.high))
    return text_width(legend, 11) + 2 * end + 16 <= width


def _beside(grid: Grid) -> float:
    """What the words of the legend take beside the scale."""
    return 0.0 if _fits(grid.ramp, grid.legend, whole, LEGEND) else 14 + text_width(grid.legend, 11)


def whole(value: float) -> str:
    """The end of a scale: 0, 1, −0.35."""
    return f"{value:.3g}".replace("-", "−")


def _legend(grid: Grid, layout: _Layout) -> list[Item]:
    x, y = layout.left + layout.gap / 2, layout.top + layout.down * len(grid.rows) + 26
    items: list[Item] = [strip(x, y, grid.ramp, grid.legend, whole)]
    if grid.links:
        items += outline(x + LEGEND + 26, y - 3, 14, 14, 3, 2)
        items.append(SceneText(x + LEGEND + 48, y + 8.5, "gold alignment", 11, "quiet"))
    step = max(layout.row_step, layout.column_step)
    if step > 1:
        hint = f"one label in {step}; hover for the rest"
        place = (176 if grid.links else 26) + _beside(grid)
        items.append(SceneText(x + LEGEND + place, y + 8.5, hint, 11, "quiet"))
    return items
