"""Runs side by side: the numbers of each, linked cursors, and snapshots of the training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onscreen import SENTENCE, Site, Visit, cells, export, holds, until
from tinyruns import TINY, served

import regard
from regard.api import Model
from regard.run_dir import RunDir
from regard.viz import colours
from tiny_runs import make

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route


def _coloured(weights: np.ndarray) -> np.ndarray:
    return np.array([[colours.rgb(float(weight)) for weight in row] for row in weights])


def test_two_runs_are_shown_side_by_side_on_the_same_input(visit: Visit, site: Site) -> None:
    page = visit("compare")
    panes = page.locator(".columns > figure")
    assert panes.count() == 2
    for i, name in enumerate(("tiny-transformer", "tiny-additive")):
        trace = regard.load(site.runs[name]).trace(SENTENCE)
        assert (panes.nth(i).locator(".pane-output").text_content() or "") == trace.header["text"]["target"]
        last = [entry for entry in trace.header["attention"] if entry["part"] == "cross"][-1]
        mean = (trace.display(last["array"]) / 255).mean(0)
        assert np.abs(cells(page, f".columns > figure:nth-child({i + 1})") - _coloured(mean)).max() <= 1


def test_a_cursor_in_one_map_points_at_the_same_word_in_the_other(visit: Visit) -> None:
    page = visit("compare", words=1, same=1)
    first, second = (page.locator(f".columns > figure:nth-child({i})") for i in (1, 2))
    first.locator(".map-cell").focus()
    page.keyboard.press("ArrowRight")
    lit = second.locator(".map-head.lit")
    assert lit.count() == 1 and lit.text_content() == SENTENCE.split()[1]
    assert second.locator(".map-ghost").is_visible()
    page.keyboard.press("ArrowRight")
    assert second.locator(".map-head.lit").text_content() == SENTENCE.split()[2]


def test_models_are_added_changed_and_removed_and_the_address_follows(visit: Visit) -> None:
    page = visit("compare")
    page.click("text=Add a model")
    holds(page, "document.querySelectorAll('.columns > figure').length === 3")
    page.select_option("#pane-2-run", "tiny-transformer")
    until(lambda: "tiny-transformer" in (page.locator(".columns > figure:nth-child(3) h3").text_content() or ""), "it")
    page.click("[aria-label='Remove tiny-transformer, model 1']")
    holds(page, "document.querySelectorAll('.columns > figure').length === 2")
    chosen = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('with')")
    assert [pane[0] for pane in json.loads(chosen)] == ["tiny-additive", "tiny-transformer"]
    again = visit("compare", afresh=True, **{"with": chosen})
    assert again.locator(".columns > figure h3").all_text_contents() == ["tiny-additive", "tiny-transformer"]


def test_the_slider_shows_each_snapshot_on_the_same_output(visit: Visit, site: Site) -> None:
    page = visit("compare", snap=10, layer=1, head=0)
    run = RunDir(site.runs["tiny-transformer"])
    target = Model(run, "cpu").trace(SENTENCE).header["text"]["target"]
    where = "section[aria-label='Attention during training']"
    for step, path in run.snapshots().items():
        page.evaluate("step => location.hash = location.hash.replace(/snap=\\d+/, `snap=${step}`)", step)
        holds(page, f"document.querySelector(\"{where} h3\").textContent.endsWith('step {step}')")
        weights = (
            Model(run, "cpu", path).trace(SENTENCE, target=target).display("decoder.1.cross_attn.weights")[0] / 255
        )
        assert np.array_equal(cells(page, where), _coloured(weights))
    slider = page.locator(f"{where} input[type=range]")
    slider.focus()
    page.keyboard.press("Home")
    holds(page, f"document.querySelector(\"{where} h3\").textContent.endsWith('step 10')")
    assert slider.get_attribute("aria-valuetext") == "10"


def test_many_snapshots_are_shown_completely(visit: Visit, page: Page, tmp_path: Path) -> None:
    run = make(tmp_path / "run", TINY["tiny-transformer"])
    for step in range(30, 110, 10):
        shutil.copy(run.snapshot(10), run.snapshot(step))
    with served([run.path], SENTENCE) as address:
        visit("compare", at=address)
        holds(page, "[...document.querySelectorAll('.frames canvas')].every((one) => one.width > 1)")
        read = "all => all.map((one) => one.getBoundingClientRect().bottom)"
        (frames,), thumbs = (page.eval_on_selector_all(where, read) for where in (".frames", ".frames .thumb"))
    assert len(thumbs) == 10 and max(thumbs) <= frames


def test_the_saved_page_contains_all_compared_models(visit: Visit, page: Page, tmp_path: Path) -> None:
    visit("compare", snap=10)
    live = [cells(page, f".columns > figure:nth-child({i})") for i in (1, 2)]
    page.goto(export(page, "HTML", tmp_path).as_uri())
    page.wait_for_selector("main[data-ready=compare]")
    assert page.query_selector("main [role=alert]") is None
    for i, before in enumerate(live, 1):
        assert np.array_equal(cells(page, f".columns > figure:nth-child({i})"), before)
    assert (page.text_content("section[aria-label='Attention during training'] h3") or "").endswith("step 10")


def test_the_last_traces_are_saved_when_there_are_too_many(visit: Visit, page: Page, tmp_path: Path) -> None:
    def few(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"limits": {"requests": 2}})

    page.route("**/api/runs", few)
    visit("compare")  # two models, and two snapshots
    holds(page, "[...document.querySelectorAll('.frames canvas')].every((one) => one.width > 1)")
    page.goto(export(page, "HTML", tmp_path).as_uri())
    carried = page.eval_on_selector("#regard-data", "one => Object.keys(JSON.parse(one.textContent).traces)")
    assert [json.loads(key)[:2] for key in carried] == [["tiny-transformer", None], ["tiny-transformer", 20]]
