"""Common parts of all views: input and output, address, keyboard, colours, accessibility."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import pytest
from onscreen import SENTENCE, VIEWS, Site, Visit, announced, export, table, until

import regard
from regard.viz import colours
from regard.viz.explanations import signed_rgb

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

EVIL = "<img src=x onerror=document.title='owned'>"
MAX_BYTES = 300_000
COLOUR_RULES = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}


def _fields(page: Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(page.evaluate("location.hash.slice(1)")).items()}


def test_typing_a_sentence_gives_the_translation(visit: Visit, site: Site) -> None:
    page = visit("align")
    model = regard.load(site.runs["tiny-transformer"])
    assert page.text_content(".output") == (model.translate(SENTENCE).text or "(empty)")
    other = "the dog sees a house"
    page.fill("textarea", other)
    until(lambda: _fields(page).get("text") == other, "the new text in the address")
    until(lambda: page.text_content(".output") == (model.translate(other).text or "(empty)"), "the new translation")


def test_the_token_is_removed_from_the_address_after_opening(visit: Visit, page: Page, site: Site) -> None:
    assert "?token=" in site.address
    visit("heads", head=1)
    assert page.evaluate("location.search") == "" and _fields(page) == {"view": "heads", "head": "1"}
    page.reload()  # the cookie is enough
    page.wait_for_selector("main[data-ready=heads] .thumb")


def test_a_link_to_a_missing_snapshot_shows_a_message(visit: Visit, page: Page, troubles: list[str]) -> None:
    visit("align", step=11, afresh=True)
    message = page.text_content("main .callout") or ""
    assert "tiny-transformer has no snapshot of step 11; there are 10, 20" in message
    assert page.locator(".field-step select option:checked").text_content() == "step 11 (missing)"
    until(lambda: bool(troubles), "the browser's report")
    assert all("404" in trouble for trouble in troubles)
    troubles.clear()


def test_back_returns_to_the_previous_view_and_sentence(visit: Visit, page: Page) -> None:
    visit("align")
    page.click("nav.views >> text=Positions")
    page.wait_for_selector("main[data-ready=positions]")
    for typed in ("the dog", "the dog sees"):  # one history entry, though two requests are sent
        page.fill("textarea", typed)
        until(lambda typed=typed: _fields(page).get("text") == typed, "the new text")
    page.go_back()
    until(lambda: page.input_value("textarea") == SENTENCE, "the sentence before")
    assert _fields(page)["view"] == "positions"
    page.go_back()
    page.wait_for_selector("main[data-ready=align]")


def test_saved_pictures_have_captions(visit: Visit, page: Page, tmp_path: Path) -> None:
    visit("align", layer=1, head=2, step=10)
    output = page.text_content(".output") or ""
    svg = export(page, "SVG", tmp_path).read_text(encoding="utf-8")
    words = ("Model: tiny-transformer (transformer), weights: step 10", "layer 2, head 3", f"Text: “{SENTENCE}”")
    for part in words:
        assert part in svg, part
    assert ("Output: “" in svg) == (output != "(empty)")
    png = export(page, "PNG", tmp_path).read_bytes()
    height = float(re.search(r'height="([\d.]+)"', svg)[1])  # type: ignore[index]
    assert int.from_bytes(png[20:24], "big") == pytest.approx(2 * height, abs=2), "the same picture, caption and all"
    page.goto(export(page, "HTML", tmp_path).as_uri())
    page.wait_for_selector("main[data-ready=align]")
    caption = page.text_content(".caption") or ""
    assert words[0] in caption and words[2] in caption
    assert "layer 2, head 3" in (page.text_content("figure h3") or "")


def test_masked_cells_are_hatched_and_gold_differs_from_the_cursor(visit: Visit, page: Page, tmp_path: Path) -> None:
    visit("heads", run="tiny-gpt", text="Once upon a time", open="decoder.0.self_attn:0")
    count = int(page.get_attribute("main figure canvas", "data-rows") or 0)
    assert page.locator("figure .legend-masked").first.is_visible()
    svg = export(page, "SVG", tmp_path).read_text(encoding="utf-8")
    opened = svg[: svg.index("12 heads")] if "12 heads" in svg else svg
    assert opened.count('fill="url(#hatch)"') >= count * (count - 1) // 2 and ">masked<" in opened
    page.focus(".map-cell")
    page.keyboard.press("End")
    until(lambda: announced(page).endswith(": masked"), "the announcement")
    visit("heads", run="tiny-gpt", text="Once upon a time", open="decoder.0.self_attn:0", table=1)
    assert table(page)[1][2] == "masked" and table(page)[1][1] == "1.000"
    visit("heads", open="decoder.0.cross_attn:0")
    assert not page.locator(".beside .legend-masked").first.is_visible()
    colours = page.evaluate("""() => {
        const of = (name) => getComputedStyle(document.querySelector(name));
        return [of(".legend-gold i").borderTopStyle, of(".legend-gold i").borderTopColor, of(".map-ghost").boxShadow];
    }""")
    assert colours[0] == "dashed" and colours[1] not in colours[2]


def test_a_truncated_input_is_reported(visit: Visit) -> None:
    page = visit("walk", run="tiny-gpt", text="Once upon a time there was a cat. " * 100)
    assert "input truncated" in (page.text_content(".facts") or "")


def test_an_error_of_the_server_is_shown(visit: Visit, page: Page, troubles: list[str]) -> None:
    visit("align")
    page.route("**/api/trace", lambda route: route.fulfill(status=400, json={"error": "no such thing"}))
    page.fill("textarea", "something else")
    page.wait_for_selector(".answer .callout")
    assert page.text_content(".answer .callout") == "no such thing"
    until(lambda: bool(troubles), "the browser's report of the refusal")
    page.click("nav.views >> text=All heads")  # shows the last valid text
    page.wait_for_selector("main[data-ready=heads] .thumb")
    until(lambda: len(troubles) == 2, "its report of the second refusal")
    assert all("400" in trouble for trouble in troubles)
    troubles.clear()


@pytest.mark.parametrize("view", VIEWS)
def test_an_accessibility_checker_finds_nothing_serious(view: str, visit: Visit) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = visit(view)
    for theme, rules in (("light", {}), ("dark", {"runOnly": COLOUR_RULES})):  # the dark theme differs only in colours
        if theme == "dark":
            page.click("#theme")
        assert page.get_attribute("html", "data-theme") == theme
        found = Axe().run(page, options={"resultTypes": ["violations"]} | rules).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        messages = [
            f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes'][:3]]}" for one in serious
        ]
        assert not messages, f"{theme}\n" + "\n".join(messages)


def test_no_view_scrolls_sideways_on_a_phone(visit: Visit, new_page: Callable[..., Page]) -> None:
    page = visit("align", on=new_page(width=360))
    for view in VIEWS:
        _open_view(page, view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view


def _open_view(page: Page, view: str) -> None:
    """Open another view without reloading the page."""
    page.evaluate("view => location.hash = location.hash.replace(/view=\\w+/, `view=${view}`)", view)
    page.wait_for_selector(f"main[data-ready={view}]")


def test_the_system_sets_the_theme_until_the_user_chooses(visit: Visit, new_page: Callable[..., Page]) -> None:
    page = visit("align", on=new_page(color_scheme="dark"))
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.get_attribute("html", "data-theme") == "dark"
    dark = page.evaluate(ground)
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "light" and page.evaluate(ground) != dark
    assert _fields(page)["theme"] == "light"


def test_colours_of_the_page_equal_the_library_s(visit: Visit) -> None:
    page = visit("align")
    steps = [i / 1000 for i in range(1001)]
    read = "async (steps) => { const made = await import('/page/js/colours.js'); return steps.map((w) => %s); }"
    weights = page.evaluate(read % "[made.rgb(w), made.ink(w)]", steps)
    assert weights == [[list(colours.rgb(w)), colours.ink(w)] for w in steps]
    assert page.evaluate(read % "made.signedRgb(2 * w - 1)", steps) == [list(signed_rgb(2 * w - 1)) for w in steps]
    bytes_read = page.evaluate(read % "made.pixelColours('weight')(w / 255)", list(range(256)))
    assert [(code & 255, code >> 8 & 255, code >> 16 & 255) for code in bytes_read] == [
        colours.rgb(byte / 255) for byte in range(256)
    ]


def test_controls_can_be_skipped_or_reached_by_keyboard(visit: Visit, page: Page) -> None:
    visit("align")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert _fields(page)["view"] == "align", "the skip link left the address as it was"

    visit("align", afresh=True)
    focused = []
    for _ in range(40):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.getAttribute('role') ?? document.activeElement.tagName"))
        seen = page.evaluate(
            "(() => { const s = getComputedStyle(document.activeElement.matches('.segments input') ? "
            "document.activeElement.nextSibling : document.activeElement); "
            "return s.outlineStyle !== 'none' || s.boxShadow !== 'none'; })()"
        )
        assert seen, f"focus on {focused[-1]} can be seen"
        if focused[-1] == "gridcell":
            break
    assert focused[-1] == "gridcell" and {"TEXTAREA", "SELECT", "SUMMARY", "A", "BUTTON"} <= set(focused)


def test_views_are_links_that_keep_the_text_and_back_works(visit: Visit) -> None:
    page = visit("align", text="the dog sees a house", layer=0)
    page.click("nav >> text=All heads")
    page.wait_for_selector("main[data-ready=heads]")
    assert _fields(page)["text"] == "the dog sees a house" and page.title() == "All heads · regard"
    assert page.get_attribute("nav a[aria-current]", "href") == page.evaluate("location.hash")
    page.go_back()
    page.wait_for_selector("main[data-ready=align]")
    assert _fields(page)["layer"] == "0"


def test_a_model_without_alignment_shows_a_message(visit: Visit) -> None:
    page = visit("align", run="tiny-gpt")
    assert "no alignment" in (page.text_content("main .callout") or "")


@pytest.mark.parametrize("run", ["tiny-transformer", "tiny-additive", "tiny-gpt", "tiny-bert"])
def test_every_family_opens_in_every_view(run: str, visit: Visit, site: Site) -> None:
    page = visit("heads", run=run, text="the [MASK] cat" if run == "tiny-bert" else "the cat")
    for view in VIEWS[1:]:
        _open_view(page, view)
        assert page.query_selector("main [role=alert]") is None, page.text_content("main [role=alert]")


def _with_tokens(route: Route, *labels: str) -> None:
    """Answer a trace request with other labels for the first source tokens."""
    answer = route.fetch()
    header = json.loads(answer.text())
    for token, label in zip(header["axes"]["source"]["elements"], labels, strict=False):
        token.update(piece=f" {label}", label=label)
    header["text"]["target"] = labels[0]
    route.fulfill(response=answer, json=header)


def test_a_token_that_is_markup_stays_text(visit: Visit, page: Page) -> None:
    page.route("**/api/trace", lambda route: _with_tokens(route, EVIL))
    for view in ("align", "heads", "compare"):
        visit(view, text=EVIL, open="decoder.0.cross_attn:0")
        assert page.text_content(".map-head bdi") == EVIL
        assert page.query_selector("img") is None and page.title() != "owned"
    assert page.text_content(".output") == EVIL
    visit("align", table=1)
    assert page.text_content("thead th:nth-child(2)") == EVIL and page.query_selector("img") is None


def test_words_have_their_own_text_direction(visit: Visit, page: Page) -> None:
    page.route("**/api/trace", lambda route: _with_tokens(route, "שלום", "猫", "مرحبا"))
    visit("align")
    directions = page.eval_on_selector_all(".map-head bdi", "all => all.map((one) => [one.textContent, one.dir])")
    assert directions[:3] == [["שלום", "rtl"], ["猫", "ltr"], ["مرحبا", "rtl"]]
    assert page.get_attribute(".output", "dir") == "rtl"
    assert page.get_attribute(".strip", "dir") == "rtl", "a sentence that begins in Hebrew is right-to-left"
    page.focus(".map-cell")
    until(lambda: "\u2068שלום\u2069" in announced(page), "the announcement, its Hebrew set apart")


def test_a_long_sentence_of_a_saved_page_does_not_cover_the_arrow_of_its_list(
    visit: Visit, page: Page, tmp_path: Path
) -> None:
    visit("align", text=" ".join([SENTENCE] * 4))
    page.goto(export(page, "HTML", tmp_path).as_uri())
    page.wait_for_selector("main[data-ready=align]")
    box = page.locator("select.sentence").bounding_box()
    assert box is not None
    arrow = {"x": box["x"] + box["width"] - 18, "y": box["y"], "width": 18, "height": box["height"]}
    drawn = page.screenshot(clip=arrow)  # type: ignore[arg-type]
    page.evaluate("document.querySelector('select.sentence option').textContent = 'short'")
    assert page.screenshot(clip=arrow) == drawn  # type: ignore[arg-type]


def test_the_page_states_that_attention_is_not_an_explanation(visit: Visit) -> None:
    page = visit("heads")
    assert "do not by themselves explain" in (page.text_content("#foot") or "")
    page.click("#foot >> text=Explain")
    page.wait_for_selector("main[data-ready=explain]")


def test_the_page_s_own_files_are_small() -> None:
    folders, total = [resources.files("regard.viz") / "page"], 0
    while folders:
        for entry in folders.pop().iterdir():
            if entry.is_dir():
                folders.append(entry)
            else:
                total += len(entry.read_bytes())
    assert total < MAX_BYTES
