"""Charts: points match their numbers, labels never overlap, any text is safe, and colour is never the only cue."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.text.display import columns
from regard.viz.charts import Chart, Point, Scale, Series, columned, svg, table, terminal
from regard.viz.charts.picture import HEIGHT, apart

SVG = "{http://www.w3.org/2000/svg}"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def some_chart(count: int = 3, **more: object) -> Chart:
    series = tuple(Series.of(f"line {i}", [1, 2, 4], [90 - i, 60 - 10 * i, 30 - 10 * i]) for i in range(count))
    return Chart("quality", "length (words)", "BLEU", series, **more)  # type: ignore[arg-type]


def lines_of(picture: str) -> list[ET.Element]:
    root = ET.fromstring(picture)
    groups = [g for g in root.iter(SVG + "g") if g.get("class") == "series"]
    return [next(p for p in group.iter(SVG + "path") if p.get("fill") == "none") for group in groups]


def corners(line: ET.Element) -> list[tuple[float, float]]:
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", line.get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


# -- axes --------------------------------------------------------------------------------------------------------------


def test_ticks_are_round_numbers_within_the_axis() -> None:
    assert [label for _, label in Scale(0, 100).ticks(5)] == ["0", "20", "40", "60", "80", "100"]
    assert [label for _, label in Scale(0, 1).ticks(4)] == ["0.00", "0.25", "0.50", "0.75", "1.00"]
    assert [label for _, label in Scale(900, 3100).ticks(5)] == ["1,000", "1,500", "2,000", "2,500", "3,000"]


def test_ticks_of_a_logarithmic_axis_are_powers_of_ten() -> None:
    assert [label for _, label in Scale(1e-6, 1e-2, log=True).ticks(6)] == ["10⁻⁶", "10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²"]
    assert [label for _, label in Scale(1, 100, log=True).ticks(7)] == ["1", "2", "5", "10", "20", "50", "100"]
    assert [number for number, _ in Scale(1e-9, 1, log=True).ticks(5)] == pytest.approx([1e-8, 1e-6, 1e-4, 1e-2, 1])


def test_a_scale_is_linear_or_logarithmic() -> None:
    assert [Scale(10, 30)(n) for n in (10, 15, 30)] == [0.0, 0.25, 1.0]
    assert [Scale(1, 10_000, log=True)(n) for n in (1, 10, 10_000)] == pytest.approx([0.0, 0.25, 1.0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_a_scale_holds_all_its_numbers_and_has_a_tick(numbers: list[float]) -> None:
    scale = Scale.around(numbers, log=False)
    assert scale.ticks(6)
    assert all(-1e-6 <= scale(number) <= 1 + 1e-6 for number in numbers)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=10))
def test_labels_keep_their_order_and_their_distance(positions: list[float]) -> None:
    adjusted = apart(positions, 10, 0, 100)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    assert all(adjusted[b] - adjusted[a] >= 10 - 1e-9 for a, b in pairwise(order))
    assert all(-1e-9 <= position <= 100 + 1e-9 for position in adjusted)


def test_labels_far_apart_are_not_moved() -> None:
    assert apart([10, 50, 90], 20, 0, 100) == [10, 50, 90]
    assert apart([50, 50], 20, 0, 100) == [40, 60]


# -- the picture -------------------------------------------------------------------------------------------------------


def test_points_match_their_numbers() -> None:
    (line,) = lines_of(svg(Chart("t", "x", "y", (Series.of("a", [0, 1, 4], [0, 50, 100]),))))
    (x0, y0), (x1, y1), (x2, y2) = corners(line)
    assert (x1 - x0) / (x2 - x0) == pytest.approx(1 / 4, abs=1e-3)
    assert (y0 - y1) / (y0 - y2) == pytest.approx(1 / 2, abs=1e-3)  # up is more, and y counts downwards
    assert y0 - y2 == pytest.approx(HEIGHT)


def test_a_logarithmic_axis_has_equal_factors_at_equal_distances() -> None:
    (line,) = lines_of(svg(Chart("t", "x", "y", (Series.of("a", [1, 10, 100], [1, 0.1, 0.01]),), True, True)))
    (x0, y0), (x1, y1), (x2, y2) = corners(line)
    assert (x1 - x0, y1 - y0) == (pytest.approx(x2 - x1, abs=0.02), pytest.approx(y2 - y1, abs=0.02))


def test_series_differ_even_without_colour() -> None:
    picture = svg(some_chart(7))
    root = ET.fromstring(picture)
    (names,) = [g for g in root.iter(SVG + "g") if g.get("class") == "names"]
    shapes = [e.get("d", e.tag) for e in names if "line-card" in e.get("class", "")]
    assert len(shapes) == len(set(shapes)) == 7
    dashes = [line.get("stroke-dasharray") for line in lines_of(picture)]
    assert len(set(dashes[:5])) == 5


def test_every_series_is_labelled_and_described_by_its_numbers() -> None:
    root = ET.fromstring(svg(some_chart()))
    texts = [element.text for element in root.iter(SVG + "text")]
    assert {"line 0", "line 1", "line 2", "quality", "length (words)", "BLEU"} <= set(texts)
    assert "line 1, 2: 50" in [element.text for element in root.iter(SVG + "title")]
    assert "line 1: 89 at 1, 50 at 2, 20 at 4." in (root.find(SVG + "desc").text or "")  # type: ignore[union-attr]


def test_intervals_are_bars_or_a_band() -> None:
    line = Series("a", (Point(1, 5, 4, 7), Point(2, 6, 5, 8)))
    bars, band = (svg(Chart("t", "x", "y", (line,), spread=spread)) for spread in ("bars", "band"))  # type: ignore[arg-type]
    assert 'opacity="0.55"' in bars and 'opacity="0.14"' not in bars  # three strokes a bar, or one shape
    assert 'opacity="0.55"' not in band and 'opacity="0.14"' in band
    assert "a, 1: 5 (4 to 7)" in bars


def test_bars_of_several_series_at_one_x_are_side_by_side() -> None:
    chart = Chart("t", "x", "y", tuple(Series(name, (Point(1, 5, 4, 7), Point(2, 6, 5, 8))) for name in "abc"))
    starts = [corners(line)[0][0] for line in _whole_lines(svg(chart))]
    assert starts[1] - starts[0] == pytest.approx(starts[2] - starts[1]) == pytest.approx(5)


def _whole_lines(picture: str) -> list[ET.Element]:
    groups = [g for g in ET.fromstring(picture).iter(SVG + "g") if g.get("class") == "series"]
    return [path for group in groups for path in group if path.get("stroke-width") == "2.2"]


def test_a_line_of_many_points_is_marked_here_and_there_and_at_its_end() -> None:
    picture = svg(Chart("t", "x", "y", (Series.of("loss", range(1, 101), range(1, 101)),)))
    tips = [element.text for element in ET.fromstring(picture).iter(SVG + "title")]
    assert 2 <= len(tips) <= 9 and "loss, 100: 100" in tips


def test_any_text_leaves_the_picture_valid() -> None:
    nasty = "<script>&\"'\x1b[31m\x00]]>"
    chart = Chart(nasty, nasty, nasty, (Series.of(nasty, [1], [1]),), x_ticks=((1, nasty),), note=nasty)
    root = ET.fromstring(svg(chart))
    assert not list(root.iter(SVG + "script"))
    assert "\x1b" not in terminal(chart, width=80, colour="none") + table(chart)


def test_themes() -> None:
    chart = some_chart(5)
    assert "prefers-color-scheme" in svg(chart) and "prefers-color-scheme" not in svg(chart, theme="light")
    assert 'fill="#14171c"' in svg(chart, theme="dark") and 'fill="#ffffff"' in svg(chart, theme="light")


def test_invalid_charts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        Chart("t", "x", "y", (Series("a", ()),))
    with pytest.raises(ValueError, match="finite"):
        Chart("t", "x", "y", (Series.of("a", [1], [float("nan")]),))
    with pytest.raises(ValueError, match="logarithmic"):
        Chart("t", "x", "y", (Series.of("a", [1], [0]),), y_log=True)


# -- the terminal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [30, 57, 80, 200])
@pytest.mark.parametrize("colour", ["none", "256", "truecolor"])
def test_a_plot_respects_its_width_and_colour_setting(width: int, colour: str) -> None:
    text = terminal(some_chart(note="a note " * 20), width=width, colour=colour)  # type: ignore[arg-type]
    assert all(columns(ESCAPES.sub("", line)) <= width for line in text.splitlines())
    assert bool(ESCAPES.search(text)) == (colour != "none")


def test_the_markers_of_a_plot_match_the_numbers() -> None:
    text = terminal(Chart("", "x", "y", (Series.of("up", [0, 10], [0, 100]),)), width=60, colour="none")
    plot = [line for line in text.splitlines() if "●" in line][:2]
    assert plot[0].startswith("100") and plot[0].index("●") > 50  # 100 at the right
    assert plot[1].startswith("  0") and plot[1].index("●") < 10  # 0 at the left
    assert "● up" in text


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_per_x_and_a_dash_for_missing_values() -> None:
    chart = Chart("t", "x", "y", (Series.of("a", [1, 2], [10, 20]), Series("b", (Point(2, 5, 4, 7.5),))))
    assert table(chart).splitlines() == [
        "x   a             b",
        "1  10             –",
        "2  20  5 (4 to 7.5)",
    ]


def test_columns_that_do_not_fit_continue_below() -> None:
    text = columned(["run", "one", "two"], [["a", "111", "2222222"]], width=12)
    assert text == "run  one\na    111\n\nrun      two\na    2222222\n"
