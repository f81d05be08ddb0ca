"""All heads: every map with its numbers, opening one of them, and long inputs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from onscreen import COPIED, SENTENCE, Site, Visit, announced, cells, holds, slowness, table, until
from tinyruns import served

import regard
from regard.viz import colours
from tiny_runs import make

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from regard.interpret.trace import Trace

TOKENS, LAYERS, HEADS = 512, 12, 12
SECONDS = 4.0  # the aim is 2 s on an idle machine; a busy one may take twice as long,
TRIES = 3  # and the fastest of a few attempts counts


@pytest.fixture(scope="module")
def trace(site: Site) -> Trace:
    return regard.load(site.runs["tiny-transformer"]).trace(SENTENCE)


def _thumb(page: Page, name: str) -> np.ndarray:
    read = f"canvas => {{ const pixels = ({COPIED})(canvas); return [pixels.height, pixels.width, ...pixels.data]; }}"
    rows, columns, *pixels = page.eval_on_selector(f".thumb[data-name='{name}'] canvas", read)
    return np.array(pixels).reshape(rows, columns, 4)[..., :3]


def _has_its_colours(shown: np.ndarray, trace: Trace, name: str, weights: np.ndarray) -> bool:
    """Return whether cells have the colours of their weights, and masked cells are hatched."""
    expected = np.array([[colours.rgb(float(weight)) for weight in row] for row in weights])
    part = next(entry["part"] for entry in trace.header["attention"] if entry["name"] == name)
    seen = np.tril(np.ones(weights.shape, bool)) if part == "decoder" else np.ones(weights.shape, bool)
    hatched = (shown[~seen] != colours.rgb(0.0)).any(-1)
    return np.array_equal(shown[seen], expected[seen]) and bool(hatched.all())


def test_every_head_is_shown_in_its_colours(visit: Visit, trace: Trace) -> None:
    page = visit("heads")
    for entry in trace.header["attention"]:
        weights = trace.display(entry["array"]) / 255
        page.locator(f".thumb[data-name='{entry['name']}:0']").scroll_into_view_if_needed()
        until(lambda rows=weights.shape[1], name=entry["name"]: len(_thumb(page, f"{name}:0")) == rows, "its picture")
        for head, expected in enumerate(weights):
            shown = _thumb(page, f"{entry['name']}:{head}")
            assert _has_its_colours(shown, trace, entry["name"], expected)


def test_the_table_has_the_four_numbers_of_every_head(visit: Visit, trace: Trace) -> None:
    heading, *rows = table(visit("heads", table=1), "figure:has-text('heads')")
    assert heading == ["head", "entropy", "diagonal", "special tokens", "punctuation"]
    names = ("entropy", "diagonal", "special", "punctuation")
    stats = [head for entry in trace.header["attention"] for head in entry["stats"]]
    shown = sorted([float(cell) for cell in row[1:]] for row in rows)
    assert np.allclose(shown, sorted([head[name] for name in names] for head in stats), atol=0.0006)


def test_a_head_opens_by_keyboard_and_by_link(visit: Visit, trace: Trace) -> None:
    page = visit("heads")
    page.focus(".thumb[tabindex='0']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    until(lambda: announced(page).startswith("decoder self-attention, layer 1, head 2: entropy"), "its numbers")
    page.keyboard.press("Enter")
    page.wait_for_selector(".map-plane canvas")
    assert page.evaluate("document.activeElement.textContent") == "Decoder self-attention, layer 1, head 2"
    name = page.get_attribute(".thumb[aria-pressed=true]", "data-name")
    assert name == "decoder.0.self_attn:1"
    array = next(one["array"] for one in trace.header["attention"] if one["name"] == name.split(":")[0])
    expected = trace.display(array)[1] / 255
    assert _has_its_colours(cells(page), trace, "decoder.0.self_attn", expected)
    again = visit("heads", afresh=True, open=name)
    assert _has_its_colours(cells(again), trace, "decoder.0.self_attn", expected)


def test_arcs_show_weights_above_the_threshold_or_of_one_token(visit: Visit, trace: Trace) -> None:
    page = visit("heads", open="decoder.1.cross_attn:0", shape="arcs", **{"from": "0.20"})
    weights = trace.display("decoder.1.cross_attn.weights")[0] / 255
    assert page.locator(".arc-lines path").count() == int((weights >= 0.2).sum())
    page.focus(".arc-rows button")
    page.keyboard.press("ArrowDown")
    until(lambda: page.locator(".arc-lines path").count() == int((weights[1] >= 0.01).sum()), "the arcs of the second")
    until(lambda: "attends to" in announced(page), "its attention")


@pytest.fixture(scope="module")
def long_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve an untrained GPT with 144 heads."""
    settings = {
        "data": {"corpus": "stories"},
        "text": {"unit": "char", "shared": True},
        "model": {
            "family": "gpt",
            "width": 96,
            "heads": HEADS,
            "ffn_width": 96,
            "layers": LAYERS,
            "max_positions": 1024,
        },
    }
    with served([make(tmp_path_factory.mktemp("long") / "long", settings).path]) as address:
        yield address


def test_512_tokens_by_144_heads_open_and_stay_responsive(visit: Visit, page: Page, long_site: str) -> None:
    text = ("the small cat sleeps on the old mat " * 20)[:TOKENS]
    visit("heads", at=long_site, text="the cat")  # the model is loaded
    seconds_taken: list[float] = []
    while (
        len(seconds_taken) < TRIES and min(seconds_taken, default=SECONDS) >= SECONDS
    ):  # try again in case the machine was busy
        start = time.monotonic()
        visit(
            "heads", at=long_site, afresh=True, text=text + "." * len(seconds_taken)
        )  # another text, which is not cached
        holds(page, "[...document.querySelectorAll('.thumb canvas')].slice(0, 12).every((one) => one.width > 1)")
        seconds_taken.append(time.monotonic() - start)
    assert page.locator(".thumb").count() == LAYERS * HEADS
    timings = f"opened in {', '.join(f'{seconds:.2f}' for seconds in seconds_taken)} s"
    print(f"{TOKENS} tokens by {LAYERS * HEADS} heads: {timings}")
    assert min(seconds_taken) < SECONDS * slowness(), timings

    # While scrolling, no task of the page blocks the screen for long.
    page.evaluate(
        "window.longest = 0; new PerformanceObserver((seen) => seen.getEntries().forEach((task) => "
        "{ window.longest = Math.max(window.longest, task.duration); })).observe({ type: 'longtask' })"
    )
    page.locator(".thumb").last.scroll_into_view_if_needed()
    holds(page, "[...document.querySelectorAll('.thumb canvas')].at(-1).width > 1")
    page.locator(".thumb").last.click()
    page.wait_for_selector(".map-plane[aria-rowcount]")
    page.keyboard.press("Tab")
    page.focus(".map-cell")
    page.keyboard.press("Control+End")
    rows = int(page.get_attribute(".map-plane", "aria-rowcount") or 0) - 1
    assert rows >= TOKENS and page.get_attribute(".map-cell", "data-r") == str(rows - 1)
    longest = page.evaluate("window.longest")
    print(f"longest task of the page: {longest:.0f} ms")
    assert longest < SECONDS / 4 * 1000 * slowness()
