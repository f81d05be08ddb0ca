"""The positions view shows the results of `regard.interpret.position_study`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from onscreen import Visit, cells, export, table, until

from regard.interpret.position_study import study
from regard.viz.colours import signed_rgb

if TYPE_CHECKING:
    from playwright.sync_api import Page

KINDS = ("sinusoidal", "learned", "index", "fraction")


def criteria(page: Page) -> dict[str, tuple[bool, float]]:
    values = page.eval_on_selector_all(
        ".criterion",
        "all => all.map((one) => [one.dataset.criterion, one.classList.contains('holds'), "
        "Number(one.querySelector('[data-value]').dataset.value)])",
    )
    return {name: (holds, value) for name, holds, value in values}


@pytest.mark.parametrize("kind", KINDS)
def test_the_four_criteria_equal_the_library_s(visit: Visit, kind: str) -> None:
    page = visit("positions", positions=kind, length=20, features=16)
    expected = study(kind, 20, 16).criteria
    assert criteria(page) == {one.name: (one.holds, pytest.approx(one.value)) for one in expected}


def test_all_kinds_are_in_one_table(visit: Visit) -> None:
    page = visit("positions", length=20, features=16)
    expected = [["✓ yes" if one.holds else "✗ no" for one in study(kind, 20, 16).criteria] for kind in KINDS]
    assert [row[1:] for row in table(page)[1:]] == expected


def test_the_vectors_have_their_colours_and_the_curve_its_numbers(visit: Visit) -> None:
    page = visit("positions", length=12, features=8, base=2)
    expected_study = study("sinusoidal", 12, 8, 100.0)
    extent = float(np.abs(expected_study.vectors).max())
    assert cells(page).tolist() == [
        [list(signed_rgb(float(x) / extent)) for x in row] for row in expected_study.vectors
    ]
    page.get_by_text("Tables", exact=True).click()
    page.wait_for_selector("figure .table-box")
    rows = table(page, "figure:has(h3:text('Dot product'))")
    assert [float(row[1].replace("−", "-")) for row in rows[1:]] == pytest.approx(expected_study.dot.tolist(), rel=1e-3)


def test_another_kind_is_chosen_with_the_arrow_keys(visit: Visit) -> None:
    page = visit("positions", length=8, features=8)
    page.get_by_role("radio", name="Sinusoidal").focus()
    page.keyboard.press("ArrowRight")
    until(lambda: criteria(page)["deterministic"][0] is False, "learned positions")
    assert "positions=learned" in page.evaluate("location.hash")


def test_the_saved_page_contains_the_positions(visit: Visit, page: Page, tmp_path: Path) -> None:
    visit("positions", positions="fraction", length=20, features=16)
    live, colours = criteria(page), cells(page)
    page.goto(export(page, "HTML", tmp_path).as_uri())
    page.wait_for_selector("main[data-ready=positions]")
    assert criteria(page) == live
    assert np.array_equal(cells(page), colours)
