"""The walkthrough shows the numbers of the trace, and samples the next token as `regard generate` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch
from onscreen import SENTENCE, Site, Visit, announced, holds, table, until

import regard
from regard.decoding.sampling import filter_tokens, fold, keys, uniforms
from regard.recipes.schema import DecodingSettings
from regard.text.display import visible

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

PROMPT = "Once upon a time"
SETTINGS = (
    DecodingSettings(method="sample"),
    DecodingSettings(method="sample", temperature=0.35),
    DecodingSettings(method="sample", temperature=2.5, top_k=7),
    DecodingSettings(method="sample", top_p=0.6),
    DecodingSettings(method="sample", temperature=1.3, top_k=20, top_p=0.45),
)


def _fields(page: Page) -> dict[str, str]:
    """Return the fields of the address."""
    return {name: values[0] for name, values in parse_qs(page.evaluate("location.hash.slice(1)")).items()}


def _shares(logits: torch.Tensor, settings: DecodingSettings, forbidden: list[int]) -> dict[int, float]:
    """Return the library's sampling distribution: a probability for each token that is kept."""
    free = logits.clone()
    free[forbidden] = -torch.inf
    share, order = filter_tokens(free.double().log_softmax(-1)[None, None], settings)
    share = share / share.sum()
    return {int(token): float(p) for token, p in zip(order[0, 0], share[0, 0], strict=True) if p > 0}


def test_temperature_top_k_and_top_p_equal_the_library_s(visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text=PROMPT)
    logits = torch.randn(200, generator=torch.Generator().manual_seed(0)) * 3
    forbidden = [0, 3, int(logits.argmax())]
    ask = """async ([logits, settings, forbidden]) => {
        const { keptTokens } = await import("/page/js/sampling.js");
        return keptTokens(logits, settings, forbidden).map(({ id, p }) => [id, p]);
    }"""
    for settings in SETTINGS:
        named = {"temperature": settings.temperature, "topK": settings.top_k, "topP": settings.top_p}
        actual = dict(page.evaluate(ask, [logits.tolist(), named, forbidden]))
        assert {int(token): p for token, p in actual.items()} == pytest.approx(_shares(logits, settings, forbidden))


def test_the_random_numbers_of_sampling_equal_the_library_s(visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text=PROMPT)
    ask = """async ([seeds, steps]) => {
        const { drawnNumber } = await import("/page/js/sampling.js");
        return seeds.map((seed) => steps.map((step) => drawnNumber(seed, step)));
    }"""
    seeds, steps = [0, 1, 12345], [0, 1, 2, 77]
    key = [keys(seed, [fold(0, 0, 0)], 1) for seed in seeds]
    assert page.evaluate(ask, [seeds, steps]) == [[float(uniforms(one, step)) for step in steps] for one in key]


def test_the_bars_show_the_model_s_probabilities_under_the_settings(site: Site, visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text=PROMPT, stage="choose", temperature=1.5, topk=6)
    trace = regard.load(site.runs["tiny-gpt"]).trace(PROMPT)
    row = next(index for index, token in enumerate(trace.elements("target")) if not token["given"])
    logits = torch.from_numpy(trace.array("output.logits")[row])
    settings = DecodingSettings(method="sample", temperature=1.5, top_k=6)
    expected = _shares(logits, settings, trace.header["output"]["forbidden"])
    shown = page.eval_on_selector_all(".bar-line", "lines => lines.map((line) => Number(line.dataset.value))")
    top = [expected.get(token["id"], 0.0) for token in trace.header["output"]["top"][row]]
    assert shown[: len(top)] == pytest.approx(top, abs=1e-6)
    assert sum(shown) == pytest.approx(1.0)


def test_sampling_token_by_token_equals_regard_generate(site: Site, visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text=PROMPT, stage="choose", temperature=1.2, topk=20, draw=5)
    model = regard.load(site.runs["tiny-gpt"])
    written = model.generate(PROMPT, seed=5, tokens=4, temperature=1.2, top_k=20, top_p=1.0)
    drawn: list[int] = []
    for count in range(1, 5):
        drawn.append(int(page.get_attribute("[data-drawn]", "data-drawn") or -1))
        before = page.text_content(".walk-panel .walk-text")
        page.click("[data-act=draw]")
        until(lambda before=before: page.text_content(".walk-panel .walk-text") != before, f"token {count}")
    assert tuple(drawn) == written.hypotheses[0].tokens
    text, ids = page.text_content(".walk-panel .walk-text"), _fields(page)["continuation"]
    page.reload()  # the address holds the state of the walkthrough
    page.wait_for_selector("[data-drawn]")
    assert (page.text_content(".walk-panel .walk-text"), _fields(page)["continuation"]) == (text, ids)
    page.get_by_role("button", name="Start over").click()
    until(lambda: "continuation" not in _fields(page), "the beginning")


