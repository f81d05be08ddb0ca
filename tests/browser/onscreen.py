"""Helpers that read the page: announcements, the colours of cells, tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from playwright.sync_api import Page

PATIENCE = 60.0  # seconds, for busy machines
SENTENCE = "this cat is very large"
VIEWS = ("align", "heads", "compare", "walk", "changes", "explain", "positions")

# The pixels of a canvas, read from a copy with `willReadFrequently`.
COPIED = """(canvas) => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    return copy.getImageData(0, 0, canvas.width, canvas.height);
}"""

Visit = Callable[..., "Page"]


@dataclass(frozen=True)
class Site:
    """A live server: its address, and the run directories by id."""

    address: str
    runs: dict[str, Path]


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"timed out waiting for {what}"
        time.sleep(0.05)


def holds(page: Page, expression: str) -> None:
    """Wait until a JavaScript expression is true; the page's policy forbids Playwright's own waiting function."""
    until(lambda: bool(page.evaluate(expression)), expression)


def settled(page: Page) -> None:
    """Wait until heat maps are drawn, which happens on their first resize."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def slowness() -> float:
    """Measure how many times longer work takes than on an idle machine; at least 1."""
    wall, own = time.perf_counter(), time.process_time()
    while (spent := time.process_time() - own) < 0.3:
        pass
    return max((time.perf_counter() - wall) / spent, 1.0)


def announced(page: Page) -> str:
    """Return the last announcement for screen readers."""
    return page.text_content("#live") or ""


def cells(page: Page, where: str = "main") -> np.ndarray:
    """Return the colours of the cells of the first map, [rows, columns, 3], from its canvas.

    A cell is read left of its centre, where it has no number.
    """
    read = f"""async (canvas) => {{
        const frame = () => new Promise((done) => requestAnimationFrame(done));
        await frame().then(frame); // a map draws on its first resize, in the next frame
        const {{ across, down, rows, columns }} = canvas.dataset;
        const {{ data, width }} = ({COPIED})(canvas);
        const sharp = width / (across * columns);
        const place = (i, part, size) => Math.floor((i + part) * size * sharp);
        const at = (r, c) => 4 * (place(r, 0.5, down) * width + place(c, 0.14, across));
        const many = (count) => Array.from({{ length: Number(count) }}, (_, i) => i);
        return many(rows).map((r) => many(columns).map((c) => Array.from(data.slice(at(r, c), at(r, c) + 3))));
    }}"""
    return np.array(page.eval_on_selector(f"{where} .map-plane canvas", read))


def table(page: Page, where: str = "main") -> list[list[str]]:
    """Return the texts of the first table, row by row, with its heading."""
    read = "table => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
    return page.eval_on_selector(f"{where} .table-box table", read)


def export(page: Page, kind: str, folder: Path) -> Path:
    """Save a file by the Export menu."""
    page.click(".menu summary")
    with page.expect_download() as coming:
        page.click(f".menu-list >> text={kind}")
    path = folder / coming.value.suggested_filename
    coming.value.save_as(path)
    return path
