"""A line chart: several series of points, as an SVG picture, in a terminal, or as a plain table.

No series is told apart by its colour alone: each has a marker and a dash of its own, and its name at its end. The
colours are those of Okabe and Ito, which people with the common colour deficiencies can tell apart; as in `svg.py`,
they are written as plain attributes, and the `auto` theme adds one media query for dark screens.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar
from xml.sax.saxutils import escape, quoteattr

from regard.inside.colours import xterm256
from regard.inside.maps import columns, shorten, visible
from regard.inside.svg import _DARK, _LIGHT, FONTS, PAD, Theme, _group, _n, _Palette, _text, text_width
from regard.inside.terminal import RESET, Colour

# Okabe and Ito, "Color Universal Design" (2008); those with the most contrast on white come first. "" is the text's own
# colour: their black, which has to turn on a dark ground.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "", "#e69f00", "#56b4e9")
DASHES = ("", "7 4", "2 3.5", "9 3 2 3", "14 4")
SIGNS = "●■▲◆▼✚✖"
CLOSE = 16  # more points than this are not marked one by one
WIDTH, HEIGHT = 560.0, 300.0  # of the plot itself, without titles and labels
LABEL_GAP = 19.0  # between the names at the ends of the lines
LINES = 16  # of a plot in a terminal
T = TypeVar("T")
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille sign, [row][column]


@dataclass(frozen=True)
class Point:
    """One measurement, with the interval it is sure of where that is known."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """A line: its name and its points, from left to right."""

    name: str
    points: tuple[Point, ...]

    @classmethod
    def of(cls, name: str, xs: Sequence[float], ys: Sequence[float]) -> Series:
        """From two equally long lists: `Series.of("lstm", [1, 2], [30.5, 28.0])`."""
        return cls(name, tuple(Point(float(x), float(y)) for x, y in zip(xs, ys, strict=True)))


@dataclass(frozen=True)
class Chart:
    """What is drawn: lines over one pair of axes. `x_title` and `y_title` name the quantity and its unit.

    `x_ticks` are (place, label) where the usual numbers will not do; `spread` is how intervals are shown; `note` is
    a line of small print.
    """

    title: str
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    x_log: bool = False
    y_log: bool = False
    x_ticks: tuple[tuple[float, str], ...] = ()
    y_range: tuple[float, float] | None = None
    spread: Literal["bars", "band"] = "bars"
    note: str = ""

    def __post_init__(self) -> None:
        if not any(series.points for series in self.series):
            raise ValueError("a chart needs at least one point")
        for point in self._points():
            numbers = [n for n in (point.x, point.y, point.low, point.high) if n is not None]
            if not all(map(math.isfinite, numbers)):
                raise ValueError(f"not a finite number: {point}")
            if (self.x_log and point.x <= 0) or (self.y_log and min(numbers[1:]) <= 0):
                raise ValueError(f"a logarithmic axis has no place for {point}")

    def _points(self) -> list[Point]:
        return [point for series in self.series for point in series.points]

    @property
    def x(self) -> Scale:
        return Scale.around([point.x for point in self._points()], self.x_log, exact=True)

    @property
    def y(self) -> Scale:
        numbers = [n for p in self._points() for n in (p.y, p.low, p.high) if n is not None]
        if self.y_range is not None:
            return Scale(*self.y_range, self.y_log)
        return Scale.around(numbers, self.y_log)


@dataclass(frozen=True)
class Scale:
    """From numbers to places between 0 and 1, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, numbers: Sequence[float], log: bool, exact: bool = False) -> Scale:
        """One that holds all the numbers; its ends are round ones, unless it is to be `exact`."""
        low, high = min(numbers), max(numbers)
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1))
        if exact:
            return cls(low, high, log)
        if log:
            return cls(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)), log)
        step = _round_step(low, high, 6)
        return cls(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, log)

    def __call__(self, number: float) -> float:
        low, high, n = (
            (math.log(v) for v in (self.low, self.high, number)) if self.log else (self.low, self.high, number)
        )
        return (n - low) / (high - low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """About `most` round numbers between the ends, as they are written."""
        if self.log:
            numbers = self._powers(most)
            raised = any("·" in _written(n) or "⁻" in _written(n) or n >= 1e6 for n in numbers)
            return [(number, _raised(number) if raised else _written(number)) for number in numbers]
        step = _round_step(self.low, self.high, most)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        digits += not math.isclose(round(step, digits), step)  # 2.5 needs one more than 2
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(i * step, f"{i * step:,.{digits}f}") for i in range(first, last + 1)]

    def _powers(self, most: int) -> list[float]:
        """Powers of ten; with 2 and 5 between them where they are few, or only some where they are many."""
        first, last = math.floor(math.log10(self.low) + 1e-9), math.ceil(math.log10(self.high) - 1e-9)
        decades = math.log10(self.high / self.low)
        signs = (1, 2, 5) if decades * 3 <= most else (1, 3) if decades * 2 <= most else (1,)
        every = max(1, math.ceil((last - first + 1) / most))
        found = [sign * 10.0**power for power in range(first, last + 1) if power % every == 0 for sign in signs]
        return [n for n in found if self.low * (1 - 1e-9) <= n <= self.high * (1 + 1e-9)]


