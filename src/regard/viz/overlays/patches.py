"""An image beside attention over its patches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard.text.display import shorten
from regard.viz import terminal
from regard.viz.colours import Ramp
from regard.viz.grid import Grid, colour_bar, short_number
from regard.viz.overlays.overlay import AnyPanel, Entry, Overlay
from regard.viz.scene import PAD, Cells, Item, Rect, Scene, SceneText, card, clean, fitted, title
from regard.viz.terminal import Colour

LARGE, SMALL = 288.0, 144.0  # width of a picture: of two, and of many
GAP, BELOW = 18.0, 30.0  # between pictures, and below them for their labels
MAX_WORDS = 23  # pictures of words, beside the image itself
OPACITY = 0.62  # opacity of the colours over the image


def blended(image: np.ndarray, shares: np.ndarray, ramp: Ramp) -> np.ndarray:
    """Lay the colours of numbers [h, w] over a grey image [h, w, 3] from 0 to 1; bytes [h, w, 3]. NaN: no colour."""
    grey = (255 * image.mean(-1, keepdims=True)).repeat(3, -1)
    colours = ramp.rgbs(np.nan_to_num(shares))
    mixed = np.where(np.isnan(shares)[..., None], grey, (1 - OPACITY) * grey + OPACITY * colours)
    return np.rint(mixed).astype(np.uint8)


def pixel_values(axis: Entry, weights: np.ndarray) -> np.ndarray:
    """Spread the weights [K] of patches over their pixels [h, w]; NaN outside them."""
    pixels = np.full((axis["height"], axis["width"]), np.nan)
    for element, weight in zip(axis["elements"], weights, strict=True):
        if "box" in element:
            x, y, width, height = element["box"]
            pixels[y : y + height, x : x + width] = weight
    return pixels


@dataclass(frozen=True, eq=False)
class PatchPanel:
    """The image, then the image under the weights of each of `rows`, pairs of a label and numbers [K]."""

    overlay: Overlay
    rows: tuple[tuple[str, np.ndarray], ...]
    legend: str = "attention weight"

    def _ramp(self) -> Ramp:
        return Ramp(0.0, max(float(np.nanmax(weights)) for _, weights in self.rows) or 1.0)

    def scene(self) -> Scene:
        axis, image, ramp = self.overlay.keys, self.overlay.image("image"), self._ramp()
        assert image is not None
        side = LARGE if len(self.rows) == 1 else SMALL
        pixel = side / max(image.shape[:2])
        pictures = [("input", np.rint(255 * image).astype(np.uint8))]
        pictures += [(label, blended(image, pixel_values(axis, weights), ramp)) for label, weights in self.rows]
        columns = min(len(pictures), 2 if side == LARGE else 6)
        down = image.shape[0] * pixel
        items: list[Item] = []
        for n, (label, colours) in enumerate(pictures):
            x, y = PAD + (n % columns) * (side + GAP), PAD + 54 + (n // columns) * (down + BELOW)
            wide = image.shape[1] * pixel
            tip = label if n == 0 else self._strongest(self.rows[n - 1][1])
            items += [
                Cells(x, y, pixel, pixel, colours, image=True),
                Rect(x, y, wide, down, stroke="edge", tip=tip),
                SceneText(x, y + down + 16, fitted(clean(label), 12, side), 12, "quiet"),
            ]
        width = max(PAD + columns * (side + GAP) - GAP, 420.0) + PAD
        below = PAD + 54 + -(-len(pictures) // columns) * (down + BELOW)
        height = below + 44 + PAD
        subtitle = fitted(clean(self.overlay.map.title), 12, width - 2 * PAD)
        heading = [title(self.overlay.headline(), width), SceneText(PAD, PAD + 36, subtitle, 12, "quiet")]
        bar = colour_bar(PAD, below + 8, ramp, self.legend, short_number)
        return Scene(
            width, height, self.overlay.headline(), self._about(), (card(width, height), *heading, *items, bar)
        )

    def _strongest(self, weights: np.ndarray) -> str:
        names = self.overlay.map.keys
        best = np.argsort(-weights, kind="stable")[:3]
        return ", ".join(f"{names[n]} {weights[n]:.3g}" for n in best)

    def _about(self) -> str:
        most = " ".join(f"{label}: most on patches {self._strongest(weights)}." for label, weights in self.rows)
        return f"An image, and attention over its patches (row, column): {self.overlay.map.title}. {most}"

    def text(self, *, width: int, colour: Colour) -> str:
        lines = [shorten(self.overlay.headline(), width), ""]
        for label, weights in self.rows:
            lines.append(terminal.grid(self._grid(label, weights), width=width, colour=colour))
        return "\n".join(lines)

    def _grid(self, label: str, weights: np.ndarray) -> Grid:
        """The patches of a row as they are in the image."""
        elements = [element for element in self.overlay.keys["elements"] if "box" in element]
        across = len({element["box"][0] for element in elements})
        shown = np.array([w for e, w in zip(self.overlay.keys["elements"], weights, strict=True) if "box" in e])
        table = shown.reshape(-1, across)
        rows, columns = (tuple(str(n + 1) for n in range(count)) for count in table.shape)
        heading = f"{self.overlay.map.title}, {label}"
        return Grid(table, rows, columns, heading, "", self.legend, self._ramp(), number=short_number)


def patch_panels(overlay: Overlay) -> list[AnyPanel]:
    """One overlay of self-attention, or one for each word that attends to the image."""
    if overlay.queries is overlay.keys or overlay.at is not None:
        return [PatchPanel(overlay, (overlay.row(),))]
    rows = list(zip(overlay.map.queries, overlay.map.weights, strict=True))[:MAX_WORDS]
    return [PatchPanel(overlay, tuple((label.strip() or label, weights) for label, weights in rows))]
