"""Pictures of a map: what they show equals the weights, and no token can break them."""

from __future__ import annotations

import io
import re
import unicodedata
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest

from regard.text.display import columns, labels, shorten, visible
from regard.viz import grid, terminal
from regard.viz.colours import ANCHORS, DARK_INK, colour, ink, luminance, rgb
from regard.viz.maps import Map
from regard.viz.scene import PAD, Theme

SVG = "{http://www.w3.org/2000/svg}"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def some_map(queries: int, keys: int, seed: int = 0) -> Map:
    weights = np.random.default_rng(seed).dirichlet(np.full(keys, 0.3), size=queries)
    return Map(weights, tuple(f" q{i}" for i in range(queries)), tuple(f" k{i}" for i in range(keys)), "some map")


def cells(picture: str) -> list[ET.Element]:
    root = ET.fromstring(picture)
    group = next(g for g in root.iter(SVG + "g") if g.get("class") == "cells")
    return list(group.iter(SVG + "rect"))


CAT = Map(
    [[0.9, 0.1, 0.0], [0.2, 0.5, 0.3], [0.0, 0.4, 0.6], [0.0, 0.25, 0.75]],  # type: ignore[arg-type]
    ("el", " gat", "o", "</s>"),
    ("the", " c", "at"),
    "cross-attention, layer 2",
)


# --- maps ---------------------------------------------------------------------------------------------------------


def test_words_sum_over_key_tokens_and_average_over_query_tokens() -> None:
    words = CAT.to_words()
    assert words.queries == ("el", " gato", "</s>")
    assert words.keys == ("the", " cat")
    # "gato": the mean of (0.2, 0.5 + 0.3) and (0.0, 0.4 + 0.6)
    np.testing.assert_allclose(words.weights, [[0.9, 0.1], [0.1, 0.9], [0.0, 1.0]])
    assert words.title == CAT.title


def test_rows_still_sum_to_one_after_merging_and_the_text_is_kept() -> None:
    pieces = ("<2de>", "un", "believ", "able", " cat", "s", ",", " ", "yes", "</s>")
    merged = Map(np.random.default_rng(1).dirichlet(np.ones(10), size=10), pieces, pieces).to_words()
    assert merged.keys == ("<2de>", "unbelievable", " cats,", " yes", "</s>")
    np.testing.assert_allclose(merged.weights.sum(1), 1.0)
    np.testing.assert_allclose(merged.to_words().weights, merged.weights)


def test_words_are_whole_where_their_tokens_share_a_character() -> None:
    queries = ("na⟨c3⟩", "⟨af⟩ve", " ⟨f0⟩", "⟨9f⟩⟨98⟩", "⟨80⟩", "</s>")
    keys = ("⟨d0⟩", "⟨bc⟩", "⟨e3⟩", "⟨80⟩", "⟨80⟩", "⟨e7⟩⟨95⟩", "⟨8c⟩", " ⟨e2⟩")  # \u3000, a space of three bytes
    words = Map(np.full((6, 8), 1 / 8), queries, keys).to_words()
    assert words.queries == ("naïve", " 😀", "</s>")
    assert words.keys == ("м", "\u3000界", " ⟨e2⟩")
    np.testing.assert_allclose(words.weights, [[2 / 8, 5 / 8, 1 / 8]] * 3)


def test_an_all_zero_row_stays_zero() -> None:
    merged = Map(np.zeros((2, 2)), ("a", "b"), ("a", "b")).to_words()
    assert merged.weights.tolist() == [[0.0]]


def test_a_map_is_a_copy_and_refuses_invalid_weights() -> None:
    weights = np.eye(2)
    one = Map(weights, ("a", "b"), ("c", "d"))
    weights[0, 0] = 0.0
    assert one.weights[0, 0] == 1.0
    for bad in (np.eye(3), np.full((2, 2), np.nan), np.full((2, 2), -0.1), np.full((2, 2), 7.0)):
        with pytest.raises(ValueError):
            Map(bad, ("a", "b"), ("c", "d"))