def _round_step(low: float, high: float, most: int) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that divides the range into at most `most` parts."""
    rough = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1, 2, 2.5, 5) if m * power >= rough * (1 - 1e-9)), 10 * power)


def _written(number: float) -> str:
    """A number as an axis or a table writes it: 0.05, 12.5, 1,500; 10⁻⁵ or 3·10⁻⁵ where zeros would be counted."""
    if number and not 1e-3 <= abs(number) < 1e6:
        return _raised(number)
    return f"{number:,.0f}" if number == round(number) or abs(number) >= 1000 else f"{number:.3g}"


def _raised(number: float) -> str:
    """A number as a power of ten: 1, 10, 10⁻⁵, 3·10⁻⁵."""
    power = math.floor(math.log10(abs(number)) + 1e-9)
    front = f"{number / 10.0**power:.3g}"
    if power in (0, 1) and front == "1":
        return str(10**power)
    raised = f"10{str(power).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return raised if front == "1" else f"{front}·{raised}"


# -- a picture --------------------------------------------------------------------------------------------------------


def svg(chart: Chart, *, theme: Theme = "auto") -> str:
    """The chart as a complete SVG document, its lines named at their right ends."""
    palette = _DARK if theme == "dark" else _LIGHT
    frame = _Frame.for_chart(chart)
    parts = [
        _opening(chart, frame),
        _style(theme),
        f'<rect class="card" x="0.5" y="0.5" width="{_n(frame.width - 1)}" height="{_n(frame.height - 1)}" rx="14" '
        f'fill="{palette.card}" stroke="{palette.edge}"/>',
        _titles(chart, frame, palette),
        _axes(chart, frame, palette),
        *(_line(chart, frame, i, palette) for i in range(len(chart.series))),
        _names(chart, frame, palette),
        "</svg>\n",
    ]
    return "\n".join(part for part in parts if part)


@dataclass(frozen=True)
class _Frame:
    """Where the plot lies on its card, in SVG units."""

    left: float
    top: float
    width: float  # of the card
    height: float
    x: Scale
    y: Scale

    @classmethod
    def for_chart(cls, chart: Chart) -> _Frame:
        x, y = chart.x, chart.y
        left = PAD + max(text_width(label, 12) for _, label in y.ticks(6)) + 12
        names = max(text_width(_clean(series.name), 13) for series in chart.series)
        width = left + WIDTH + 14 + 46 + names + PAD
        width = max(width, *(2 * PAD + text_width(_clean(t), s) for t, s in ((chart.title, 16), (chart.note, 11))))
        top = PAD + (34 if chart.title else 0) + 26
        return cls(left, top, width, top + HEIGHT + 54 + (22 if chart.note else 0) + PAD - 8, x, y)

    def place(self, x: float, y: float) -> tuple[float, float]:
        return self.left + 16 + self.x(x) * (WIDTH - 32), self.top + (1 - self.y(y)) * HEIGHT


def _opening(chart: Chart, frame: _Frame) -> str:
    size = f"{_n(frame.width)} {_n(frame.height)}"
    name = _clean(chart.title) or "Line chart"
    said = [f"A line chart of {_clean(chart.y_title)} against {_clean(chart.x_title)}."]
    for series in chart.series:
        told = ", ".join(f"{_written(p.y)} at {_at(chart, p.x)}" for p in series.points[:24])
        said.append(f"{_clean(series.name)}: {told}.")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="regard-chart" viewBox="0 0 {size}" '
        f'width="{_n(frame.width)}" height="{_n(frame.height)}" role="img" aria-label={quoteattr(name)} '
        f'font-family="{FONTS}">\n<desc>{escape(" ".join(said))}</desc>'
    )


def _style(theme: Theme) -> str:
    if theme != "auto":
        return ""
    d, own = _DARK, ".regard-chart"
    return (
        "<style>@media (prefers-color-scheme: dark) { "
        f"{own} .card {{ fill: {d.card}; stroke: {d.edge} }} {own} .grid {{ stroke: {d.edge} }} "
        f"{own} .ink {{ fill: {d.ink} }} {own} .quiet {{ fill: {d.quiet} }} {own} .axis {{ stroke: {d.quiet} }} "
        f"{own} .own {{ stroke: {d.ink} }} {own} .full {{ fill: {d.ink} }} "
        f"{own} .halo {{ stroke: {d.card} }} }}</style>"
    )


def _titles(chart: Chart, frame: _Frame, palette: _Palette) -> str:
    quiet = f'class="quiet" fill="{palette.quiet}" font-size="12"'
    bottom = frame.top + HEIGHT
    lines = [
        _text(PAD, frame.top - 14, _clean(chart.y_title), quiet),
        _text(frame.left + WIDTH / 2, bottom + 44, _clean(chart.x_title), f'{quiet} text-anchor="middle"'),
    ]
    if chart.title:
        ink = f'class="ink" fill="{palette.ink}" font-size="16" font-weight="600"'
        lines.insert(0, _text(PAD, PAD + 14, _clean(chart.title), ink))
    if chart.note:
        small = f'class="quiet" fill="{palette.quiet}" font-size="11"'
        lines.append(_text(PAD, bottom + 70, _clean(chart.note), small))
    return "\n".join(lines)


def _axes(chart: Chart, frame: _Frame, palette: _Palette) -> str:
    """A faint line at every number of the y axis, a short one at those of the x axis; labels where they have room."""
    bottom, right = frame.top + HEIGHT, frame.left + WIDTH
    grid, labels = [], []
    for number, label in frame.y.ticks(6):
        y = frame.place(frame.x.low, number)[1]
        grid.append(f'<path d="M{_n(frame.left)} {_n(y)}H{_n(right)}"/>')
        labels.append(_text(frame.left - 10, y + 4, label, 'text-anchor="end"'))
    ticks, taken = [], -math.inf
    for number, label in chart.x_ticks or frame.x.ticks(8):
        x = frame.place(number, frame.y.low)[0]
        ticks.append(f'<path d="M{_n(x)} {_n(bottom)}v5"/>')
        half = text_width(_clean(label), 12) / 2
        if x - half > taken + 5:
            labels.append(_text(x, bottom + 21, _clean(label), 'text-anchor="middle"'))
            taken = x + half
    ticks.append(f'<path d="M{_n(frame.left)} {_n(bottom)}H{_n(right)}"/>')
    return "\n".join(
        [
            _group(grid, f'class="grid" stroke="{palette.edge}"'),
            _group(ticks, f'class="axis" stroke="{palette.quiet}"'),
            _group(labels, f'class="quiet" fill="{palette.quiet}" font-size="12" '
                   'style="font-variant-numeric: tabular-nums"'),
        ]
    )  # fmt: skip


def _line(chart: Chart, frame: _Frame, i: int, palette: _Palette) -> str:
    """One series: its intervals, its line, and its markers, each of which says its numbers when pointed at."""
    series, (paint, fill) = chart.series[i], _paint(i, palette)
    aside = _aside(chart, i)
    places = [(x + aside, y) for x, y in (frame.place(p.x, p.y) for p in series.points)]
    path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in places) if places else ""
    lines = [_interval(chart, frame, i, palette)]
    lines.append(f'<path d="{path}" fill="none" {paint} stroke-width="2.2" stroke-linejoin="round"{_dash(i)}/>')
    for p, (x, y) in _marked(list(zip(series.points, places, strict=True))):
        tip = f"{_clean(series.name)}, {_at(chart, p.x)}: {_number(p)}"
        lines.append(f"<g>{_marker(i, x, y, fill, palette)}<title>{escape(tip)}</title></g>")
    return _group([line for line in lines if line], 'class="series"')


def _aside(chart: Chart, i: int) -> float:
    """How far series `i` is moved sideways, so that the bars of several at one x stand side by side."""
    if chart.spread == "band" or all(point.low is None for point in chart._points()):
        return 0.0
    return (i - (len(chart.series) - 1) / 2) * min(5.0, 24 / len(chart.series))


def _marked(points: Sequence[T]) -> Sequence[T]:
    """The points that get a marker: all of them, or some where they stand close; always the last."""
    every = 1 if len(points) <= CLOSE else math.ceil(len(points) / 8)
    return points[::-1][::every][::-1]


def _interval(chart: Chart, frame: _Frame, i: int, palette: _Palette) -> str:
    paint, fill = _paint(i, palette)
    known = [(p, p.low, p.high) for p in chart.series[i].points if p.low is not None and p.high is not None]
    if not known:
        return ""
    if chart.spread == "band":
        upper = [frame.place(p.x, high) for p, _, high in known]
        lower = [frame.place(p.x, low) for p, low, _ in reversed(known)]
        around = "L".join(f"{_n(x)} {_n(y)}" for x, y in upper + lower)
        return f'<path d="M{around}Z" {fill} fill-opacity="0.14"/>'
    bars = []
    for p, low, high in known:
        (x, top), (_, bottom) = frame.place(p.x, high), frame.place(p.x, low)
        x += _aside(chart, i)
        bars.append(f"M{_n(x - 2)} {_n(top)}h4M{_n(x)} {_n(top)}V{_n(bottom)}M{_n(x - 2)} {_n(bottom)}h4")
    return f'<path d="{"".join(bars)}" fill="none" {paint} stroke-width="1.2" stroke-opacity="0.55"/>'


def _names(chart: Chart, frame: _Frame, palette: _Palette) -> str:
    """The name of each series at the end of its line; names too close to one another are moved apart."""
    ends = [frame.place(s.points[-1].x, s.points[-1].y) if s.points else (0.0, frame.top) for s in chart.series]
    ends = [(x + _aside(chart, i), y) for i, (x, y) in enumerate(ends)]
    right = frame.left + WIDTH + 14
    lines = []
    heights = apart([y for _, y in ends], LABEL_GAP, frame.top, frame.top + HEIGHT)
    for i, (series, (x, y), at) in enumerate(zip(chart.series, ends, heights, strict=True)):
        paint, fill = _paint(i, palette)
        if series.points:
            thread = f"M{_n(x + 8)} {_n(y)}L{_n(max(right - 6, x + 8))} {_n(at)}"
            lines.append(f'<path d="{thread}" class="axis" stroke="{palette.quiet}" stroke-width="0.8" '
                         'stroke-opacity="0.6" fill="none"/>')  # fmt: skip
        lines.append(f'<path d="M{_n(right)} {_n(at)}h30" fill="none" {paint} stroke-width="2.2"{_dash(i)}/>')
        lines.append(_marker(i, right + 15, at, fill, palette))
        lines.append(_text(right + 38, at + 4.5, _clean(series.name),
                           f'class="ink" fill="{palette.ink}" font-size="13"'))  # fmt: skip
    return _group(lines, 'class="names"')


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places at least `gap` from one another, in the order of `wanted` and as near to it as that allows.

    Neighbours that are too close become a group around the mean of their wishes, kept within `low` and `high` while
    there is room.

    >>> apart([10, 10, 50], 20, 0, 100)
    [0.0, 20.0, 50.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[list[int]] = []
    for i in order:
        groups.append([i])
        while len(groups) > 1 and _first(groups[-1], wanted, gap, low, high) < (
            _first(groups[-2], wanted, gap, low, high) + gap * len(groups[-2])
        ):
            last = groups.pop()
            groups[-1] += last
    found = [0.0] * len(wanted)
    for group in groups:
        for k, i in enumerate(group):
            found[i] = _first(group, wanted, gap, low, high) + gap * k
    return found


def _first(group: Sequence[int], wanted: Sequence[float], gap: float, low: float, high: float) -> float:
    """Where a group of neighbours begins."""
    size = gap * (len(group) - 1)
    middle = sum(wanted[i] for i in group) / len(group)
    return max(low, min(middle - size / 2, high - size))


def _paint(i: int, palette: _Palette) -> tuple[str, str]:
    """How series `i` strokes and how it fills."""
    colour = COLOURS[i % len(COLOURS)]
    if not colour:
        return f'class="own" stroke="{palette.ink}"', f'class="full" fill="{palette.ink}"'
    return f'stroke="{colour}"', f'fill="{colour}"'


def _dash(i: int) -> str:
    dash = DASHES[i % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _marker(i: int, x: float, y: float, fill: str, palette: _Palette) -> str:
    """A shape of its own for each series, with a rim in the card's colour so that it stands clear of lines."""
    shapes = (
        "",
        "M-4.2-4.2H4.2V4.2H-4.2Z",
        "M0-5.4L5.2 4H-5.2Z",
        "M0-5.8L5.8 0L0 5.8L-5.8 0Z",
        "M0 5.4L5.2-4H-5.2Z",
        "M-1.7-5.2H1.7V-1.7H5.2V1.7H1.7V5.2H-1.7V1.7H-5.2V-1.7H-1.7Z",
        "M-4.8-2.4L-2.4-4.8L0-2.4L2.4-4.8L4.8-2.4L2.4 0L4.8 2.4L2.4 4.8L0 2.4L-2.4 4.8L-4.8 2.4L-2.4 0Z",
    )
    shape, rim = shapes[i % len(shapes)], f'stroke="{palette.card}" stroke-width="1.2"'
    halo = fill.replace('class="full"', 'class="full halo"') if "class" in fill else f'class="halo" {fill}'
    if not shape:
        return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="4.8" {halo} {rim}/>'
    return f'<path d="{shape}" transform="translate({_n(x)} {_n(y)})" {halo} {rim}/>'


