"""The alignment view: the cells are the model's numbers, by colour, by keyboard, as a table and in files."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from onscreen import SENTENCE, Site, Visit, announced, cells, export, holds, table, until

import regard
from regard.viz import colours, views
from regard.viz.maps import Map

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from regard.interpret.trace import Trace

NAME = "decoder.1.cross_attn"


@pytest.fixture(scope="module")
def trace(site: Site) -> Trace:
    return regard.load(site.runs["tiny-transformer"]).trace(SENTENCE)


def _coloured(weights: np.ndarray) -> np.ndarray:
    return np.array([[colours.rgb(float(weight)) for weight in row] for row in weights])


def _shown(trace: Trace) -> np.ndarray:
    """Return the weights as the page receives them, [H, T, S]."""
    return trace.display(f"{NAME}.weights") * (1 / 255)


@pytest.mark.parametrize("head", [0, 3])
def test_a_cell_s_colour_is_its_weight_through_the_colour_table(head: int, visit: Visit, trace: Trace) -> None:
    page = visit("align", layer=1, head=head)
    assert np.array_equal(cells(page), _coloured(_shown(trace)[head]))


def test_the_mean_of_heads_and_merged_words_equal_the_library_s(visit: Visit, trace: Trace) -> None:
    page = visit("align", layer=1, head="mean")
    mean = _shown(trace).mean(0)
    assert np.abs(cells(page) - _coloured(mean)).max() <= 1, "float32 here, float64 there"
    pieces = {side: tuple(token["text"] for token in trace.elements(side)) for side in ("target", "source")}
    merged = Map(mean, pieces["target"], pieces["source"]).to_words()
    page.check("text=Merge subwords into words")
    until(lambda: cells(page).shape[:2] == merged.weights.shape, "the map of words")
    assert np.abs(cells(page) - _coloured(merged.weights)).max() <= 1


def test_a_file_written_by_draw_shows_the_same_picture(page: Page, trace: Trace, tmp_path: Path) -> None:
    """Without a layer and a head, it shows the mean of all, over words."""
    picture = views.draw(trace, "align")
    picture.save(tmp_path / "align.html")
    page.goto((tmp_path / "align.html").as_uri())
    page.wait_for_selector("main[data-ready=align]")
    assert page.text_content("figure h3") == "Cross-attention, mean of 2 layers, mean of 4 heads"
    assert np.abs(cells(page) - _coloured(np.array(picture.numbers["weights"]))).max() <= 2, "a byte a weight here"


def test_the_table_has_the_same_numbers(visit: Visit, trace: Trace) -> None:
    page = visit("align", layer=1, head=2, table=1)
    heading, *rows = table(page)
    assert heading[1:] == [token["label"] for token in trace.elements("source")]
    assert [row[0] for row in rows] == [token["label"] for token in trace.elements("target")]
    numbers = np.array([[float(cell) for cell in row[1:]] for row in rows])
    assert np.abs(numbers - _shown(trace)[2]).max() <= 0.0005
    page.click("text=Pictures")
    assert page.is_visible(".map-plane canvas") and not page.is_visible(".table-box")


def test_the_arrow_keys_move_the_cursor_in_the_map(visit: Visit, trace: Trace) -> None:
    page = visit("align", layer=1, head=0)
    source, target = ([token["label"] for token in trace.elements(side)] for side in ("source", "target"))
    weights = _shown(trace)[0]
    page.focus(".map-cell")
    walk = ["ArrowDown", "ArrowRight", "ArrowRight", "End", "Home", "Control+End", "Control+Home"]
    last = (len(target) - 1, len(source) - 1)
    positions = [(1, 0), (1, 1), (1, 2), (1, last[1]), (1, 0), last, (0, 0)]
    for key, (r, c) in zip(walk, positions, strict=True):
        page.keyboard.press(key)
        assert _position(page) == (r, c)
        assert page.get_attribute(".map-cell", "aria-label") == f"{target[r]} → {source[c]}: {weights[r, c]:.2f}"
        assert page.get_attribute(".map-cell", "aria-colindex") == str(c + 2)
    until(lambda: announced(page) == f"{target[0]} → {source[0]}: {weights[0, 0]:.2f}", "the announcement")
    page.keyboard.press("ArrowLeft")
    assert _position(page) == (0, -1) and page.get_attribute(".map-cell", "role") == "rowheader"
    best = int(weights[0].argmax())
    until(lambda: announced(page).startswith(f"{target[0]} attends to"), "the attention of the word")
    assert f"{weights[0, best]:.2f}" in announced(page)


def _position(page: Page) -> tuple[int, int]:
    r, c = page.eval_on_selector(".map-cell", "cell => [cell.dataset.r, cell.dataset.c]")
    return int(r), int(c)


def test_pointing_at_a_word_shades_what_it_attends_to(visit: Visit, trace: Trace) -> None:
    page = visit("align", layer=1, head=1)
    page.hover(".strip[aria-label=Output] button:nth-child(2)")
    shades = page.eval_on_selector_all(
        ".strip[aria-label=Source] button", "all => all.map((one) => one.style.background)"
    )
    expected = ["rgb({}, {}, {})".format(*colours.rgb(float(w))) for w in _shown(trace)[1][1]]
    assert shades == expected
    page.hover(".strip[aria-label=Source] button:nth-child(1)")
    shades = page.eval_on_selector_all(
        ".strip[aria-label=Output] button", "all => all.map((one) => one.style.background)"
    )
    assert shades == ["rgb({}, {}, {})".format(*colours.rgb(float(w))) for w in _shown(trace)[1][:, 0]]


def test_a_link_reopens_the_same_picture(visit: Visit, page: Page) -> None:
    visit("align")
    page.select_option("text=Layer >> xpath=.. >> select", "0")
    page.select_option("text=Head >> xpath=.. >> select", "2")
    page.click("#theme")
    holds(page, "document.querySelector('figure h3').textContent.endsWith('layer 1, head 3')")
    before, address = cells(page), page.evaluate("location.href")
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("main[data-ready=align]")
    assert np.array_equal(cells(page), before)
    assert page.text_content("figure h3") == "Cross-attention, layer 1, head 3"
    assert page.get_attribute("html", "data-theme") == "dark"


def test_known_gold_links_are_outlined_and_scored(visit: Visit, page: Page, trace: Trace) -> None:
    gold = {"links": [[0, 0], [1, 1]], "aer": {NAME: [40.0, 25.0, 50.0, 60.0]}, "mean": {NAME: 30.0}, "all": 30.0}

    def known(route: object) -> None:
        answer = route.fetch()  # type: ignore[attr-defined]
        route.fulfill(response=answer, json=answer.json() | {"gold": gold})  # type: ignore[attr-defined]

    page.route("**/api/trace", known)
    visit("align", layer=1, head="best")
    assert page.text_content("figure h3") == "Cross-attention, layer 2, head 2"
    assert "25.0" in (page.text_content("figcaption p") or "")
    assert page.is_visible(".legend-gold")
    with_outlines = page.eval_on_selector(".map-plane canvas", "canvas => canvas.toDataURL()")
    page.uncheck("text=Gold alignment")
    until(lambda: not page.is_visible(".legend-gold"), "the outlines to disappear")
    assert page.eval_on_selector(".map-plane canvas", "canvas => canvas.toDataURL()") != with_outlines


def test_the_saved_svg_and_png_show_the_same_cells(visit: Visit, trace: Trace, tmp_path: Path) -> None:
    page = visit("align", layer=1, head=0)
    path = export(page, "SVG", tmp_path)
    assert path.name == "alignment.svg"
    root = ElementTree.parse(path).getroot()
    named = [rect for rect in root.iterfind(".//{*}rect") if rect.find("{*}title") is not None]
    weights = _shown(trace)[0]
    assert [rect.get("fill") for rect in named] == [colours.colour(float(w)) for row in weights for w in row]
    png = export(page, "PNG", tmp_path).read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) > 5000


def test_a_view_marked_ready_has_drawn_its_map(visit: Visit, page: Page) -> None:
    """These tests and scripts that take screenshots rely on the attribute."""
    page.add_init_script("""new MutationObserver(() => {
        const main = document.querySelector("main");
        if (main.dataset.ready) window.rowsThen ??= main.querySelector(".map-plane canvas").dataset.rows ?? "none yet";
    }).observe(document, { subtree: true, attributeFilter: ["data-ready"] })""")
    visit("align", afresh=True)
    assert page.evaluate("window.rowsThen") == str(len(cells(page)))


def test_the_saved_html_shows_the_same_from_disk(visit: Visit, page: Page, tmp_path: Path) -> None:
    visit("align", layer=1, head=1)
    path = export(page, "HTML", tmp_path)
    read = "() => ['.output', 'main', '#composer .facts'].map((where) => document.querySelector(where).textContent)"
    live, colours_live = page.evaluate(read), cells(page)
    page.goto(path.as_uri())
    page.wait_for_selector("main[data-ready=align]")
    assert page.evaluate(read) == live
    assert np.array_equal(cells(page), colours_live)
    page.click("nav >> text=All heads")
    page.wait_for_selector("main[data-ready=heads]")
    assert page.query_selector("main [role=alert]") is None
    again = export(page, "HTML", tmp_path)
    assert again.read_text("utf-8").count("regard-data") == path.read_text("utf-8").count("regard-data")


def test_the_saved_html_works_in_a_notebook_frame(visit: Visit, page: Page, tmp_path: Path) -> None:
    visit("align")
    text = export(page, "HTML", tmp_path).read_text("utf-8")
    page.goto("about:blank")
    put = """text => {
        const frame = document.createElement("iframe");
        Object.assign(frame, { srcdoc: text, width: 900, height: 700 });
        frame.sandbox = "allow-scripts";
        document.body.append(frame);
    }"""
    page.evaluate(put, text)
    frame = page.frame_locator("iframe")
    frame.locator("main[data-ready=align] .map-plane canvas").wait_for()
    frame.locator("nav >> text=All heads").click()
    frame.locator("main[data-ready=heads]").wait_for()