def test_labels_drop_the_space_of_words_and_show_it_among_subwords() -> None:
    assert labels(("this", " cat", "</s>")) == ("this", "cat", "</s>")
    assert labels(("this", " l", "arge")) == ("this", "␣l", "arge")
    assert labels(("this", "cat")) == ("this", "cat")
    assert labels(("a", " ", " b")) == ("a", "␣", "b")
    assert labels(("<s>", "este", " gato", "</s>")) == ("<s>", "este", "gato", "</s>")  # text begins after BOS
    assert labels(("<s>", "un", "a", " b")) == ("<s>", "un", "a", "␣b")
    assert labels(("I", " am", ",", " so"), words=True) == ("I", "am", ",", "so")
    assert labels(("oui", "\xa0!", "\u3000non")) == ("oui", "!", "non")  # spaces of any width
    assert labels(("oui", "\nnon", " si"), words=True) == ("oui", "␊non", "si")


def test_nothing_invisible_is_left_in_a_label() -> None:
    assert visible("\x1b[31m\n\x00\x7f") == "␛[31m␊␀␡"
    assert visible("\x9b1m") == "\\x9b1m"
    assert visible("a\u202eb") == "a\\u202eb"
    assert visible("\ud800\uffff") == "\ufffd\ufffd"
    assert visible("") == "∅"
    assert visible("\u0301a") == "◌\u0301a"


def test_widths_count_what_a_terminal_shows() -> None:
    assert columns("cat") == 3
    assert columns("大きい") == 6
    assert columns("e\u0301") == 1
    assert shorten("大きい", 5) == "大き…"
    assert columns(shorten("x" * 40, 10)) == 10


# --- colours ------------------------------------------------------------------------------------------------------


def test_the_scale_passes_through_its_anchors_and_halfway_between_them() -> None:
    assert colour(0.0) == "#440154" and colour(1.0) == "#fde725"
    for i, anchor in enumerate(ANCHORS):
        assert rgb(i / 15) == anchor
    assert rgb(0.5 / 15) == (70, 14, 96)  # between (68, 1, 84) and (72, 26, 108): 70, 13.5, 96


def test_heavier_is_lighter_and_text_can_be_read_on_every_cell() -> None:
    shades = [luminance(rgb(w)) for w in np.linspace(0, 1, 200)]
    assert all(a <= b for a, b in pairwise(shades))
    for w, shade in zip(np.linspace(0, 1, 200), shades, strict=True):
        contrast = (shade + 0.05) / 0.05 if ink(float(w)) == DARK_INK else 1.05 / (shade + 0.05)
        assert contrast >= 4.5


