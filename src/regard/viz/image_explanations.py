"""Explanations of images as pictures: the importance of pixels over the image, for the classes that matter most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.color import Color
from rich.style import Style

from regard.interpret.explain.rise import Explanation
from regard.text.display import shorten
from regard.viz.colours import Ramp
from regard.viz.explanations import NOTE, number
from regard.viz.grid import colour_bar
from regard.viz.scene import PAD, Cells, Item, Rect, Scene, SceneText, card, clean, fitted, title
from regard.viz.terminal import SYSTEMS, Colour

SIDE = 224.0  # length of a picture's longer side
GAP = 20.0
OUTPUTS = 3  # classes with a map of their own
HALF = "▀"  # the upper half of a terminal's cell has the colour of the text, the lower half that of the background
TERMINAL_SIDE = 24  # lines of a picture in a terminal, at most
MAX_OPACITY = 0.85  # opacity of the greatest importance


@dataclass(frozen=True, eq=False)
class ImageExplanation:
    """An explanation, the image [height, width, channels] from 0 to 1, and the class that is explained."""

    explanation: Explanation
    image: NDArray[np.float32]
    output: str

    def maps(self) -> list[tuple[str, NDArray[np.float64]]]:
        """The maps [height, width] of the explained class and of the most probable others, with their names."""
        others = [name for name in self.explanation.outputs if name != self.output][: OUTPUTS - 1]
        return [(name, self.explanation.map(name)) for name in (self.output, *others)]

    def rgb(self) -> NDArray[np.uint8]:
        """The image as bytes [height, width, 3]."""
        return np.rint(255 * np.broadcast_to(self.image, (*self.image.shape[:2], 3))).astype(np.uint8)

    def overlay(self, values: NDArray[np.float64], ramp: Ramp) -> NDArray[np.uint8]:
        """Colours of the importance over the image in grey; the more important, the less of the image is seen."""
        grey = self.rgb().mean(-1, keepdims=True).repeat(3, -1)
        opacity = MAX_OPACITY * np.clip(abs(values) / ramp.high, 0, 1)[..., None]
        return np.rint((1 - opacity) * grey + opacity * ramp.rgbs(values)).astype(np.uint8)

    def scene(self) -> Scene:
        """The image, then the same under the importance of its pixels for each class."""
        maps = self.maps()
        ramp = Ramp.signed(np.array([values for _, values in maps]))
        pictures = [("the image", self.rgb()), *((name, self.overlay(values, ramp)) for name, values in maps)]
        height, width = self.image.shape[:2]
        pixel = SIDE / max(height, width)
        across, down, top = width * pixel, height * pixel, PAD + 44
        items: list[Item] = []
        for n, (name, colours) in enumerate(pictures):
            x = PAD + n * (across + GAP)
            label = fitted(clean(name), 13, across)
            items.append(Cells(x, top, pixel, pixel, colours, image=True))
            items.append(Rect(x, top, across, down, stroke="edge", tip=name))
            items.append(SceneText(x, top + down + 20, label, 13, bold=n == 1))
        full, bottom = PAD + len(pictures) * (across + GAP) - GAP + PAD, top + down + 40
        note = f"Change if a pixel and its surroundings are shown; {self.explanation.calls:,} model calls"
        items += [
            colour_bar(PAD, bottom, ramp, f"change in {self.explanation.score}", number),
            SceneText(PAD, bottom + 54, f"{note}. {NOTE}", 11, "quiet"),
        ]
        size, heading = (full, bottom + 54 + PAD), title(self.explanation.title, full)
        return Scene(*size, self.explanation.title, self._about(), (card(*size), heading, *items))

    def _about(self) -> str:
        """A text alternative: where the importance for each class is greatest."""
        parts = []
        for name, values in self.maps():
            row, column = divmod(int(values.argmax()), values.shape[1])
            parts.append(f"for {name} at row {row + 1}, column {column + 1} ({number(float(values.max()))})")
        return f"Importance of pixels over the image, greatest {'; '.join(parts)}. {NOTE}"

    def text(self, *, width: int, colour: Colour) -> str:
        """The same for a terminal, as half blocks; without colours, the shares of importance in a 3 x 3 grid."""
        maps = self.maps()
        ramp = Ramp.signed(np.array([values for _, values in maps]))
        pictures = [("the image", self.rgb()), *((name, self.overlay(values, ramp)) for name, values in maps)]
        if SYSTEMS.get(colour) is None:
            return "".join(f"{name}\n{_ninths(values)}\n" for name, values in maps)
        side = max(min((width - 2) // min(len(pictures), max(width // 26, 1)) - 2, 2 * TERMINAL_SIDE), 8)
        columns = max(width // (side + 2), 1)
        lines = []
        for begin in range(0, len(pictures), columns):
            row = pictures[begin : begin + columns]
            lines.append("  ".join(f"{shorten(name, side):<{side}}" for name, _ in row).rstrip())
            blocks = [_half_blocks(_resized(picture, side), colour) for _, picture in row]
            lines += ["  ".join(parts) for parts in zip(*blocks, strict=True)]
        return "\n".join(lines) + "\n"


def _resized(picture: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The nearest pixels of a picture with `side` columns, and an even number of rows."""
    height, width = picture.shape[:2]
    rows = 2 * max(round(side * height / width / 2), 1)
    down, across = (np.arange(rows) * height // rows, np.arange(side) * width // side)
    return picture[down][:, across]


def _half_blocks(picture: NDArray[np.uint8], colour: Colour) -> list[str]:
    """Lines of a terminal, each of two rows of pixels."""

    def block(upper: list[int], lower: list[int]) -> str:
        style = Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower))
        return style.render(HALF, color_system=SYSTEMS.get(colour))

    rows = picture.tolist()
    return ["".join(map(block, upper, lower)) for upper, lower in zip(rows[0::2], rows[1::2], strict=True)]


def _ninths(values: NDArray[np.float64]) -> str:
    """The mean importance of the nine thirds of thirds of an image."""
    rows = [np.array_split(row, 3, axis=1) for row in np.array_split(values, 3, axis=0)]
    return "".join("  ".join(f"{number(float(part.mean())):>7}" for part in row) + "\n" for row in rows)
