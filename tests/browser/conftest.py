"""A browser, a server, and tiny models.

`site` serves tiny runs of different families and kinds of input; `visit(view, **fields)` opens a view and waits until
it is drawn, in a page that all tests share, or in the test's own `page`. A test fails if an error was written to the
console or another machine was contacted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import pytest
from onscreen import PATIENCE, SENTENCE, Site, Visit
from tinyruns import INPUTS, TINY, served

from tiny_runs import make, make_input_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CI = os.environ.get("CI") == "true"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LOCAL_HOSTS = ("127.0.0.1", "localhost")
ELSEWHERE = {
    "view": "align",
    "run": "tiny-gpt",
    "text": "nothing to see",
}  # the address of the shared page between two views

# Changes the address without reloading the page, after clearing what was drawn and announced.
NAVIGATE = """address => {
    delete document.querySelector("main").dataset.ready;
    document.querySelector("#live").textContent = "";
    location.hash = address;
}"""


def missing(why: str) -> None:
    """Report a missing dependency: a failure in CI, elsewhere a reason to skip."""
    if CI:
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    import torch

    try:
        import fastapi  # noqa: F401
    except ImportError:
        missing("the page needs fastapi (regard[serve])")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("site")
    runs = {name: make(folder / name, settings).path for name, settings in TINY.items()}
    runs |= {name: make_input_run(folder / name, recipe).path for name, recipe in INPUTS.items()}
    with served(list(runs.values()), SENTENCE) as address:
        yield Site(address, runs)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("browser tests need the playwright package (regard[dev])")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        missing(f"browser tests need one of {', '.join(BROWSERS)}")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=executable, args=[*flags, "--disable-gpu"], timeout=5 * PATIENCE * 1000
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def noted() -> list[str]:
    """Errors on any page."""
    return []


@pytest.fixture
def troubles(noted: list[str]) -> Iterator[list[str]]:
    """Errors on the pages of this test; a test that provokes one removes it."""
    noted.clear()
    yield noted
    assert not noted, "\n".join(noted)


def _open_page(browser: Browser, noted: list[str], width: int = 1280, **options: Any) -> Page:
    """Open a page in its own window, and collect its errors."""
    page = browser.new_context(viewport={"width": width, "height": 900}, **options).new_page()
    page.set_default_timeout(PATIENCE * 1000)
    page.on(
        "console", lambda message: message.type in ("error", "warning") and noted.append(f"console: {message.text}")
    )
    page.on("pageerror", lambda error: noted.append(f"error: {error}"))
    page.on("request", lambda sent: _is_remote(sent.url) and noted.append(f"requested {sent.url}"))
    return page


@pytest.fixture
def new_page(browser: Browser, troubles: list[str]) -> Iterator[Callable[..., Page]]:
    """`new_page(width=360, color_scheme="dark")`: a page of this test only."""
    pages: list[Page] = []

    def make(**options: Any) -> Page:
        pages.append(_open_page(browser, troubles, **options))
        return pages[-1]

    yield make
    for page in pages:
        page.unroute_all(behavior="ignoreErrors")  # a request in flight would fail in another test
        page.context.close()


def _is_remote(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("data", "blob", "file", "about") and parts.hostname not in LOCAL_HOSTS


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    return new_page(color_scheme="light")


@pytest.fixture(scope="session")
def shared_page(browser: Browser, noted: list[str]) -> Iterator[Page]:
    page = _open_page(browser, noted, color_scheme="light")
    yield page
    page.context.close()


@pytest.fixture
def visit(request: pytest.FixtureRequest, site: Site, troubles: list[str]) -> Visit:
    """`visit("align", run="tiny-gpt", head=2)` opens that view, and waits until it is drawn.

    A page that shows the site already only changes its address, as by a link; `afresh` reloads it.
    """
    usual: Page = request.getfixturevalue("page" if "page" in request.fixturenames else "shared_page")

    def open_view(view: str, *, on: Page = usual, at: str = site.address, afresh: bool = False, **fields: Any) -> Page:
        fragment = urlencode({"view": view} | fields)
        if afresh or not on.url.startswith(at.partition("?")[0]):
            on.goto("about:blank")
            on.goto(f"{at}#{fragment}")
        else:
            on.mouse.move(0, 0)  # away from all elements
            for address, there in ((urlencode(ELSEWHERE), ELSEWHERE["view"]), (fragment, view)):
                on.evaluate(NAVIGATE, address)
                on.wait_for_selector(f"main[data-ready={there}]")
        on.wait_for_selector(f"main[data-ready={view}]")
        return on

    return open_view
