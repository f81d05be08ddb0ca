"""The contents of a line chart: series, axes, and the format of their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from regard.viz.scene import clean

# Okabe and Ito, "Color Universal Design" (2008), by contrast on white. "" is the colour of text, which replaces their
# black and depends on the theme.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "", "#e69f00", "#56b4e9")
MAX_MARKERS = 16  # with more points only some have markers
T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """One measurement, with its confidence interval if it is known."""

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
        """Make a series from two lists of equal length: `Series.of("lstm", [1, 2], [30.5, 28.0])`."""
        return cls(name, tuple(Point(float(x), float(y)) for x, y in zip(xs, ys, strict=True)))


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes. `x_title` and `y_title` name the quantity and its unit.

    `x_ticks` are (value, label) pairs that replace the usual ticks; `spread` is how intervals are shown; `note` is a
    line of small print.
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
        for point in self.points():
            numbers = [n for n in (point.x, point.y, point.low, point.high) if n is not None]
            if not all(map(math.isfinite, numbers)):
                raise ValueError(f"not a finite number: {point}")
            if (self.x_log and point.x <= 0) or (self.y_log and min(numbers[1:]) <= 0):
                raise ValueError(f"a logarithmic axis cannot show {point}")

    def points(self) -> list[Point]:
        return [point for series in self.series for point in series.points]

    @property
    def x(self) -> Scale:
        return Scale.around([point.x for point in self.points()], self.x_log, exact=True)

    @property
    def y(self) -> Scale:
        numbers = [n for p in self.points() for n in (p.y, p.low, p.high) if n is not None]
        if self.y_range is not None:
            return Scale(*self.y_range, self.y_log)
        return Scale.around(numbers, self.y_log)


@dataclass(frozen=True)
class Scale:
    """A map from numbers to 0..1, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, numbers: Sequence[float], log: bool, exact: bool = False) -> Scale:
        """Make a scale that covers the numbers, with round ends unless `exact`."""
        low, high = min(numbers), max(numbers)
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - abs(low) / 10, high + (abs(high) / 10 or 1))
        if exact:
            return cls(low, high, log)
        if log:
            return cls(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)), log)
        step = _round_step(low, high, 6)
        return cls(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, log)

    def __call__(self, number: float) -> float:
        if self.log:
            return math.log(number / self.low) / math.log(self.high / self.low)
        return (number - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return about `most` round numbers between the ends, with their labels."""
        if self.log:
            numbers = self._powers(most)
            raised = any("·" in format_number(n) or "⁻" in format_number(n) or n >= 1e6 for n in numbers)
            return [(number, _raised(number) if raised else format_number(number)) for number in numbers]
        step = _round_step(self.low, self.high, most)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        digits += not math.isclose(round(step, digits), step)  # 2.5 needs one more than 2
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(i * step, f"{i * step:,.{digits}f}") for i in range(first, last + 1)]

    def _powers(self, most: int) -> list[float]:
        """Return powers of ten; with 2 and 5 between them if they are few, or only some if they are many."""
        first, last = math.floor(math.log10(self.low) + 1e-9), math.ceil(math.log10(self.high) - 1e-9)
        decades = math.log10(self.high / self.low)
        factors = (1, 2, 5) if decades * 3 <= most else (1, 3) if decades * 2 <= most else (1,)
        every = max(1, math.ceil((last - first + 1) / most))
        ticks = [f * 10.0**power for power in range(first, last + 1) if power % every == 0 for f in factors]
        return [n for n in ticks if self.low * (1 - 1e-9) <= n <= self.high * (1 + 1e-9)]


def _round_step(low: float, high: float, most: int) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that divides the range into at most `most` parts."""
    rough = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1, 2, 2.5, 5) if m * power >= rough * (1 - 1e-9)), 10 * power)


def format_number(number: float) -> str:
    """Format a number for an axis or a table: 0.05, 12.5, 1,500; very small and large ones as 10⁻⁵ or 3·10⁻⁵."""
    if number and not 1e-3 <= abs(number) < 1e6:
        return _raised(number)
    return f"{number:,.0f}" if number == round(number) or abs(number) >= 1000 else f"{number:.3g}"


def _raised(number: float) -> str:
    """Format a number as a power of ten: 1, 10, 10⁻⁵, 3·10⁻⁵."""
    power = math.floor(math.log10(abs(number)) + 1e-9)
    front = f"{number / 10.0**power:.3g}"
    if power in (0, 1) and front == "1":
        return str(10**power)
    raised = f"10{str(power).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return raised if front == "1" else f"{front}·{raised}"


def marked(points: Sequence[T]) -> Sequence[T]:
    """Return the points that get a marker: all of them, or some if there are many; always the last."""
    every = 1 if len(points) <= MAX_MARKERS else math.ceil(len(points) / 8)
    return points[::-1][::every][::-1]


def x_label(chart: Chart, x: float) -> str:
    """Return the label of a value on the x axis."""
    return clean(next((label for value, label in chart.x_ticks if value == x), format_number(x)))


def value_label(point: Point) -> str:
    """Format the value of a point, with its interval if there is one."""
    if point.low is None or point.high is None:
        return format_number(point.y)
    return f"{format_number(point.y)} ({format_number(point.low)} to {format_number(point.high)})"
