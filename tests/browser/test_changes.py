"""Interventions on the page give what the same changes give in Python."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest
from onscreen import SENTENCE, Site, Visit, announced, until

import regard
from regard.interpret.trace import Trace

if TYPE_CHECKING:
    from playwright.sync_api import Page


def changes_in(page: Page) -> list[dict[str, Any]]:
    """Return the changes in the address."""
    fields = parse_qs(page.evaluate("location.hash.slice(1)"))
    return json.loads(fields["changes"][0]) if "changes" in fields else []


def forced_probabilities(page: Page) -> list[float]:
    """Return the probabilities that the bars show, for the generated tokens."""
    return page.eval_on_selector_all(".bar-line", "lines => lines.map((line) => Number(line.dataset.value))")


def shown(page: Page, which: str) -> str:
    return page.text_content(f"[data-output={which}] .output-text") or ""


def assert_as_in_python(page: Page, trace: Trace) -> None:
    target, header = trace.header["before"]["tokens"], trace.header
    written = [index for index, token in enumerate(target) if not token["given"]]
    until(lambda: page.query_selector("[data-output=changed]") is not None, "the changed output")
    until(
        lambda: forced_probabilities(page) == pytest.approx([header["held"]["p"][i] for i in written]),
        "the held probabilities",
    )
    free = header["free"]["text"] if header["forced"] else header["text"]["target"]
    assert shown(page, "changed").strip() == (free.strip() or "∅")
    assert shown(page, "original").strip() == (header["before"]["text"].strip() or "∅")


def test_an_ablated_head_gives_the_same_result_as_in_python(site: Site, visit: Visit) -> None:
    page = visit("changes", run="tiny-transformer")
    page.get_by_role("button", name="cross-attention, layer 1, head 2 ablated").click()
    change = {"kind": "head", "attention": "decoder.0.cross_attn", "head": 1}
    assert_as_in_python(page, regard.load(site.runs["tiny-transformer"]).trace(SENTENCE, changes=[change]))
    assert changes_in(page) == [change]
    until(lambda: "with the intervention" in announced(page), "the announcement")


def test_masking_a_word_masks_all_its_tokens_and_a_link_restores_it(site: Site, visit: Visit) -> None:
    page = visit("changes", run="tiny-transformer")
    page.get_by_role("button", name="large masked").click()
    model = regard.load(site.runs["tiny-transformer"])
    tokens = model.trace(SENTENCE).elements("source")
    word = [index for index, token in enumerate(tokens) if token["group"] == 4]
    changes = [{"kind": "hide", "side": "source", "element": token} for token in word]
    expected = model.trace(SENTENCE, changes=changes)
    assert_as_in_python(page, expected)
    assert changes_in(page) == changes
    page.reload()
    assert_as_in_python(page, expected)
    assert page.get_by_role("button", name="large masked").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="large masked").click()
    until(lambda: page.query_selector("[data-output=changed]") is None, "the original alone")
    assert changes_in(page) == []


def test_a_replaced_row_gives_the_same_result_as_in_python(site: Site, visit: Visit) -> None:
    page = visit("changes", run="tiny-transformer", row="decoder.1.cross_attn:3:0")
    page.get_by_label("All weight on").select_option(index=2)
    model = regard.load(site.runs["tiny-transformer"])
    keys = len(model.trace(SENTENCE).elements("source"))
    weights = [float(k == 1) for k in range(keys)]
    change = {"kind": "row", "attention": "decoder.1.cross_attn", "head": 3, "query": 0, "weights": weights}
    assert_as_in_python(page, model.trace(SENTENCE, changes=[change]))
    page.get_by_role("button", name="Reset").click()
    until(lambda: page.query_selector("[data-output=changed]") is None, "the original alone")


def test_a_forced_output_is_labelled_and_shown_beside_the_free_one(site: Site, visit: Visit) -> None:
    page = visit("changes", run="tiny-transformer", row="decoder.0.cross_attn:all:1")
    page.get_by_role("button", name="large masked").click()
    page.wait_for_selector("[data-output=changed]")
    assert page.query_selector("[data-output=forced]") is None
    page.get_by_role("button", name="Uniform").click()
    forced = page.locator("[data-output=forced]")
    forced.wait_for()
    expected = regard.load(site.runs["tiny-transformer"]).trace(SENTENCE, changes=changes_in(page))
    assert_as_in_python(page, expected)
    assert shown(page, "forced").strip() == shown(page, "original").strip()
    assert "original output forced" in forced.inner_text() and "same output" not in forced.inner_text()
    same = expected.header["free"]["text"] == expected.header["before"]["text"]
    remark = "same output" if same else "different output"
    assert remark in page.locator("[data-output=changed]").inner_text()


def test_a_replaced_row_of_a_gpt_respects_the_mask(visit: Visit) -> None:
    page = visit("changes", run="tiny-gpt", text="Once upon a time", row="decoder.0.self_attn:0:2")
    assert page.locator(".row-sliders input").count() == 3
    assert page.get_by_label("All weight on").locator("option").count() == 4
    assert "tokens are masked" in page.inner_text("section:has(.row-sliders)")
    page.get_by_role("button", name="Uniform").click()
    until(lambda: bool(changes_in(page)), "the change")
    (change,) = changes_in(page)
    assert change["weights"][:3] == [0.333] * 3 and not any(change["weights"][3:])


def test_a_word_of_a_prompt_can_be_masked_too(site: Site, visit: Visit) -> None:
    page = visit("changes", run="tiny-gpt", text="Once upon a time")
    page.get_by_role("button", name="Once masked").click()
    model = regard.load(site.runs["tiny-gpt"])
    tokens = model.trace("Once upon a time").elements("inputs")
    word = [index for index, token in enumerate(tokens) if token["group"] == 0]
    changes = [{"kind": "hide", "side": "inputs", "element": token} for token in word]
    assert_as_in_python(page, model.trace("Once upon a time", changes=changes))
