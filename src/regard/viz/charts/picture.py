"""A line chart as a scene: lines over one pair of axes, named at their right ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from regard.viz import scene as scenes
from regard.viz.charts.chart import COLOURS, Chart, Scale, format_number, marked, value_label, x_label
from regard.viz.scene import (
    PAD,
    Coordinates,
    Group,
    Item,
    Line,
    Scene,
    SceneText,
    Theme,
    circle,
    clean,
    polyline,
    text_width,
    title_width,
)

DASHES: tuple[tuple[float, ...], ...] = ((), (7, 4), (2, 3.5), (9, 3, 2, 3), (14, 4))
WIDTH, HEIGHT = 560.0, 300.0  # size of the plot itself, without titles and labels
LABEL_GAP = 19.0  # between the names at the ends of the lines
SHAPES: tuple[tuple[Coordinates, ...], ...] = (  # shapes of markers; the first is a circle
    (),
    ((-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)),
    ((0, -5.4), (5.2, 4), (-5.2, 4)),
    ((0, -5.8), (5.8, 0), (0, 5.8), (-5.8, 0)),
    ((0, 5.4), (5.2, -4), (-5.2, -4)),
    ((-1.7, -5.2), (1.7, -5.2), (1.7, -1.7), (5.2, -1.7), (5.2, 1.7), (1.7, 1.7), (1.7, 5.2), (-1.7, 5.2), (-1.7, 1.7),
     (-5.2, 1.7), (-5.2, -1.7), (-1.7, -1.7)),
    ((-4.8, -2.4), (-2.4, -4.8), (0, -2.4), (2.4, -4.8), (4.8, -2.4), (2.4, 0), (4.8, 2.4), (2.4, 4.8), (0, 2.4),
     (-2.4, 4.8), (-4.8, 2.4), (-2.4, 0)),
)  # fmt: skip


def svg(chart: Chart, *, theme: Theme = "auto") -> str:
    """Return the chart as a complete SVG document."""
    return scene(chart).svg(theme)


def scene(chart: Chart) -> Scene:
    """Lay out the chart on a card."""
    frame = _Frame.for_chart(chart)
    items = [scenes.card(frame.width, frame.height), *_titles(chart, frame), *_axes(chart, frame)]
    items += [_series(chart, frame, i) for i in range(len(chart.series))]
    sentences = [f"A line chart of {clean(chart.y_title)} against {clean(chart.x_title)}."]
    for series in chart.series:
        values = ", ".join(f"{format_number(p.y)} at {x_label(chart, p.x)}" for p in series.points[:24])
        sentences.append(f"{clean(series.name)}: {values}.")
    name = clean(chart.title) or "Line chart"
    return Scene(frame.width, frame.height, name, " ".join(sentences), (*items, _names(chart, frame)))


@dataclass(frozen=True)
class _Frame:
    """The position and the scales of the plot on its card."""

    left: float
    top: float
    width: float  # width of the card
    height: float
    x: Scale
    y: Scale

    @classmethod
    def for_chart(cls, chart: Chart) -> _Frame:
        x, y = chart.x, chart.y
        left = PAD + max(text_width(label, 12) for _, label in y.ticks(6)) + 12
        names = max(text_width(clean(series.name), 13) for series in chart.series)
        width = left + WIDTH + 14 + 46 + names + PAD
        width = max(width, 2 * PAD + title_width(chart.title), 2 * PAD + text_width(clean(chart.note), 11))
        top = PAD + (34 if chart.title else 0) + 26
        return cls(left, top, width, top + HEIGHT + 54 + (22 if chart.note else 0) + PAD - 8, x, y)

    def point(self, x: float, y: float) -> Coordinates:
        return self.left + 16 + self.x(x) * (WIDTH - 32), self.top + (1 - self.y(y)) * HEIGHT


def _titles(chart: Chart, frame: _Frame) -> list[Item]:
    bottom = frame.top + HEIGHT
    items: list[Item] = [scenes.title(chart.title, frame.width)] if chart.title else []
    items += [
        SceneText(PAD, frame.top - 14, clean(chart.y_title), 12, "quiet"),
        SceneText(frame.left + WIDTH / 2, bottom + 44, clean(chart.x_title), 12, "quiet", "middle"),
    ]
    return [*items, SceneText(PAD, bottom + 70, clean(chart.note), 11, "quiet")] if chart.note else items


def _axes(chart: Chart, frame: _Frame) -> list[Item]:
    """Return grid lines at the ticks of the y axis, short lines at those of the x axis, and their labels."""
    bottom, right = frame.top + HEIGHT, frame.left + WIDTH
    grid: list[tuple[Coordinates, ...]] = []
    labels: list[Item] = []
    for number, label in frame.y.ticks(6):
        y = frame.point(frame.x.low, number)[1]
        grid.append(((frame.left, y), (right, y)))
        labels.append(SceneText(frame.left - 10, y + 4, label, 12, "quiet", "end"))
    ticks: list[tuple[Coordinates, ...]] = [((frame.left, bottom), (right, bottom))]
    label_end = -math.inf
    for number, label in chart.x_ticks or frame.x.ticks(8):
        x = frame.point(number, frame.y.low)[0]
        ticks.append(((x, bottom), (x, bottom + 5)))
        half = text_width(clean(label), 12) / 2
        if x - half > label_end + 5:
            labels.append(SceneText(x, bottom + 21, clean(label), 12, "quiet", "middle"))
            label_end = x + half
    return [Line(tuple(grid), stroke="edge"), Line(tuple(ticks), stroke="quiet"), *labels]


def _series(chart: Chart, frame: _Frame, i: int) -> Group:
    """Return one series: its intervals, its line, and its markers, which have tooltips."""
    series, paint = chart.series[i], COLOURS[i % len(COLOURS)] or "ink"
    shift = _shift(chart, i)
    points = [(x + shift, y) for x, y in (frame.point(p.x, p.y) for p in series.points)]
    items = _interval(chart, frame, i)
    if points:
        items.append(polyline(points, stroke=paint, line=2.2, dash=DASHES[i % len(DASHES)]))
    for p, (x, y) in marked(list(zip(series.points, points, strict=True))):
        items.append(_marker(i, x, y, f"{clean(series.name)}, {x_label(chart, p.x)}: {value_label(p)}"))
    return Group(tuple(items), "series")


def _shift(chart: Chart, i: int) -> float:
    """Return the horizontal shift of series `i`, so that error bars at the same x do not overlap."""
    if chart.spread == "band" or all(point.low is None for point in chart.points()):
        return 0.0
    return (i - (len(chart.series) - 1) / 2) * min(5.0, 24 / len(chart.series))


def _interval(chart: Chart, frame: _Frame, i: int) -> list[Item]:
    paint = COLOURS[i % len(COLOURS)] or "ink"
    known = [(p, p.low, p.high) for p in chart.series[i].points if p.low is not None and p.high is not None]
    if not known:
        return []
    if chart.spread == "band":
        upper = [frame.point(p.x, high) for p, _, high in known]
        lower = [frame.point(p.x, low) for p, low, _ in reversed(known)]
        return [polyline(upper + lower, fill=paint, opacity=0.14, closed=True)]
    bars: list[tuple[Coordinates, ...]] = []
    for p, low, high in known:
        (x, top), (_, bottom) = frame.point(p.x, high), frame.point(p.x, low)
        x += _shift(chart, i)
        bars += [((x - 2, top), (x + 2, top)), ((x, top), (x, bottom)), ((x - 2, bottom), (x + 2, bottom))]
    return [Line(tuple(bars), stroke=paint, line=1.2, opacity=0.55)]


def _names(chart: Chart, frame: _Frame) -> Group:
    """Return the name of each series at the end of its line, moved apart where they would overlap."""
    ends = [frame.point(s.points[-1].x, s.points[-1].y) if s.points else (0.0, frame.top) for s in chart.series]
    ends = [(x + _shift(chart, i), y) for i, (x, y) in enumerate(ends)]
    right = frame.left + WIDTH + 14
    items: list[Item] = []
    heights = apart([y for _, y in ends], LABEL_GAP, frame.top, frame.top + HEIGHT)
    for i, (series, (x, y), at) in enumerate(zip(chart.series, ends, heights, strict=True)):
        paint = COLOURS[i % len(COLOURS)] or "ink"
        if series.points:
            thread = [(x + 8, y), (max(right - 6, x + 8), at)]
            items.append(polyline(thread, stroke="quiet", line=0.8, opacity=0.6))
        items.append(polyline([(right, at), (right + 30, at)], stroke=paint, line=2.2, dash=DASHES[i % len(DASHES)]))
        items.append(_marker(i, right + 15, at))
        items.append(SceneText(right + 38, at + 4.5, clean(series.name), 13))
    return Group(tuple(items), "names")


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions at least `gap` apart, in the order of `wanted` and as close to it as possible.

    Neighbours that are too close form a group around the mean of their wanted positions, within `low` and `high` if
    there is space.

    >>> apart([10, 10, 50], 20, 0, 100)
    [0, 20, 50.0]
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
    result = [0.0] * len(wanted)
    for group in groups:
        for k, i in enumerate(group):
            result[i] = _first(group, wanted, gap, low, high) + gap * k
    return result


def _first(group: Sequence[int], wanted: Sequence[float], gap: float, low: float, high: float) -> float:
    """Return the first position of a group."""
    size = gap * (len(group) - 1)
    middle = sum(wanted[i] for i in group) / len(group)
    return max(low, min(middle - size / 2, high - size))


def _marker(i: int, x: float, y: float, tip: str = "") -> Item:
    """Return the marker of series `i`, with an outline in the card's colour that separates it from lines."""
    shape, paint = SHAPES[i % len(SHAPES)], COLOURS[i % len(COLOURS)] or "ink"
    if not shape:
        return circle(x, y, 4.8, fill=paint, stroke="card", line=1.2, tip=tip)
    around = tuple((x + dx, y + dy) for dx, dy in shape)
    return polyline(around, fill=paint, stroke="card", line=1.2, closed=True, tip=tip)
