"""A line chart as an SVG picture.

As in `inside/svg.py`, colours are written as plain attributes, and the `auto` theme adds one media query for dark
screens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from regard.inside.charts.chart import COLOURS, Chart, Scale, clean, marked, value_label, written, x_label
from regard.inside.svg import _DARK, _LIGHT, FONTS, PAD, Theme, _group, _n, _Palette, _text, text_width

DASHES = ("", "7 4", "2 3.5", "9 3 2 3", "14 4")
WIDTH, HEIGHT = 560.0, 300.0  # of the plot itself, without titles and labels
LABEL_GAP = 19.0  # between the names at the ends of the lines


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
        names = max(text_width(clean(series.name), 13) for series in chart.series)
        width = left + WIDTH + 14 + 46 + names + PAD
        width = max(width, *(2 * PAD + text_width(clean(t), s) for t, s in ((chart.title, 16), (chart.note, 11))))
        top = PAD + (34 if chart.title else 0) + 26
        return cls(left, top, width, top + HEIGHT + 54 + (22 if chart.note else 0) + PAD - 8, x, y)

    def place(self, x: float, y: float) -> tuple[float, float]:
        return self.left + 16 + self.x(x) * (WIDTH - 32), self.top + (1 - self.y(y)) * HEIGHT


def _opening(chart: Chart, frame: _Frame) -> str:
    size = f"{_n(frame.width)} {_n(frame.height)}"
    name = clean(chart.title) or "Line chart"
    said = [f"A line chart of {clean(chart.y_title)} against {clean(chart.x_title)}."]
    for series in chart.series:
        told = ", ".join(f"{written(p.y)} at {x_label(chart, p.x)}" for p in series.points[:24])
        said.append(f"{clean(series.name)}: {told}.")
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
        _text(PAD, frame.top - 14, clean(chart.y_title), quiet),
        _text(frame.left + WIDTH / 2, bottom + 44, clean(chart.x_title), f'{quiet} text-anchor="middle"'),
    ]
    if chart.title:
        ink = f'class="ink" fill="{palette.ink}" font-size="16" font-weight="600"'
        lines.insert(0, _text(PAD, PAD + 14, clean(chart.title), ink))
    if chart.note:
        small = f'class="quiet" fill="{palette.quiet}" font-size="11"'
        lines.append(_text(PAD, bottom + 70, clean(chart.note), small))
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
        half = text_width(clean(label), 12) / 2
        if x - half > taken + 5:
            labels.append(_text(x, bottom + 21, clean(label), 'text-anchor="middle"'))
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
    for p, (x, y) in marked(list(zip(series.points, places, strict=True))):
        tip = f"{clean(series.name)}, {x_label(chart, p.x)}: {value_label(p)}"
        lines.append(f"<g>{_marker(i, x, y, fill, palette)}<title>{escape(tip)}</title></g>")
    return _group([line for line in lines if line], 'class="series"')


def _aside(chart: Chart, i: int) -> float:
    """How far series `i` is moved sideways, so that the bars of several at one x stand side by side."""
    if chart.spread == "band" or all(point.low is None for point in chart.points()):
        return 0.0
    return (i - (len(chart.series) - 1) / 2) * min(5.0, 24 / len(chart.series))


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
        lines.append(_text(right + 38, at + 4.5, clean(series.name),
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
