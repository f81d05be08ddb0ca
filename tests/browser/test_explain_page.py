"""Explanations on the page equal those in Python, for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from onscreen import SENTENCE, Site, Visit, announced, cells, export, settled, table, until

import regard
from regard.interpret.explain import curves
from regard.interpret.explain.models import ask
from regard.viz.colours import signed_rgb
from regard.viz.explanations import number

if TYPE_CHECKING:
    from playwright.sync_api import Page

LONG = "this cat is very large and that dog is small"


def _done(page: Page) -> None:
    until(lambda: page.locator("figure:has(h3:text('Deletion'))").count() == 1, "the explanation")
    settled(page)


@pytest.mark.parametrize(("text", "exact"), [(SENTENCE, True), (LONG, False)])
def test_the_explanation_is_the_librarys_for_the_same_seed(site: Site, visit: Visit, text: str, exact: bool) -> None:
    page = visit("explain", run="tiny-transformer", text=text, masks=64, seed=3, table=1)
    _done(page)
    there = regard.load(site.runs["tiny-transformer"]).explain(text, masks=64, seed=3)
    assert there.exact is exact
    head, *rows = table(page, "figure:has(h3:text('Importance of each'))")
    assert tuple(head[1:]) == there.features
    assert tuple(row[0] for row in rows) == there.outputs
    written = [
        [number(value) + ("" if exact else f" ± {error:.2f}") for value, error in zip(values, errors, strict=True)]
        for values, errors in zip(there.importance.T, there.error.T, strict=True)
    ]
    assert [row[1:] for row in rows] == written
    overall = table(page, "figure:has(h3:text('Importance for the whole'))")[1:]
    assert [row[1] for row in overall] == [number(value) for value in there.overall]


def test_its_cells_have_the_signed_colours(site: Site, visit: Visit) -> None:
    page = visit("explain", run="tiny-transformer", masks=64)
    _done(page)
    there = regard.load(site.runs["tiny-transformer"]).explain(SENTENCE, masks=64).importance.T
    expected = [[list(signed_rgb(value / np.abs(there).max())) for value in row] for row in there]
    assert np.abs(cells(page, "figure:has(h3:text('Importance of each'))") - expected).max() <= 1


def test_the_curves_are_the_librarys(site: Site, visit: Visit) -> None:
    page = visit("explain", run="tiny-transformer", masks=64, table=1)
    _done(page)
    asked = ask(regard.load(site.runs["tiny-transformer"]), SENTENCE)
    found = asked.explain(masks=64)
    looked = asked.attention()
    assert looked is not None
    drawn = curves(asked.box, {"explanation": found.overall, "attention": looked})
    for kind in ("deletion", "insertion"):
        head, *rows = table(page, f"figure:has(h3:text('{kind.capitalize()}'))")
        assert head[1:] == ["explanation", "attention", "random order"]
        shown = np.array([[float(cell.replace("−", "-")) for cell in row[1:]] for row in rows]).T
        assert shown == pytest.approx(np.array([getattr(curve, kind) for curve in drawn]), rel=2e-3, abs=1e-4)


def test_a_gpt_s_attention_is_put_to_the_same_test_as_the_page_says(visit: Visit) -> None:
    page = visit("explain", run="tiny-gpt", text="Once upon", masks=64, table=1)
    _done(page)
    assert "the curves below compare both" in (page.text_content(".comparison") or "").lower()
    head = table(page, "figure:has(h3:text('Deletion'))")[0]
    assert head[1:] == ["explanation", "attention", "random order"]


def test_the_page_says_that_attention_is_not_an_explanation(visit: Visit) -> None:
    page = visit("explain", run="tiny-transformer", masks=64)
    assert "not by itself an explanation" in (page.text_content("#view-explain .callout") or "")
    _done(page)
    until(lambda: "Most important:" in announced(page), "the announcement")


def test_pointing_at_one_map_points_at_the_other(visit: Visit) -> None:
    page = visit("explain", run="tiny-transformer", masks=64)
    _done(page)
    page.locator("figure:has(h3:text('Importance of each')) .map-cell").focus()
    page.keyboard.press("ArrowRight")
    other = page.locator("figure:has(h3:text('Attention:')) .map-ghost")
    until(lambda: other.is_visible(), "the other map's mark")


def test_the_saved_page_carries_the_explanation(visit: Visit, page: Page, tmp_path: Path) -> None:
    visit("explain", run="tiny-transformer", masks=64)
    _done(page)
    live, colours = page.inner_text(".columns"), cells(page, "figure:has(h3:text('Importance of each'))")
    page.goto(export(page, "HTML", tmp_path).as_uri())
    _done(page)
    assert page.inner_text(".columns") == live
    assert np.array_equal(cells(page, "figure:has(h3:text('Importance of each'))"), colours)
    page.fill("input[type=number]", "5")
    page.keyboard.press("Tab")
    until(lambda: "regard look" in page.inner_text(".explain-status"), "what the file says of another question")