def test_all_logits_are_listed_with_their_tokens(site: Site, visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text=PROMPT, stage="logits", token=1)
    trace = regard.load(site.runs["tiny-gpt"]).trace(PROMPT)
    logits = trace.array("output.logits")[1]
    page.get_by_role("button", name=f"All {len(logits)} logits").click()
    page.wait_for_selector("dialog table")
    facts = (page.text_content("dialog p.num") or "").replace("−", "-")
    assert facts.startswith(f"{len(logits)} numbers, from {logits.min():.3f} to {logits.max():.3f}")
    assert f"mean {logits.mean():.3f}" in facts
    rows, order = table(page, "dialog")[1:], np.argsort(-logits, kind="stable")
    assert [int(row[1]) for row in rows] == order[: len(rows)].tolist()
    assert [row[0].replace("␣", " ").strip() for row in rows[:5]] == [
        visible(trace.vocabulary[token]).replace("␣", " ").strip() for token in order[:5]
    ]
    assert "feature" not in page.inner_text("dialog").lower()
    page.keyboard.press("Escape")
    until(lambda: page.query_selector("dialog") is None, "the dialog to close")


def test_a_sampled_token_is_named_even_if_it_is_not_listed(site: Site, visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text=PROMPT, stage="choose", temperature=3)
    trace = regard.load(site.runs["tiny-gpt"]).trace(PROMPT)
    for seed in range(1, 20):
        drawn = int(page.get_attribute("[data-drawn]", "data-drawn") or -1)
        listed = page.eval_on_selector_all(".bar-line", "all => all.map((line) => line.dataset.label)")
        word = visible(trace.vocabulary[drawn])
        assert (page.text_content("[data-drawn]") or "").endswith(f"selects “{word}”")
        if word not in listed:
            return
        page = visit("walk", run="tiny-gpt", text=PROMPT, stage="choose", temperature=3, draw=seed)
    raise AssertionError("every sample was one of the listed tokens")


def test_the_next_stage_opens_at_its_top_and_back_returns(visit: Visit) -> None:
    page = visit("walk", run="tiny-transformer", stage="decoder.0")
    page.get_by_role("button", name="Next").scroll_into_view_if_needed()
    page.get_by_role("button", name="Next").click()
    until(lambda: "Decoder block 2" in (page.text_content(".walk-title") or ""), "the next stage")
    holds(page, "document.querySelector('.walk-title').getBoundingClientRect().top >= 0")
    holds(page, "document.querySelector('.walk-title').getBoundingClientRect().top < innerHeight / 2")
    page.go_back()
    until(lambda: "Decoder block 1" in (page.text_content(".walk-title") or ""), "the stage before")


def test_the_selected_token_has_one_name_in_all_attentions_of_a_block(site: Site, visit: Visit) -> None:
    page = visit("walk", run="tiny-transformer", stage="decoder.0", token=2)
    selected = page.text_content(".selection [aria-pressed=true]") or "?"
    notes = page.eval_on_selector_all(".addition figcaption p", "all => all.map((note) => note.textContent)")
    assert len(notes) == 2 and all(note.startswith(selected) for note in notes), notes
    written = regard.load(site.runs["tiny-transformer"]).trace(SENTENCE).elements("target")[2]["label"]
    assert f"predicting {written}," in notes[1]
    marked = page.eval_on_selector_all(".map-label.lit", "all => all.map((label) => label.textContent)")
    assert marked == [selected, selected]


def test_every_part_of_a_block_shows_what_it_adds_to_the_residual_stream(visit: Visit) -> None:
    page = visit("walk", run="tiny-transformer", stage="decoder.0")
    assert page.locator(".addition h4").all_text_contents() == ["Self-attention", "Cross-attention", "Feed-forward"]
    assert page.locator(".addition .sum-line").count() == 3


def test_tokens_and_ids_equal_the_tokenizer_s(site: Site, visit: Visit) -> None:
    page = visit("walk", run="tiny-transformer", stage="tokens", table=1)
    model = regard.load(site.runs["tiny-transformer"])
    tokens = model.trace(SENTENCE).elements("source")
    assert [row[2] for row in table(page)[1:]] == [str(token["id"]) for token in tokens]


