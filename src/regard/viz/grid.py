"""A matrix of numbers with labels on both axes, as a picture: attention maps, gates, importance.

`Grid` holds the contents; `scene` lays them out as coloured cells, and `terminal.grid` formats them as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from regard.text.display import shorten
from regard.viz import scene as scenes
from regard.viz.colours import WEIGHTS, Ramp, readable_ink
from regard.viz.maps import Map
from regard.viz.scene import PAD, Cells, Group, Item, Rect, Scene, SceneText, Theme, isolated, text_width

MAX_LABEL = 20  # columns; tooltips have longer tokens in full
MIN_SHOWN = 0.05  # smaller weights are not printed in their cells
SPACE = 720.0  # width or height of all cells together, unless they would become too small
LEGEND = 168.0


def hundredths(value: float) -> str:
    return f"{value:.2f}"


@dataclass(frozen=True, eq=False)
class Grid:
    """Numbers [R, C] with row and column labels, and how to show them.

    `corner` is printed where the labels meet; `links` are cells to outline; `number` formats a value; `tip(r, c)` is
    the tooltip of a cell (by default "row → column: number"); `words` [R][C] replace the numbers in the cells.
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
    shown: float = MIN_SHOWN  # numbers below this share of the scale are not printed
    longest: int = MAX_LABEL  # columns of a row label
    stretched: bool = False  # cells fill the picture and need not be square

    @classmethod
    def of(cls, map: Map, links: Iterable[tuple[int, int]] = ()) -> Grid:
        """Make the grid of an attention map, queries by keys; `links` are the cells of the gold alignment."""
        chosen = tuple(links)
        for q, k in chosen:
            if not (0 <= q < len(map.queries) and 0 <= k < len(map.keys)):
                raise ValueError(f"link ({q}, {k}) is outside a map of {len(map.queries)} x {len(map.keys)}")
        rows, columns = map.labels()
        return cls(map.weights, rows, columns, map.title, "attends to →", "attention weight", links=chosen,
                   about=_description(map, chosen))  # fmt: skip

    def cell_tip(self, r: int, c: int) -> str:
        """Return the tooltip of a cell."""
        if self.tip is not None:
            return self.tip(r, c)
        row, column = (isolated(shorten(label, 200)) for label in (self.rows[r], self.columns[c]))
        return f"{row} → {column}: {self.number(float(self.values[r, c]))}"

    def row_tip(self, r: int) -> str:
        """Return the tooltip of a row, for pictures with too many cells: that of its greatest number."""
        return self.cell_tip(r, int(np.abs(self.values[r]).argmax()))

    def cell_text(self, r: int, c: int) -> str:
        """Return the text of a cell: its word, or its number unless that is near zero."""
        if self.words:
            return self.words[r][c]
        value = float(self.values[r, c])
        return self.number(value) if abs(float(self.ramp.shares(np.array(value)))) >= self.shown else ""


def _description(map: Map, links: tuple[tuple[int, int], ...]) -> str:
    """Return a text alternative: the size of the map, and the greatest weight of each row."""
    shown = 24
    queries, keys = map.labels()
    sentences = [
        f"A heat map of attention weights, {len(queries)} rows by {len(keys)} columns; rows attend to columns."
    ]
    for q, row in enumerate(map.weights[:shown]):
        k = int(row.argmax())
        sentences.append(f"{isolated(queries[q])} attends most to {isolated(keys[k])} ({row[k]:.2f}).")
    if len(queries) > shown:
        sentences.append(f"And {len(queries) - shown} more rows.")
    if links:
        sentences.append(f"{len(links)} cells are outlined as gold alignment.")
    return " ".join(sentences)


def draw(map: Map, *, theme: Theme = "auto", links: Iterable[tuple[int, int]] = ()) -> str:
    """Return an attention map as a complete SVG document, without scripts or external fonts.

    `links` are (query, key) cells to outline, such as the gold alignment of a sentence pair.
    `Path("map.svg").write_text(draw(map), encoding="utf-8")`
    """
    return scene(Grid.of(map, links)).svg(theme)


@dataclass(frozen=True)
class _Layout:
    """Sizes and positions. A cell takes `across` x `down`, including a `gap` to its neighbours."""

    across: float
    down: float
    gap: float
    radius: float
    font: float
    angle: int  # angle of the column labels: 0, -45 or -90 degrees
    left: float  # left edge of the first cell
    top: float
    width: float  # width of the whole picture
    height: float
    row_step: int  # rows per row label
    column_step: int