def _at(chart: Chart, x: float) -> str:
    return _clean(next((label for place, label in chart.x_ticks if place == x), _written(x)))


def _number(point: Point) -> str:
    if point.low is None or point.high is None:
        return _written(point.y)
    return f"{_written(point.y)} ({_written(point.low)} to {_written(point.high)})"


def _clean(text: str) -> str:
    """Text on one line, without anything invisible."""
    return " ".join(visible(word) for word in text.split())


# -- a terminal -------------------------------------------------------------------------------------------------------


def terminal(chart: Chart, *, width: int, colour: Colour) -> str:
    """The chart in at most `width` columns: lines of braille dots, a sign of its own on each series' points."""
    width = max(width, 30)
    y = chart.y
    marks = y.ticks(5)
    margin = max(columns(label) for _, label in marks)
    across = min(width - margin - 2, 100)
    ink, owner = _dots(chart, across, LINES)
    signs = _signs(chart, across, LINES)
    rows = {round((1 - y(number)) * (LINES - 1)): label for number, label in marks}
    lines = [shorten(_clean(chart.title), width), ""] if chart.title else []
    lines.append(shorten(_clean(chart.y_title), width))
    for r in range(LINES):
        cells = [
            _paint_cell(SIGNS[signs[r, c] % len(SIGNS)], signs[r, c], colour) if (r, c) in signs
            else _paint_cell(chr(0x2800 + ink[r][c]), owner[r][c], colour) if ink[r][c] else " "
            for c in range(across)
        ]  # fmt: skip
        label = rows.get(r, "")
        lines.append((" " * (margin - columns(label)) + label + (" ┤" if label else " │") + "".join(cells)).rstrip(" "))
    lines += [" " * margin + " └" + "─" * across, *_below(chart, margin, across), ""]
    lines += _legend(chart, width, colour)
    return "\n".join(lines) + "\n"