def palette_256(entry: int) -> tuple[int, int, int]:
    """The colour of an entry of the terminal palette: a 6 x 6 x 6 cube (16 to 231), then greys."""
    if entry >= 232:
        return (8 + 10 * (entry - 232),) * 3
    levels = (0, 95, 135, 175, 215, 255)
    red, green, blue = (levels[(entry - 16) // power % 6] for power in (36, 6, 1))
    return red, green, blue


def test_a_terminal_of_256_colours_shows_nearly_the_same_ones() -> None:
    for weight in np.linspace(0, 1, 100):
        code = re.search(r"48;5;(\d+)m", terminal.painted("x", rgb(float(weight)), "256"))
        assert code is not None
        assert (
            np.abs(np.subtract(palette_256(int(code[1])), rgb(float(weight)))).max() <= 48
        )  # half a step and rounding


# --- SVG ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark", "auto"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 6), (30, 12), (3, 90)])
def test_one_cell_a_weight_in_its_colour_with_its_tooltip(theme: Theme, shape: tuple[int, int]) -> None:
    map = some_map(*shape)
    drawn = cells(grid.draw(map, theme=theme))
    assert len(drawn) == map.weights.size
    for cell, (q, k) in zip(drawn, np.ndindex(shape), strict=True):
        assert cell.get("fill") == colour(float(map.weights[q, k]))
        assert cell.findtext(SVG + "title") == f"q{q} → k{k}: {map.weights[q, k]:.2f}"


def test_numbers_are_written_where_the_map_is_small_and_the_weight_is_not() -> None:
    def numbers(map: Map) -> list[str]:
        root = ET.fromstring(grid.draw(map))
        group = next((g for g in root.iter(SVG + "g") if g.get("class") == "numbers"), None)
        return [] if group is None else [str(text.text) for text in group]

    assert numbers(CAT) == ["0.90", "0.10", "0.20", "0.50", "0.30", "0.40", "0.60", "0.25", "0.75"]
    assert numbers(some_map(60, 60)) == []


def test_tokens_stay_text() -> None:
    nasty = "<img src=x onerror=alert(1)>"
    map = Map(np.eye(3), (nasty, " a&b", ' "q\'"'), (nasty, "]]>", "\x1b[2J\x00\ud800"), f"{nasty} & title")
    picture = grid.draw(map)
    root = ET.fromstring(picture)  # and so valid XML, whatever the tokens hold
    assert "<img" not in picture and "\x1b" not in picture
    assert {element.tag for element in root.iter()} <= {
        SVG + tag for tag in ("svg", "desc", "style", "rect", "g", "text", "title", "defs", "linearGradient", "stop")
    }
    assert root.get("aria-label") == f"{nasty} & title".replace("  ", " ")
    picture.encode("utf-8")


def test_the_picture_has_a_text_alternative() -> None:
    root = ET.fromstring(grid.draw(CAT.to_words()))
    assert root.get("role") == "img"
    assert root.get("aria-label") == "cross-attention, layer 2"
    assert "gato attends most to cat (0.90)" in str(root.findtext(SVG + "desc"))


def test_long_tokens_are_cut_but_whole_in_the_tooltip() -> None:
    long = "x" * 40
    picture = grid.draw(Map([[1.0]], (long,), ("a",)))  # type: ignore[arg-type]
    assert f">{'x' * 19}…<" in picture
    assert f"{long} → a: 1.00" in picture


def test_links_are_outlined_and_must_lie_in_the_map() -> None:
    root = ET.fromstring(grid.draw(CAT, links=[(0, 0), (3, 2)]))
    group = next(g for g in root.iter(SVG + "g") if g.get("class") == "links")
    outlines = [r for r in group if r.get("class") == "line-link"]
    assert len(outlines) == 2
    assert "gold alignment" in [t.text for t in root.iter(SVG + "text")]
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        grid.draw(CAT, links=[(3, 3)])


def test_themes() -> None:
    assert "prefers-color-scheme" in grid.draw(CAT)
    light, dark = grid.draw(CAT, theme="light"), grid.draw(CAT, theme="dark")
    assert "<style>" not in light + dark
    assert [c.get("fill") for c in cells(light)] == [c.get("fill") for c in cells(dark)]
    assert light != dark


def test_everything_lies_on_the_card_and_big_maps_thin_their_labels() -> None:
    for map in (CAT, some_map(200, 200), some_map(7, 150), some_map(150, 2)):
        root = ET.fromstring(grid.draw(map, links=[(0, 0)]))
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        assert max(width, height) < 1100
        for text in root.iter(SVG + "text"):
            assert 0 < float(text.get("x", -1)) < width and 0 < float(text.get("y", -1)) < height
    texts = [t.text for t in ET.fromstring(grid.draw(some_map(200, 200))).iter(SVG + "text")]
    assert "q0" in texts and "q1" not in texts and "one label in 3 shown; hover for the others" in texts


# --- terminal -----------------------------------------------------------------------------------------------------


def plain_lines(text: str) -> list[str]:
    return ESCAPES.sub("", text).splitlines()


@pytest.mark.parametrize("colour", ["truecolor", "256", "none"])
@pytest.mark.parametrize("width", [12, 20, 40, 80, 200])
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (6, 33), (10, 120)])
def test_no_line_is_wider_than_the_terminal(colour: terminal.Colour, width: int, shape: tuple[int, int]) -> None:
    lines = plain_lines(terminal.draw(some_map(*shape), width=width, colour=colour))
    assert max(columns(line) for line in lines) <= width


