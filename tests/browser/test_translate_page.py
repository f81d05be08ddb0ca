"""The translation page of `regard serve`, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.server.service import make_runs, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

TEXT = "this cat is very large"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("playwright")
    runs = make_runs(tmp_path_factory.mktemp("runs"))
    with serving({"en-es": runs["en-es"]}) as server:
        yield server.address


@pytest.fixture
def translator(address: str, browser: Browser) -> Iterator[Page]:
    page, errors = browser.new_page(), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    yield page
    page.close()
    assert errors == []


def test_typing_translates_and_hovering_shows_links(translator: Page) -> None:
    translator.fill("#source", TEXT)
    words = translator.locator("#output button")
    words.first.wait_for()
    assert translator.locator("#source-words").inner_text().split() == TEXT.split()
    words.first.hover()
    assert translator.locator("#output .linked").count() == 1
    assert translator.locator("#model option").all_inner_texts() == ["en-es"]
    translator.fill("#source", "")
    words.first.wait_for(state="detached")


def test_a_glossary_and_other_translations(translator: Page) -> None:
    translator.fill("#source", TEXT)
    translator.click("summary")
    translator.fill("#glossary", "cat = gata, gatita\n")
    translator.locator("#output", has_text="gat").wait_for()
    translator.locator("#output button").first.focus()
    translator.keyboard.press("Enter")
    others = translator.locator("#choices button")
    others.first.wait_for()
    chosen = others.first.inner_text()
    others.first.click()
    translator.locator("#choices").wait_for(state="hidden")
    assert translator.locator("#output").inner_text().split() == chosen.split()


def test_other_translations_are_those_of_the_sentence_of_the_word(translator: Page) -> None:
    text = "this cat is very large. the dog sees a house.\nthis cat"
    with translator.expect_response("**/v1/translate") as answered:
        translator.fill("#source", text)
    sentences = answered.value.json()["translations"][0]["sentences"]
    assert [one["source"] for one in sentences] == ["this cat is very large.", "the dog sees a house.", "this cat"]
    words = translator.locator("#output button")
    words.first.wait_for()
    count, second = words.count(), len(sentences[0]["text"].split())
    words.nth(second).click()
    others = translator.locator("#choices button")
    others.first.wait_for()
    chosen = others.first.inner_text()
    others.first.click()
    translator.locator("#choices").wait_for(state="hidden")
    expected = [*sentences[0]["text"].split(), *chosen.split(), *sentences[2]["text"].split()]
    assert translator.locator("#output").inner_text().split() == expected
    after = count + len(chosen.split()) - len(sentences[1]["text"].split())
    assert words.count() in (0, after)  # none if the model goes on after the choice
    if words.count():
        words.last.hover()
        assert translator.locator("#source-words .linked").count() >= 1


def test_models_that_do_not_translate_are_not_offered(translator: Page) -> None:
    listed = [{"id": "stories", "task": "generate"}, {"id": "en-es", "task": "translate"}]
    translator.route("**/v1/models", lambda route: route.fulfill(json={"data": listed}))
    translator.reload()
    translator.locator("#model option").first.wait_for(state="attached")
    assert translator.locator("#model option").all_inner_texts() == ["en-es"]


def test_a_long_subtitle_file_is_sent_in_parts(translator: Page, tmp_path: Path) -> None:
    file = tmp_path / "long.srt"
    file.write_text("\n".join(f"{n}\n00:00:01,000 --> 00:00:02,000\ndog\n" for n in range(1, 302)), "utf-8")
    sizes: list[int] = []

    def answer(route: Route) -> None:
        sizes.append(len(route.request.post_data_json["q"]))
        route.fulfill(json={"translations": [{"text": "perro"}] * sizes[-1]})

    translator.route("**/v1/translate", answer)
    translator.set_input_files("#file", file)
    translator.locator("#output", has_text="301").wait_for()
    assert sizes == [256, 45]
    assert translator.locator("#output").inner_text().count("perro") == 301


def test_files_keep_tags_and_times(translator: Page, tmp_path: Path) -> None:
    file = tmp_path / "a.srt"
    file.write_text(f"1\n00:00:01,000 --> 00:00:02,000\n{TEXT}\n\n2\n00:00:03,000 --> 00:00:04,000\nthe dog\n", "utf-8")
    translator.set_input_files("#file", file)
    translator.locator("#output", has_text="00:00:03,000 --> 00:00:04,000").wait_for()
    lines = translator.locator("#output").inner_text().split("\n")
    assert lines[:2] == ["1", "00:00:01,000 --> 00:00:02,000"] and TEXT not in lines
    html = tmp_path / "a.html"
    html.write_text(f"<p>{TEXT} <script>alert(1)</script></p>", "utf-8")
    translator.set_input_files("#file", html)
    translator.locator("#output", has_text="<script>alert(1)</script></p>").wait_for()  # as text
    with translator.expect_download() as download:
        translator.click("#save")
    assert download.value.suggested_filename == "a.translated.html"