def test_clicking_a_tensor_shows_its_numbers(site: Site, visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text=PROMPT, stage="decoder.0", table=1)
    page.get_by_role("button", name="stream after").first.click()
    rows = [[number.replace("−", "-") for number in row[1:]] for row in table(page, "dialog")[1:]]
    exact = regard.load(site.runs["tiny-gpt"]).trace(PROMPT).array("decoder.0.self_attn.stream")
    assert np.array(rows).astype(float) == pytest.approx(exact, abs=2e-3)
    page.keyboard.press("Escape")
    until(lambda: page.query_selector("dialog") is None, "the dialog to close")  # its `close` event is a queued task
    assert "tensor" in (page.evaluate("document.activeElement.className") or "")


def test_the_stages_can_be_navigated_by_keyboard(visit: Visit) -> None:
    page = visit("walk", run="tiny-transformer")
    page.get_by_role("tab", name="Text").focus()
    seen = []
    for _ in range(page.locator("[role=tab]").count()):
        seen.append(page.get_by_role("tab", selected=True).text_content())
        page.keyboard.press("ArrowDown")
        until(lambda: page.get_by_role("tab", selected=True).text_content() != seen[-1], "the next stage")
    assert seen == ["Text", "Tokens and ids", "Source: embedding", "Encoder block 1", "Output: embedding",
                    "Decoder block 1", "Decoder block 2", "Logit lens", "Logits", "Next token"]  # fmt: skip
    until(lambda: "Stage 1 of 10" in announced(page), "the announcement")


def test_the_logit_lens_equals_the_trace_s(site: Site, visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text=PROMPT, stage="lens", token=0, table=1)
    layers = regard.load(site.runs["tiny-gpt"]).trace(PROMPT).layers
    rows = table(page)[1:]
    assert [row[0] for row in rows] == [layer["label"] for layer in layers]
    shares = [float(row[1].rsplit(" ", 2)[1]) / 100 for row in rows]
    assert shares == pytest.approx([layer["top"][0][0]["p"] for layer in layers], abs=6e-4)


@pytest.mark.parametrize("run", ["tiny-additive", "tiny-bert"])
def test_every_stage_of_every_family_is_drawn(run: str, visit: Visit) -> None:
    page = visit("walk", run=run, text=SENTENCE if run == "tiny-additive" else "Once upon a [MASK]")
    for index in range(page.locator("[role=tab]").count()):
        page.locator("[role=tab]").nth(index).click()
        until(lambda index=index: (page.text_content(".walk-title") or "").startswith(f"{index + 1}."), "the stage")
        assert page.query_selector(".walk-panel .note[role=alert]") is None


def test_stages_fit_a_phone_and_an_accessibility_checker_finds_nothing_serious(
    visit: Visit, new_page: Callable[..., Page]
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = new_page(width=360, color_scheme="dark")
    for stage in ("tokens", "decoder.0", "lens", "choose"):
        visit("walk", on=page, run="tiny-gpt", text=PROMPT, stage=stage)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        if stage in ("tokens", "lens"):
            continue  # plain text and a plain table
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


def test_a_token_that_is_markup_stays_text(visit: Visit, page: Page) -> None:
    evil = "<img src=x onerror=document.title='owned'>"

    def inject(route: Route) -> None:
        answer = route.fetch()
        header = json.loads(answer.text())
        for token in (
            *header["axes"]["source"]["elements"],
            *header["axes"]["inputs"]["elements"],
            *header["axes"]["target"]["elements"],
        ):
            token.update(piece=evil, label=evil)
        for top in header["output"]["top"]:
            top[0]["text"] = evil
        route.fulfill(response=answer, json=header)

    def inject_layers(route: Route) -> None:
        answer = route.fetch()
        layers = json.loads(answer.text())
        for top in (top for layer in layers for top in layer["top"]):
            top[0]["text"] = evil
        route.fulfill(response=answer, json=layers)

    page.route("**/api/trace", inject)
    page.route("**/api/trace/*/layers", inject_layers)
    for stage in ("decoder.0", "choose", None):
        visit("walk" if stage else "changes", run="tiny-transformer", stage=stage)
        assert evil in (page.text_content("main") or "").replace("␣", " ")
        assert page.query_selector("img") is None and page.title() != "owned"


def test_an_invalid_address_opens_the_first_stage(visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text=PROMPT, continuation="[1,", stage="nowhere", token="x")
    assert page.text_content(".walk-title") == "1. Text"


def test_another_text_restarts_the_walkthrough(visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text=PROMPT, stage="choose", continuation="[300]")
    page.fill("textarea", "A dog")
    until(lambda: "continuation" not in _fields(page), "the beginning")
    until(lambda: page.text_content(".walk-panel .walk-text") == "A dog …", "the new text")
