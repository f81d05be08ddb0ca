"""Explanations on the page equal those in Python, for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from onscreen import SENTENCE, Site, Visit, announced, cells, export, settled, table, until

import regard
from regard.interpret.explain import curves
from regard.interpret.explain.models import explain_request
from regard.viz.colours import signed_rgb
from regard.viz.explanations import number

if TYPE_CHECKING:
    from playwright.sync_api import Page

LONG = "this cat is very large and that dog is small"


def _done(page: Page) -> None:
    until(lambda: page.locator("figure:has(h3:text('Deletion'))").count() == 1, "the explanation")
    settled(page)


@pytest.mark.parametrize(("text", "exact"), [(SENTENCE, True), (LONG, False)])
def test_the_explanation_equals_the_library_s_for_the_same_seed(
    site: Site, visit: Visit, text: str, exact: bool
) -> None:
    page = visit("explain", run="tiny-transformer", text=text, masks=64, seed=3, table=1)
    _done(page)
    expected = regard.load(site.runs["tiny-transformer"]).explain(text, masks=64, seed=3)
    assert expected.exact is exact
    head, *rows = table(page, "figure:has(h3:text('Importance of each'))")
    assert tuple(head[1:]) == expected.features
    assert tuple(row[0] for row in rows) == expected.outputs
    written = [
        [number(value) + ("" if exact else f" ± {error:.2f}") for value, error in zip(values, errors, strict=True)]
        for values, errors in zip(expected.importance.T, expected.error.T, strict=True)
    ]
    assert [row[1:] for row in rows] == written
    overall = table(page, "figure:has(h3:text('Importance for the whole'))")[1:]
    assert [row[1] for row in overall] == [number(value) for value in expected.overall]


def test_its_cells_have_the_signed_colours(site: Site, visit: Visit) -> None:
    page = visit("explain", run="tiny-transformer", masks=64)
    _done(page)
    expected = regard.load(site.runs["tiny-transformer"]).explain(SENTENCE, masks=64).importance.T
    rgb = [[list(signed_rgb(value / np.abs(expected).max())) for value in row] for row in expected]
    assert np.abs(cells(page, "figure:has(h3:text('Importance of each'))") - rgb).max() <= 1


def test_the_curves_equal_the_library_s(site: Site, visit: Visit) -> None:
    page = visit("explain", run="tiny-transformer", masks=64, table=1)
    _done(page)
    question = explain_request(regard.load(site.runs["tiny-transformer"]), SENTENCE)
    explanation = question.explain(masks=64)
    attention = question.attention()
    assert attention is not None
    expected_curves = curves(question.box, {"explanation": explanation.overall, "attention": attention})
    for kind in ("deletion", "insertion"):
        head, *rows = table(page, f"figure:has(h3:text('{kind.capitalize()}'))")
        assert head[1:] == ["explanation", "attention", "random order"]
        shown = np.array([[float(cell.replace("−", "-")) for cell in row[1:]] for row in rows]).T
        assert shown == pytest.approx(np.array([getattr(curve, kind) for curve in expected_curves]), rel=2e-3, abs=1e-4)


def test_the_attention_of_a_gpt_is_compared_too(visit: Visit) -> None:
    page = visit("explain", run="tiny-gpt", text="Once upon", masks=64, table=1)
    _done(page)
    assert "the curves below compare both" in (page.text_content(".comparison") or "").lower()
    head = table(page, "figure:has(h3:text('Deletion'))")[0]
    assert head[1:] == ["explanation", "attention", "random order"]


def test_the_page_states_that_attention_is_not_an_explanation(visit: Visit) -> None:
    page = visit("explain", run="tiny-transformer", masks=64)
    assert "not by itself an explanation" in (page.text_content("#view-explain .callout") or "")
    _done(page)
    until(lambda: "Most important:" in announced(page), "the announcement")


def test_pointing_at_one_map_highlights_the_other(visit: Visit) -> None:
    page = visit("explain", run="tiny-transformer", masks=64)
    _done(page)
    page.locator("figure:has(h3:text('Importance of each')) .map-cell").focus()
    page.keyboard.press("ArrowRight")
    other = page.locator("figure:has(h3:text('Attention:')) .map-ghost")
    until(lambda: other.is_visible(), "the highlight in the other map")


def test_the_saved_page_contains_the_explanation(visit: Visit, page: Page, tmp_path: Path) -> None:
    visit("explain", run="tiny-transformer", masks=64)
    _done(page)
    live, colours = page.inner_text(".columns"), cells(page, "figure:has(h3:text('Importance of each'))")
    page.goto(export(page, "HTML", tmp_path).as_uri())
    _done(page)
    assert page.inner_text(".columns") == live
    assert np.array_equal(cells(page, "figure:has(h3:text('Importance of each'))"), colours)
    page.fill("input[type=number]", "5")
    page.keyboard.press("Tab")
    until(lambda: "regard look" in page.inner_text(".explain-status"), "the answer of the file to another request")
