"""Makes the pictures of the page: `python docs/pictures/page.py RUN [RUN ...]` writes docs/pictures/page/NAME.png.

A browser (Debian's chromium, driven by playwright) opens `regard look` on the runs and photographs the views. The
pictures in the repository show the ladder's runs: `make ladder`, then

    python docs/pictures/page.py runs/ladder-transformer runs/ladder-additive
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Browser, sync_playwright

from regard.serving.listening import open_server

OUT = Path(__file__).parent / "page"
SENTENCE = "this cat is very large"
WIDE, PHONE = {"width": 1280, "height": 1000}, {"width": 360, "height": 740}

# name: (window, theme, fields of the address, cell that has the cursor)
PICTURES = {
    "align": (WIDE, "light", {"view": "align"}, (4, 4)),
    "align-dark": (WIDE, "dark", {"view": "align"}, (4, 4)),
    "align-phone": (PHONE, "light", {"view": "align"}, None),
    "heads": (WIDE, "light", {"view": "heads"}, None),
    "compare": (WIDE, "light", {"view": "compare"}, (3, 3)),
    "walk": (WIDE, "light", {"view": "walk"}, None),
    "changes": (WIDE, "light", {"view": "changes"}, None),
    "explain": (WIDE, "light", {"view": "explain"}, None),
    "positions": (WIDE, "light", {"view": "positions"}, None),
}


def photograph(browser: Browser, address: str, name: str) -> Path:
    """One view, from the top of the page to the end of what it shows."""
    window, theme, fields, cursor = PICTURES[name]
    page = browser.new_page(viewport=window, color_scheme=theme, device_scale_factor=1.5)
    page.goto(f"{address}#{urlencode(fields)}")
    page.wait_for_selector(f"main[data-ready={fields['view']}]", timeout=60_000)
    if cursor is not None:
        page.focus(".map-cell")
        page.keyboard.press("Control+Home")
        for key, times in zip(("ArrowDown", "ArrowRight"), cursor, strict=True):
            for _ in range(times):
                page.keyboard.press(key)
    page.evaluate("scrollTo(0, document.body.scrollHeight)")  # what is drawn only when it comes near is drawn now
    page.wait_for_timeout(500)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(500)
    path = OUT / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    page.close()
    return path


def main(runs: list[str]) -> None:
    if not runs:
        sys.exit(__doc__)
    OUT.mkdir(exist_ok=True)
    server = open_server([Path(run) for run in runs], text=SENTENCE)
    threading.Thread(target=server.run, daemon=True).start()
    with sync_playwright() as driver:
        rooted = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=rooted)
        for name in PICTURES:
            print(photograph(browser, server.address, name))
        browser.close()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