def test_wide_signs_and_escapes_fit_too_and_are_harmless() -> None:
    tokens = ("大きい", " 猫", "\x1b[31mred", "\x9b2J", "e\u0301" * 30, "\ttab", "قطة")
    map = Map(np.eye(len(tokens)), tokens, tokens, "title \x1b]0;gone\x07")
    for width in (20, 40, 100):
        for drawn in (terminal.draw(map, width=width, colour="none"), terminal.draw(map, width=width, colour="256")):
            lines = plain_lines(drawn)
            assert max(columns(line) for line in lines) <= width
            assert not any(unicodedata.category(c) == "Cc" for line in lines for c in line)


def test_shades_never_get_lighter_as_weights_grow_and_all_are_used() -> None:
    places = [terminal.SHADES.index(terminal.shade_of(w)) for w in np.linspace(0, 1, 101)]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2, 3, 4}


def test_a_drawing_by_hand() -> None:
    map = Map([[1.0, 0.0], [0.5, 0.5]], ("el", " gato"), ("the", " cat"))  # type: ignore[arg-type]
    assert terminal.draw(map, width=40, colour="none").splitlines() == [
        "      the    cat",
        "  el █1.00█",
        "gato ▒0.50▒ ▒0.50▒",
        "",
        "░ 0.2+  ▒ 0.4+  ▓ 0.6+  █ 0.8+",
    ]
    assert terminal.draw(map, width=16, colour="none").splitlines() == [
        "     t c",
        "     h a",
        "     e t",
        "  el ██",
        "gato ▒▒▒▒",
        "",
        "0  ░▒▓█ 1",
    ]


def test_coloured_cells_have_the_colour_of_their_weight() -> None:
    map = some_map(4, 5)
    grounds = re.findall(r";48;2;(\d+);(\d+);(\d+)m", terminal.draw(map, width=100, colour="truecolor"))
    assert [tuple(int(c) for c in ground) for ground in grounds[:20]] == [rgb(float(w)) for w in map.weights.flat]
    entries = re.findall(r";48;5;(\d+)m", terminal.draw(map, width=100, colour="256"))
    shown = [palette_256(int(entry)) for entry in entries[:20]]
    assert np.abs(np.subtract(shown, [rgb(float(w)) for w in map.weights.flat])).max() <= 48


def test_maps_too_wide_are_split_into_panels_that_show_every_column_once() -> None:
    map = some_map(3, 100)
    drawn = terminal.draw(map, width=40, colour="truecolor")
    cells_drawn = drawn.rsplit("\n\n", 1)[0].count("\x1b[0m")
    assert cells_drawn == map.weights.size
    assert sum(line.startswith("q0 ") for line in plain_lines(drawn)) == 6  # 18 keys of two columns beside "q0 "


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"COLORTERM": "truecolor"}, "truecolor"),
        ({"COLORTERM": "24bit"}, "truecolor"),
        ({"TERM": "xterm-256color"}, "256"),
        ({"TERM": "xterm"}, "none"),
        ({"TERM": "dumb", "COLORTERM": "truecolor"}, "none"),
        ({"COLORTERM": "truecolor", "NO_COLOR": "1"}, "none"),
        ({}, "none"),
    ],
)
def test_capabilities(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name in ("COLORTERM", "TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "66")
    assert terminal.capabilities(Screen()) == (66, expected)
    assert terminal.capabilities(io.StringIO()) == (66, "none")


def test_a_bold_heading_fits_its_card() -> None:
    """The estimate is compared with the metrics of DejaVu Sans, the widest common sans-serif face."""
    font_manager = pytest.importorskip("matplotlib.font_manager")
    textpath = pytest.importorskip("matplotlib.textpath")
    bold = font_manager.FontProperties(family="DejaVu Sans", weight="bold", size=16)
    for heading in ("Cross-attention, mean of 2 layers, mean of 8 heads: AER 0.0 %", "Encoder self-attention, layer 1"):
        width, _, _ = textpath.TextToPath().get_text_width_height_descent(heading, bold, False)
        weights = Map(CAT.weights, CAT.queries, CAT.keys, heading)
        assert PAD + width <= float(ET.fromstring(grid.draw(weights)).get("width", "0"))
