"""A real browser, a real server, and tiny models for it to show.

`site` serves four tiny runs, one a family; `page` is a fresh page that fails its test if an error was written to the
console or anything was asked of another machine; `visit(view, **fields)` opens a view and waits until it is drawn.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import pytest
from onscreen import PATIENCE, SENTENCE, Site, Visit
from tinyruns import TINY, make_run, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CI = os.environ.get("CI") == "true"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NEAR = ("127.0.0.1", "localhost")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker takes all browser tests, so that models are trained and the browser is started once."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("browser"))


def wanting(why: str) -> None:
    """A part that is missing: on a user's machine a reason to skip, where everything must run a failure."""
    if CI:
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    import torch

    try:
        import fastapi  # noqa: F401
    except ImportError:
        wanting("the page needs fastapi (regard[serve])")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("site")
    runs = {name: make_run(folder, name, settings) for name, settings in TINY.items()}
    with served(list(runs.values()), SENTENCE) as address:
        yield Site(address, runs)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        wanting("browser tests need the playwright package (regard[dev])")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        wanting(f"browser tests need one of {', '.join(BROWSERS)}")
    rooted = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=[*rooted, "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def troubles() -> list[str]:
    """What went wrong on the pages of this test; one that provokes something takes it out again."""
    return []


@pytest.fixture
def new_page(browser: Browser, troubles: list[str]) -> Iterator[Callable[..., Page]]:
    """`new_page(width=360, color_scheme="dark")`: a page in a window of its own, with nothing of another test in it."""
    contexts = []

    def make(width: int = 1280, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.on("console", lambda said: said.type in ("error", "warning") and troubles.append(f"console: {said.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("request", lambda asked: _is_far(asked.url) and troubles.append(f"asked {asked.url}"))
        return page

    yield make
    for context in contexts:
        context.close()
    assert not troubles, "\n".join(troubles)


def _is_far(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("data", "blob", "file", "about") and parts.hostname not in NEAR


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    return new_page(color_scheme="light")


@pytest.fixture
def visit(page: Page, site: Site) -> Visit:
    """`visit("align", run="tiny-gpt", head=2)` opens that view afresh, and waits until it is drawn."""

    def open_view(view: str, *, on: Page = page, at: str = site.address, **fields: Any) -> Page:
        on.goto("about:blank")
        on.goto(f"{at}#{urlencode({'view': view} | fields)}")
        on.wait_for_selector(f"main[data-ready={view}]")
        return on

    return open_view
