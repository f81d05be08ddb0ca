"""RISE for images, as in its paper: random masks of few cells, enlarged smoothly and shifted.

A mask is a grid of cells that are kept with probability p, interpolated bilinearly between the cells, and moved by a
random number of pixels less than a cell, so that no pixel is always at the edge of one. (The paper stretches s x s
cells over the image; here the cells have the same size and the grid is larger than the image, so that all pixels have
masks of one variance.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from regard.errors import UserError
from regard.interpret.explain.rise import BlackBox, Explanation, Progress, Sampling, ScoreFn, explain, mask_uniforms

CELLS = 7  # along the longer side of an image
Fill = Literal["grey", "black", "blur"]
ImageArray = NDArray[np.float32]  # [height, width, channels], from 0 to 1


@dataclass(frozen=True)
class GridMasks:
    """Masks for images of height x width pixels, of `cells` cells along the longer side."""

    height: int
    width: int
    cells: int = CELLS
    independent = False

    def __post_init__(self) -> None:
        pixels = max(self.height, self.width)
        if not 1 <= self.cells <= pixels:
            raise UserError(f"cells = {self.cells}: must be from 1 to the {pixels} pixels of a side")

    @property
    def cell(self) -> int:
        """Pixels of a cell's side."""
        return -(-max(self.height, self.width) // self.cells)

    def draw(self, numbers: Sequence[int], sampling: Sampling) -> NDArray[np.float32]:
        """Draw masks from 0 (hidden) to 1 (kept), [B, height * width]."""
        rows, columns = (-(-side // self.cell) + 2 for side in (self.height, self.width))
        uniform, unpaired = mask_uniforms(numbers, rows * columns + 2, sampling)
        kept = (uniform[:, 2:] < sampling.keep).astype(np.float32).reshape(-1, rows, columns)
        shift = (unpaired[:, :2] * self.cell).astype(int)  # [B, 2], the same for both masks of a pair
        down = _interpolation(self.height, rows, self.cell, shift[:, 0])
        across = _interpolation(self.width, columns, self.cell, shift[:, 1])
        return (down @ kept @ across.transpose(0, 2, 1)).reshape(len(kept), -1).astype(np.float32, copy=False)

    def variance(self, keep: float) -> float:
        """p (1 - p), times the mean of the sum of squared weights of the cells that a pixel lies between."""
        part = np.arange(self.cell) / self.cell
        return keep * (1 - keep) * float(np.mean((1 - part) ** 2 + part**2)) ** 2


def _interpolation(pixels: int, cells: int, cell: int, shift: NDArray[Any]) -> NDArray[np.float32]:
    """Weights [B, pixels, cells] of cells in pixels that are moved by `shift` [B]; a pixel lies between two cells."""
    place = (np.arange(pixels) + shift[:, None]) / cell  # [B, pixels]
    return np.clip(1 - abs(place[..., None] - np.arange(cells)), 0, 1).astype(np.float32)


def fill_image(image: ImageArray, fill: str) -> ImageArray:
    """The image that hidden pixels are taken from."""
    if fill not in get_args(Fill):
        raise UserError(f"fill = {fill!r}: choose from {', '.join(get_args(Fill))}")
    if fill == "blur":
        return blurred(image, max(image.shape[:2]) / 10)
    return np.full_like(image, 0.5 if fill == "grey" else 0.0)


def blurred(image: ImageArray, deviation: float) -> ImageArray:
    """Convolve with a Gaussian of this standard deviation in pixels; the edges are repeated outside."""
    radius = max(round(3 * deviation), 1)
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / deviation) ** 2)
    kernel /= kernel.sum()
    for axis in (0, 1):
        pads = [(radius, radius) if axis == i else (0, 0) for i in range(3)]
        padded = np.pad(image, pads, mode="edge")
        image = sum(weight * np.take(padded, range(i, i + image.shape[axis]), axis) for i, weight in enumerate(kernel))
    return np.asarray(image, np.float32)


def image_box(
    function: ScoreFn, image: Any, *, fill: Any = "grey", cells: int = CELLS, outputs: Sequence[str] = (), **more: Any
) -> BlackBox:
    """The black box of a function of images, for one image [height, width, channels], from 0 to 1 or of bytes.

    `function` maps a list of such images, from 0 to 1, to scores [B] or [B, O]. Hidden pixels are those of `fill`.
    """
    pixels = np.asarray(image)
    pixels = (pixels / 255 if pixels.dtype.kind in "ui" else pixels).astype(np.float32)
    if pixels.ndim != 3 or 0 in pixels.shape:
        raise UserError(f"an image is an array [height, width, channels], not {pixels.shape}")
    height, width, _ = pixels.shape
    hidden = fill_image(pixels, fill) if isinstance(fill, str) else np.asarray(fill, np.float32)

    def masked(mask: Any) -> ImageArray:
        shown = np.asarray(mask, np.float32).reshape(height, width, 1)
        return (hidden + shown * (pixels - hidden)).astype(np.float32, copy=False)

    names = tuple(f"{row},{column}" for row in range(1, height + 1) for column in range(1, width + 1))
    source = GridMasks(height, width, cells)
    return BlackBox(function, names, masked, tuple(outputs), source=source, grid=(height, width), **more)


def explain_image(
    function: ScoreFn,
    image: Any,
    *,
    fill: Any = "grey",
    cells: int = CELLS,
    outputs: Sequence[str] = (),
    progress: Progress | None = None,
    **sampling: Any,
) -> Explanation:
    """Estimate the importance of every pixel of an image for the scores of any function of images (RISE).

    `function` maps a list of arrays [height, width, channels], from 0 to 1, to scores [B] or [B, O]; `fill` is what
    hidden pixels become: "grey", "black", "blur", or an image. The other settings are those of `Sampling`.

    >>> corner = explain_image(lambda images: [x[:2, :2].mean() for x in images], np.ones((8, 8, 1)), cells=4)
    >>> corner.map()[:2, :2].mean() > 3 * abs(corner.map()[4:, 4:]).mean()
    True
    """
    return explain(image_box(function, image, fill=fill, cells=cells, outputs=outputs), progress=progress, **sampling)
