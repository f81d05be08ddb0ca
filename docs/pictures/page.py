"""Take screenshots for docs/look.md: `python docs/pictures/page.py [FOLDER OF RUNS]` writes docs/pictures/page/*.png.

Playwright opens `regard look` in Debian's chromium and takes a screenshot of each view. The runs come from
`regard train ladder-transformer`, `ladder-additive`, `stories` and `scenes`, 20 minutes on two CPU cores. The script
needs `pip install -e '.[dev]'` and chromium.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, FloatRect, Page, sync_playwright

from regard.server.page_server import open_server

HERE = Path(__file__).parent / "page"
RUNS = ("ladder-transformer", "ladder-additive", "stories", "scenes")
SENTENCE = "he lives behind one very dusty plate"
PROMPT = "Once upon a time a small"
COLOURS, EXACT = 256, 64  # palette size, and colours kept exactly: halves the file without a visible difference
SIDE = 12  # margin in pixels
CURVES = "figure:has(h3:text('Insertion'))"


@dataclass(frozen=True)
class Shot:
    """One screenshot: the address, the window, and the first and last element to include."""

    view: str
    fields: dict[str, str] = field(default_factory=dict)
    theme: str = "light"
    width: int = 1180
    first: str = ".top"
    last: str = "main .view"
    cell: tuple[int, int] | None = None  # the cell of the first map that has the focus
    wait_for: str = "main"


CHANGES = [
    {"kind": "head", "attention": "decoder.0.cross_attn", "head": 3},
    {"kind": "hide", "side": "source", "element": 5},
]

SHOTS = {
    "align": Shot("align", {"layer": "0", "head": "best"}, cell=(5, 6)),
    "heads": Shot("heads", theme="dark", first="nav.views"),
    "compare": Shot("compare", first="nav.views", cell=(5, 6)),
    "walk": Shot(
        "walk",
        {"run": "stories", "text": PROMPT, "stage": "choose", "temperature": "0.8", "topp": "0.9", "draw": "3"},
    ),
    "lens": Shot("walk", {"run": "stories", "text": PROMPT, "stage": "lens"}, first="nav.views"),
    "changes": Shot("changes", {"changes": json.dumps(CHANGES)}, first="nav.views"),
    "explain": Shot("explain", first="nav.views", last=CURVES, wait_for=CURVES),
    "overlay": Shot("overlay", {"run": "scenes", "text": "test 7", "at": "r3"}, first="nav.views"),
    "positions": Shot("positions", {"length": "40", "features": "24"}, first="nav.views", theme="dark"),
    "phone": Shot("align", {"layer": "0", "head": "best"}, width=360, last="main figure"),
}


def photograph(browser: Browser, address: str, shot: Shot) -> bytes:
    """Return a screenshot of one view as PNG."""
    page = browser.new_page(
        viewport={"width": shot.width, "height": 900},
        color_scheme="dark" if shot.theme == "dark" else "light",
        device_scale_factor=1.5,
    )
    page.goto(f"{address}#{urlencode({'view': shot.view, 'text': SENTENCE} | shot.fields)}")
    page.wait_for_selector(f"main[data-ready={shot.view}]", timeout=60_000)
    page.wait_for_selector(shot.wait_for, timeout=120_000)
    if shot.cell is not None:
        page.locator(".map-cell").first.focus()
        page.keyboard.press("Control+Home")
        for key, times in zip(("ArrowDown", "ArrowRight"), shot.cell, strict=True):
            for _ in range(times):
                page.keyboard.press(key)
    page.evaluate("scrollTo(0, document.body.scrollHeight)")  # draws the parts that are drawn lazily
    page.wait_for_timeout(500)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(500)
    picture = page.screenshot(full_page=True, clip=_between(page, shot.first, shot.last))
    page.close()
    return picture


def _between(page: Page, first: str, last: str) -> FloatRect:
    """Return the rectangle of full page width from the top of one element to the bottom of another."""
    begin, end = (page.locator(part).first.bounding_box() for part in (first, last))
    assert begin is not None and end is not None
    top = max(0, begin["y"] - SIDE)
    width = page.viewport_size["width"] if page.viewport_size else 0
    return {"x": 0, "y": top, "width": width, "height": end["y"] + end["height"] + SIDE - top}


def save(picture: bytes, file: Path) -> None:
    """Write the picture with a palette: the most common colours exactly, the others quantised with equal weight.

    This keeps the colours of flat areas and the steps of colour legends, which are small and have many colours.
    """
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    colours, which, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(-counts)
    common, rest = colours[order[:EXACT]], colours[order[EXACT:]]
    means = Image.fromarray(rest[None]).quantize(COLOURS - EXACT, Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = np.array([*common.flatten().tolist(), *means][: 3 * COLOURS]).reshape(-1, 3)
    apart = np.square(colours[:, None].astype(int) - palette).sum(-1)  # [colours, palette]
    few = Image.fromarray(apart.argmin(1).astype(np.uint8)[which].reshape(pixels.shape[:2]), mode="P")
    few.putpalette(palette.flatten().tolist())
    few.save(file, optimize=True)


def main(folder: Path, names: list[str]) -> None:
    HERE.mkdir(exist_ok=True)
    server = open_server([folder / run for run in RUNS if (folder / run).exists()])
    threading.Thread(target=server.run, daemon=True).start()
    with sync_playwright() as driver:
        rooted = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=rooted)
        for name in names:
            file = HERE / f"{name}.png"
            save(photograph(browser, server.link, SHOTS[name]), file)
            print(f"{file.relative_to(Path(__file__).parents[2])}: {file.stat().st_size / 1000:.0f} KB")
        browser.close()
    server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"), sys.argv[2:] or list(SHOTS))
