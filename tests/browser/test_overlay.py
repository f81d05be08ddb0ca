"""Attention over images, recordings, episodes and graphs, and hiding parts of them, as in Python."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from onscreen import COPIED, Site, Visit, announced, export, holds, table, until
from test_changes import assert_as_in_python, changes_in

import regard
from regard.viz import views
from regard.viz.views import MapChoice

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

READ_IMAGE = f"""async (node) => {{
    const image = new Image();
    image.src = node.getAttribute("href");
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height);
    canvas.getContext("2d").drawImage(image, 0, 0);
    return Array.from(({COPIED})(canvas).data);
}}"""
STORED = 0.5 / 255 + 0.00005  # the rounding of a weight as it is sent, and of a number in a table
KINDS = ["tiny-images", "tiny-captions", "tiny-sound", "tiny-episodes", "tiny-graph"]
INPUT = {  # an input of each, and how many parts of it can be picked
    "tiny-images": ("test 2", 16),
    "tiny-captions": ("test 2", 36),
    "tiny-sound": ("test 2", 0),  # as many as there are frames
    "tiny-episodes": ("key-door return 1 seed 3", 0),
    "tiny-graph": ("paper-3", 0),
}


def python(site: Site, run: str, changes: Any = ()) -> Any:
    return regard.load(site.runs[run]).trace(INPUT[run][0], changes=changes)


def weights_in_table(page: Page) -> tuple[list[str], list[float]]:
    _, *rows = table(page)
    return [row[0] for row in rows], [float(row[1]) for row in rows]


def picked(page: Page, number: int, kind: str = "unit") -> None:
    """Pick a part by the keyboard: neighbours may lie over its middle."""
    page.locator(f"[data-{kind}='{number}']").focus()
    page.keyboard.press("Enter")


@pytest.mark.parametrize("run", KINDS)
def test_the_weights_are_those_of_regard_draw(site: Site, visit: Visit, run: str) -> None:
    text, count = INPUT[run]
    page = visit("overlay", run=run, text=text, table=1)
    trace = python(site, run)
    part = None if run == "tiny-captions" else trace.header["attention"][-1]["part"]
    at = {"tiny-episodes": str(trace.header["axes"]["inputs"].get("steps", [{}])[-1].get("number"))}.get(run)
    numbers = views.draw(trace, "overlay", MapChoice(part=part), at=at).numbers
    names, weights = weights_in_table(page)
    assert not count or len(names) == count
    if run == "tiny-episodes":  # the last decision; a step is the sum of its three tokens
        np.testing.assert_allclose(weights, numbers["weights"][-1], atol=3 * STORED)
    else:
        np.testing.assert_allclose(weights, numbers["shown"]["weights"], atol=STORED)
    page.evaluate("location.hash = location.hash.replace('table=1', 'layer=0&head=1')")
    page.wait_for_selector("[data-unit]")
    assert page.locator("[data-unit]").count() == len(names)


def test_a_clicked_patch_shows_what_it_attends_to(site: Site, visit: Visit) -> None:
    page = visit("overlay", run="tiny-images", text="test 2", layer=1, head=2)
    page.click("[data-unit='6']")
    until(lambda: "patch 2,3 attends to" in announced(page), "the announcement")
    weights = python(site, "tiny-images").array("encoder.1.self_attn.weights")[2, 6]
    page.click("text=Tables")
    names, shown = weights_in_table(page)
    assert names[6] == "2,3"
    np.testing.assert_allclose(shown, weights, atol=STORED)
    page.click("text=Pictures")
    page.click("[data-unit='6']")  # again: nothing is selected
    holds(page, "!location.hash.includes('at=')")


def test_the_colours_of_an_image_are_its_pixels_and_its_weights(site: Site, visit: Visit) -> None:
    page = visit("overlay", run="tiny-images", text="test 2", layer=0, head=0)
    page.click("[data-unit='0']")
    holds(page, "document.querySelector('#live').textContent.includes('patch 1,1 attends to')")
    plain, over = (
        np.array(node.evaluate(READ_IMAGE)).reshape(24, 24, 4)[..., :3]
        for node in page.locator(".element-picture image").element_handles()
    )
    trace = python(site, "tiny-images")
    image = np.rint(255 * trace.array("axes.source.image"))
    np.testing.assert_allclose(plain, image, atol=1)
    weights = trace.array("encoder.0.self_attn.weights")[0, 0].reshape(4, 4)
    brightness = over.reshape(4, 6, 4, 6, 3).mean((1, 3, 4))
    strongest, weakest = weights.argmax(), weights.argmin()
    assert brightness.ravel()[strongest] > brightness.ravel()[weakest]


def test_a_word_shows_where_it_looks_and_a_patch_which_words_look_there(site: Site, visit: Visit) -> None:
    page = visit("overlay", run="tiny-captions", text="test 2", layer=0, head=1)
    trace = python(site, "tiny-captions")
    weights = trace.array("decoder.0.cross_attn.weights")[1]
    page.click(".overlay-strip .token >> nth=1")
    page.click("text=Tables")
    until(lambda: np.allclose(weights_in_table(page)[1], weights[1], atol=STORED), "the row of the second word")
    page.click("text=Pictures")
    page.click("[data-unit='7']")
    until(lambda: "patch 2,2 is attended to by" in announced(page), "the announcement")
    listed = page.eval_on_selector_all(".top-weights li .num", "items => items.map((item) => Number(item.textContent))")
    np.testing.assert_allclose(listed, np.sort(weights[:, 7])[::-1][: len(listed)], atol=STORED + 0.005)


def test_a_recording_has_its_spectrogram_and_a_row_for_each_token(site: Site, visit: Visit) -> None:
    page = visit("overlay", run="tiny-sound", text="test 2")
    trace = python(site, "tiny-sound")
    frames = trace.elements("source")
    assert page.locator("[data-unit]").count() == len(frames)
    assert page.locator(".element-picture image").count() == 1
    labels = page.eval_on_selector_all(".element-picture text", "items => items.map((item) => item.textContent)")
    assert "CTC" in labels and "4 kHz" in labels
    assert labels.count("</s>") == sum(token["label"] == "</s>" for token in trace.elements("target"))


def test_steps_show_the_frames_of_the_episode_and_a_clicked_one_what_it_attends_to(site: Site, visit: Visit) -> None:
    page = visit("overlay", run="tiny-episodes", text=INPUT["tiny-episodes"][0], layer=0, head=1)
    trace = python(site, "tiny-episodes")
    frames = np.rint(255 * trace.array("axes.inputs.frames"))
    images = page.locator("[data-unit] image").element_handles()
    assert len(images) == len(frames) > 6
    for number in (0, len(frames) - 1):  # the key is seen in the first frame, the door in the last
        shown = np.array(images[number].evaluate(READ_IMAGE)).reshape(*frames.shape[1:3], 4)[..., :3]
        np.testing.assert_allclose(shown, frames[number], atol=1)
    picked(page, 5)
    name = page.locator("[data-unit='5'] text").first.text_content()
    assert name is not None
    until(lambda: "attends to" in announced(page), "the announcement")
    page.click("text=Tables")
    weights = trace.array("decoder.0.self_attn.weights")[1]  # three tokens a step; the middle one decides
    expected = weights[3 * 5 + 1].reshape(-1, 3).sum(1)
    np.testing.assert_allclose(weights_in_table(page)[1], expected, atol=3 * STORED)
    assert expected[:6].sum() == pytest.approx(1, abs=1e-5) and not expected[6:].any()


def test_edges_are_as_wide_as_the_attention_along_them(site: Site, visit: Visit) -> None:
    page = visit("overlay", run="tiny-graph", text=INPUT["tiny-graph"][0], layer=0, head=0)
    trace = python(site, "tiny-graph")
    axis = trace.header["axes"]["source"]
    row = trace.array("encoder.0.weights")[0][axis["focus"]]
    drawn = page.eval_on_selector_all(
        ".element-picture g:has(> line)",
        "all => all.map((edge) => [...edge.querySelectorAll('line')].slice(0, 2)"
        ".map((half) => Number(half.getAttribute('stroke-width'))))",
    )
    expected = [[row[b] if a == axis["focus"] else 0, row[a] if b == axis["focus"] else 0] for a, b in axis["edges"]]
    assert len(drawn) == len(expected) > 1 and row.max() > 0
    widths = 1 + 9 * np.array(expected) / row.max()
    np.testing.assert_allclose(
        drawn, widths, atol=9 * 2 * STORED / row.max()
    )  # the weight's rounding, and the greatest's
    assert np.ptp(widths) > 3


# -- interventions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "number"), [("tiny-images", 5), ("tiny-captions", 7), ("tiny-graph", 1)])
def test_a_hidden_part_gives_the_same_result_as_in_python(site: Site, visit: Visit, run: str, number: int) -> None:
    page = visit("changes", run=run, text=INPUT[run][0])
    picked(page, number)
    change = {"kind": "hide", "side": "source", "element": number}
    assert_as_in_python(page, python(site, run, [change]))
    assert changes_in(page) == [change]
    assert page.get_attribute(f"[data-unit='{number}']", "aria-pressed") == "true"
    page.locator(".changes-list .chip").click()
    until(lambda: page.query_selector("[data-output=changed]") is None, "the original alone")
    assert changes_in(page) == []


def test_a_hidden_edge_gives_the_same_result_as_in_python(site: Site, visit: Visit) -> None:
    page = visit("changes", run="tiny-graph", text="paper-3")
    picked(page, 0, "edge")
    ends = python(site, "tiny-graph").header["axes"]["source"]["edges"][0]
    assert_as_in_python(page, python(site, "tiny-graph", [{"kind": "edge", "side": "source", "ends": ends}]))
    assert "paper-3:" in page.inner_text(".changes-list")


def test_a_hidden_step_gives_the_same_result_as_in_python(site: Site, visit: Visit) -> None:
    page = visit("changes", run="tiny-episodes", text=INPUT["tiny-episodes"][0])
    picked(page, 1)
    change = {"kind": "hide", "side": "inputs", "element": 3}  # the first of return, state and action of step 2
    assert_as_in_python(page, python(site, "tiny-episodes", [change]))
    number = python(site, "tiny-episodes").header["axes"]["inputs"]["steps"][1]["number"]
    assert f"step {number} hidden" in page.inner_text(".changes-list")


def test_dragging_over_a_recording_hides_a_stretch_of_it(site: Site, visit: Visit) -> None:
    page = visit("changes", run="tiny-sound", text="test 2")
    page.hover("[data-unit='4']")
    page.mouse.down()
    page.hover("[data-unit='7']")
    page.mouse.up()
    changes = [{"kind": "hide", "side": "source", "element": n} for n in range(4, 8)]
    assert_as_in_python(page, python(site, "tiny-sound", changes))
    assert changes_in(page) == changes
    times = [element["time"] for element in python(site, "tiny-sound").elements("source")]
    assert f"{times[4][0]:.2f} to {times[7][1]:.2f} s hidden" in page.inner_text(".changes-list")


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_view_is_first_for_such_inputs_and_absent_for_texts(site: Site, visit: Visit) -> None:
    page = visit("overlay", run="tiny-images", text="test 2")
    assert page.locator("#views a").first.inner_text() == "On the input"
    page = visit("align", run="tiny-transformer", text="this cat")
    assert page.locator("#views a").first.inner_text() == "Alignment"


def test_another_run_begins_with_an_input_of_its_own_kind(visit: Visit) -> None:
    page = visit("heads", run="tiny-images", text="test 3")
    page.get_by_label("Model").select_option("tiny-graph")
    until(lambda: page.locator(".field-text textarea").input_value().startswith("paper-"), "a node of the graph")
    page.get_by_label("Examples").select_option(index=2)
    holds(page, "location.hash.includes('text=paper-')")
    page.get_by_label("Model").select_option("tiny-captions")
    until(lambda: page.locator(".field-text textarea").input_value() == "test 1", "the first example")
    page.wait_for_selector("main[data-ready=heads]")


@pytest.mark.parametrize("kind", ["SVG", "HTML"])
def test_an_overlay_can_be_exported(visit: Visit, kind: str, tmp_path: Path, page: Page) -> None:
    visit("overlay", run="tiny-images", text="test 2", on=page)
    path = export(page, kind, tmp_path)
    if kind == "SVG":
        assert path.read_text().count("<image") == 2
        return
    page.goto(path.as_uri())
    page.wait_for_selector("main[data-ready=overlay]")
    assert page.locator("[data-unit]").count() == 16
    page.click("[data-unit='3']")
    until(lambda: "patch 1,4 attends to" in announced(page), "the announcement")


def test_a_picture_is_narrow_enough_for_a_phone(visit: Visit, new_page: Any) -> None:
    phone = new_page(width=360)
    for run in KINDS:
        visit("overlay", run=run, text=INPUT[run][0], on=phone)
        width = phone.evaluate("document.documentElement.scrollWidth")
        assert width <= 360, (run, json.dumps(width))


# -- explanations of images --------------------------------------------------------------------------------------------


def test_the_explanation_of_an_image_is_that_of_python(site: Site, visit: Visit) -> None:
    page = visit("explain", run="tiny-images", text="test 2", masks=64, seed=3)
    until(lambda: "Most important pixel" in announced(page), "the final result")
    found = regard.load(site.runs["tiny-images"]).explain("test 2", masks=64, seed=3)
    assert page.locator(".element-picture image").count() == 4  # the image, and a map for each of three classes
    page.click("text=Tables")
    name, *places = table(page)[1]
    values = found.map(name).ravel()
    assert found.overall.tolist() == values.tolist()
    best = np.argsort(-values, kind="stable")[:5]
    assert [place.split()[0] for place in places] == [f"{i // 24 + 1},{i % 24 + 1}" for i in best]
    page.click("text=Pictures")


def test_inputs_that_cannot_be_explained_say_what_else_there_is(visit: Visit) -> None:
    page = visit("explain", run="tiny-graph", text="paper-3")
    assert "hide parts in Interventions" in page.inner_text("main .callout")
    assert page.locator("#foot a").all_inner_texts() == ["Interventions"]  # not the view that does not apply
    visit("overlay", run="tiny-images", text="test 2", on=page)
    assert page.locator("#foot a").all_inner_texts() == ["Explain", "Interventions"]


def test_a_recording_can_be_read_on_a_phone(visit: Visit, new_page: Any) -> None:
    phone = visit("overlay", run="tiny-sound", text="test 2", on=new_page(width=360))
    width = phone.locator(".element-picture svg").evaluate("svg => svg.getBoundingClientRect().width")
    assert width == 560  # it scrolls; letters of 12 units in a width of 750 would have 5 pixels in 320
