"""Weights that are replaced while a page is open: the page reloads, and never mixes old and new ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from onscreen import SENTENCE, Visit, announced, export, table, until
from tinyruns import TINY, served

from regard import tensor_io
from regard.api import Model
from regard.run_dir import RunDir
from regard.viz.explanations import number
from tiny_runs import make

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

CHANGE = {"kind": "head", "attention": "decoder.0.cross_attn", "head": 1}
ABLATED = "cross-attention, layer 1, head 2 ablated"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make(tmp_path / "run", TINY["tiny-transformer"])


@pytest.fixture
def address(run: RunDir) -> Iterator[str]:
    """Start a separate server; tests request it first, so that the page is closed before the server."""
    with served([run.path], SENTENCE) as address:
        yield address


def _replace_weights(run: RunDir) -> None:
    tensors, _ = tensor_io.load(run.best)
    tensor_io.save(run.best, {name: 1.5 * one for name, one in tensors.items()}, {"step": 30})


def _assert_reloaded(page: Page, run: RunDir, troubles: list[str]) -> None:
    """Wait for the notice; the page shows the weights on disk, and the refusal was the only error."""
    page.wait_for_selector(".answer .note")
    assert "weights on disk have changed" in (page.text_content(".answer .note") or "")
    assert "step 30" in (page.text_content(".facts") or "")
    assert page.text_content(".output") == (Model(run, "cpu").translate(SENTENCE).text or "(empty)")
    until(lambda: bool(troubles), "the browser's report of the refusal")
    assert all("409" in trouble for trouble in troubles)
    troubles.clear()


def test_an_intervention_uses_the_weights_that_the_page_names(
    address: str, run: RunDir, visit: Visit, page: Page, troubles: list[str]
) -> None:
    visit("changes", at=address)
    assert "step 20" in (page.text_content(".facts") or "")
    _replace_weights(run)
    page.get_by_role("button", name=ABLATED).click()
    _assert_reloaded(page, run, troubles)
    page.wait_for_selector("[data-output=changed]")
    expected = Model(run, "cpu").trace(SENTENCE, changes=[CHANGE]).header
    for which, text in (("original", expected["before"]["text"]), ("changed", expected["text"]["target"])):
        assert (page.text_content(f"[data-output={which}] .output-text") or "").strip() == (text.strip() or "∅")
    until(lambda: "weights on disk have changed" in announced(page), "the announcement")
    page.fill("textarea", "the dog sees a house")
    until(lambda: page.query_selector(".answer .note") is None, "the notice to disappear for another text")


def test_an_explanation_uses_the_weights_that_the_page_names(
    address: str, run: RunDir, visit: Visit, page: Page, troubles: list[str]
) -> None:
    visit("align", at=address, masks=64, table=1)
    _replace_weights(run)
    page.click("nav.views >> text=Explain")
    _assert_reloaded(page, run, troubles)
    page.wait_for_selector("figure:has(h3:text('Deletion'))")
    expected = Model(run, "cpu").explain(SENTENCE, masks=64)
    overall = table(page, "figure:has(h3:text('Importance for the whole'))")[1:]
    assert [row[1] for row in overall] == [number(value) for value in expected.overall]


def test_a_response_with_other_weights_is_requested_again(visit: Visit, page: Page) -> None:
    visit("changes", run="tiny-transformer")
    others = ["of another file"]

    def crossed(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | ({"weights": others.pop()} if others else {}))

    page.route("**/api/trace", crossed)
    page.get_by_role("button", name=ABLATED).click()
    page.wait_for_selector(".answer .note")
    page.wait_for_selector("[data-output=changed]")


def test_a_reloaded_page_and_a_saved_one_have_the_new_weights(
    address: str, run: RunDir, visit: Visit, page: Page, troubles: list[str], tmp_path: Path
) -> None:
    visit("align", at=address)
    _replace_weights(run)
    page.click(".menu summary")
    page.click(".menu-list >> text=HTML")  # the file would have the new weights, and the page shows the old ones
    _assert_reloaded(page, run, troubles)
    assert page.query_selector("main [role=alert]") is None
    page.wait_for_selector("main[data-ready=align]")
    page.goto(export(page, "HTML", tmp_path).as_uri())
    page.wait_for_selector("main[data-ready=align]")
    assert "step 30" in (page.text_content(".facts") or "")
    visit("align", at=address, afresh=True)
    assert "step 30" in (page.text_content(".facts") or "") and page.query_selector(".answer .note") is None