def scene(grid: Grid) -> Scene:
    """Lay out the grid as a heat map."""
    rows = [shorten(label, grid.longest) for label in grid.rows]
    heads = [shorten(label, MAX_LABEL) for label in grid.columns]
    layout = _lay_out(grid, rows, heads)
    cells = Cells(
        layout.left, layout.top, layout.across, layout.down, grid.ramp.rgbs(grid.values), layout.gap, layout.radius,
        grid.cell_tip, grid.row_tip,
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
    """Return the width and height of a cell, the font size of labels, and the angle of column labels.

    Columns are wide enough for horizontal labels if there is space; else cells are square and labels are rotated.
    """
    longer = max(grid.values.shape)
    down = min(44.0, max(4.0 if longer <= 400 else 2.0, SPACE // longer))
    font = min(14.0, max(9.0, down * 0.6))
    widest = max(text_width(head, font) for head in heads)
    if grid.words:
        word_width = max(text_width(word, 12) for row in grid.words for word in row)
        return max(widest, word_width) + 14, max(down, 34.0), 13.0, 0
    across = down
    if grid.stretched:
        across, down = (
            max(2.0, min(16.0, space // count)) for space, count in ((SPACE, len(heads)), (SPACE / 2, len(grid.rows)))
        )
    horizontal = max(down * 1.15, widest + 14)
    if horizontal <= 96 and horizontal * len(heads) <= SPACE:
        return horizontal, down, font, 0
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
                 text, size, readable_ink(grid.ramp.rgb(float(value))), "middle")
            for (r, c), value in np.ndenumerate(grid.values)
            if (text := grid.cell_text(r, c))
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
    """Return an outline in the accent colour over a wider one in the card's colour, visible on dark and light cells."""
    return (
        Rect(x, y, width, height, stroke="card", line=line * 2.2, radius=radius),
        Rect(x, y, width, height, stroke="link", line=line, radius=radius),
    )


def colour_bar(
    x: float, y: float, ramp: Ramp, legend: str, number: Callable[[float], str], width: float = LEGEND
) -> Group:
    """Return a colour bar with its label and the numbers at its ends."""
    steps = int(width // 2)
    ends = [
        SceneText(x, y + 23, number(ramp.low), 11, "quiet"),
        SceneText(x + width, y + 23, number(ramp.high), 11, "quiet", "end"),
    ]
    if _fits(ramp, legend, number, width):
        label = SceneText(x + width / 2, y + 23, legend, 11, "quiet", "middle")
    else:
        label = SceneText(x + width + 14, y + 8.5, legend, 11, "quiet")
    return Group((Cells(x, y, width / steps, 8, ramp.rgbs(ramp.steps(steps))[None]), *ends, label), "legend")


def _fits(ramp: Ramp, legend: str, number: Callable[[float], str], width: float) -> bool:
    """Whether the label fits between the numbers at the ends of a colour bar."""
    end = max(text_width(number(value), 11) for value in (ramp.low, ramp.high))
    return text_width(legend, 11) + 2 * end + 16 <= width


def _beside(grid: Grid) -> float:
    """Return the width of the label beside the colour bar; zero if it fits below."""
    return 0.0 if _fits(grid.ramp, grid.legend, short_number, LEGEND) else 14 + text_width(grid.legend, 11)


def short_number(value: float) -> str:
    """Format an end of a scale: 0, 1, −0.35."""
    return f"{value:.3g}".replace("-", "−")


def _legend(grid: Grid, layout: _Layout) -> list[Item]:
    x, y = layout.left + layout.gap / 2, layout.top + layout.down * len(grid.rows) + 26
    items: list[Item] = [colour_bar(x, y, grid.ramp, grid.legend, short_number)]
    if grid.links:
        items += outline(x + LEGEND + 26, y - 3, 14, 14, 3, 2)
        items.append(SceneText(x + LEGEND + 48, y + 8.5, "gold alignment", 11, "quiet"))
    step = max(layout.row_step, layout.column_step)
    if step > 1:
        hint = f"one label in {step} shown; hover for the others"
        offset = (176 if grid.links else 26) + _beside(grid)
        items.append(SceneText(x + LEGEND + offset, y + 8.5, hint, 11, "quiet"))
    return items