def _column(chart: Chart, x: float, across: int) -> float:
    """The column of a number, one free on either side."""
    return 1 + chart.x(x) * (across - 3)


def _dots(chart: Chart, across: int, down: int) -> tuple[list[list[int]], list[list[int]]]:
    """The lines as braille: which dots of each cell are set, and which series was the last to set one."""
    ink, owner = ([[0] * across for _ in range(down)] for _ in range(2))
    for i, series in enumerate(chart.series):
        places = [(2 * _column(chart, p.x, across) + 0.5, (1 - chart.y(p.y)) * (4 * down - 4) + 1.5)
                  for p in series.points]  # fmt: skip
        for (x0, y0), (x1, y1) in pairwise(places):
            steps = max(1, math.ceil(2 * max(abs(x1 - x0), abs(y1 - y0))))  # twice as fine as the dots: no gaps
            for s in range(steps + 1):
                x, y = round(x0 + (x1 - x0) * s / steps), round(y0 + (y1 - y0) * s / steps)
                if 0 <= x < 2 * across and 0 <= y < 4 * down:
                    ink[y // 4][x // 2] |= DOTS[y % 4][x % 2]
                    owner[y // 4][x // 2] = i
    return ink, owner


def _signs(chart: Chart, across: int, down: int) -> dict[tuple[int, int], int]:
    """Which series has a point in which cell; the first one where several do."""
    found: dict[tuple[int, int], int] = {}
    for i, series in enumerate(chart.series):
        for p in _marked(series.points):
            cell = round((1 - chart.y(p.y)) * (down - 1)), round(_column(chart, p.x, across))
            if 0 <= cell[0] < down:
                found.setdefault(cell, i)
    return found


def _paint_cell(sign: str, series: int, colour: Colour) -> str:
    code = COLOURS[series % len(COLOURS)]
    if colour == "none" or not code:
        return sign
    rgb = int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)
    paint = "\x1b[38;2;{};{};{}m".format(*rgb) if colour == "truecolor" else f"\x1b[38;5;{xterm256(rgb)}m"
    return paint + sign + RESET


def _below(chart: Chart, margin: int, across: int) -> list[str]:
    """The numbers of the x axis, where they have room, and what they are."""
    line, end = "", 0
    for number, label in chart.x_ticks or chart.x.ticks(max(2, across // 12)):
        label = _clean(label)
        start = min(max(round(_column(chart, number, across)) - columns(label) // 2, 0), across - columns(label))
        if start >= end + (end > 0):
            line += " " * (start - end) + label
            end = start + columns(label)
    title = shorten(_clean(chart.x_title), across)
    return [" " * (margin + 2) + line, " " * (margin + 2 + (across - columns(title)) // 2) + title]


def _legend(chart: Chart, width: int, colour: Colour) -> list[str]:
    lines, used = [""], 0
    for i, series in enumerate(chart.series):
        name = shorten(_clean(series.name), width - 2)
        wide = columns(name) + 2
        if used and used + 3 + wide > width:
            lines, used = [*lines, ""], 0
        lines[-1] += ("   " if used else "") + _paint_cell(SIGNS[i % len(SIGNS)], i, colour) + " " + name
        used += wide + (3 if used else 0)
    return [*lines, *textwrap.wrap(_clean(chart.note), width)]


# -- a table ----------------------------------------------------------------------------------------------------------


def table(chart: Chart, width: int = 100) -> str:
    """The numbers behind the lines: a row an x, a column a series."""
    xs = sorted({point.x for point in chart._points()})
    values = [{point.x: _number(point) for point in series.points} for series in chart.series]
    heads = [_clean(chart.x_title), *(_clean(series.name) for series in chart.series)]
    return columned(heads, [[_at(chart, x), *(value.get(x, "–") for value in values)] for x in xs], width)


def columned(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: int = 1) -> str:
    """Text in columns, the first `left` of them flush left and the rest flush right, under their heads.

    Columns that do not fit into `width` go on below, with the first column again.
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
