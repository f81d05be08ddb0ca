"""Built-in images: one coloured shape on a noisy background. The class is colour and shape, as in "red circle".

An image is a function of its split and its number, so the splits never share an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.data.packing import PlannedBatches, generator
from regard.errors import UserError, first_line
from regard.models.vit import ImageBatch
from regard.registry import CORPORA

SIZE = 24  # pixels of a side
COLOURS = {"red": (0.9, 0.2, 0.2), "green": (0.2, 0.8, 0.3), "blue": (0.25, 0.35, 0.95)}
SHAPES = ("circle", "square", "triangle", "cross")
CLASSES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
SPLITS = {"train": (0, 12000), "valid": (1, 600), "test": (2, 600)}  # seed and number of images
Image = npt.NDArray[np.float32]  # [SIZE, SIZE, 3], from 0 to 1


@CORPORA.register("shapes")
class Shapes:
    """The built-in corpus `shapes`."""

    kind = "images"

    @staticmethod
    def images(split: str, count: int | None = None) -> Iterator[tuple[Image, str]]:
        """The first `count` images of a split, each with the name of its class."""
        if split not in SPLITS:
            raise UserError(f"corpus 'shapes' has no split {split!r}; it has {', '.join(SPLITS)}")
        seed, usual = SPLITS[split]
        for number in range(usual if count is None else count):
            label = CLASSES[number % len(CLASSES)]
            yield draw(label, generator(seed, number)), label


def draw(label: str, random: np.random.Generator) -> Image:
    """An image of this class; position, size, shade and noise are drawn."""
    colour, shape = label.split()
    radius = random.uniform(6, 9)
    x0, y0 = SIZE / 2 + random.uniform(-2.5, 2.5, 2)
    y, x = np.mgrid[:SIZE, :SIZE]
    dx, dy = (x - x0) / radius, (y - y0) / radius  # the shape is within [-1, 1]
    inside = {
        "circle": dx**2 + dy**2 <= 1,
        "square": np.maximum(abs(dx), abs(dy)) <= 0.85,
        "triangle": (dy <= 0.9) & (dy >= 2 * abs(dx) - 1),
        "cross": (np.minimum(abs(dx), abs(dy)) <= 0.3) & (np.maximum(abs(dx), abs(dy)) <= 1),
    }[shape]
    image = np.full((SIZE, SIZE, 3), random.uniform(0.05, 0.6))
    image[inside] = np.array(COLOURS[colour]) * random.uniform(0.7, 1.1)
    return np.clip(image + random.normal(0, 0.08, image.shape), 0, 1).astype(np.float32)


def read_image(path: str | Path) -> Image:
    """Read a .npy array [SIZE, SIZE, 3] of numbers from 0 to 1 or from 0 to 255, or an image file (with Pillow)."""
    file = Path(path)
    try:
        if file.suffix == ".npy":
            array: npt.NDArray[Any] = np.load(file, allow_pickle=False)
        else:
            array = _decode(file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or first_line(error)}") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{file}: not an image that can be read: {first_line(error)}") from error
    return check_image(array, str(file))


def check_image(given: Any, name: str = "predict") -> Image:
    """Check an array of pixels, and scale it to numbers from 0 to 1."""
    array = np.asarray(given)
    if array.shape != (SIZE, SIZE, 3) or array.dtype.kind not in "uif":
        raise UserError(f"{name}: {array.dtype} of shape {array.shape}, and an image is [{SIZE}, {SIZE}, 3] of numbers")
    scaled = array / 255 if array.dtype.kind in "ui" else array
    if not (np.isfinite(scaled).all() and scaled.min() >= 0 and scaled.max() <= 1):
        raise UserError(f"{name}: pixels are numbers from 0 to 1, or whole numbers from 0 to 255")
    return scaled.astype(np.float32)


def _decode(file: Path) -> npt.NDArray[Any]:
    try:
        from PIL import Image as pillow
    except ImportError:
        raise UserError(f"{file}: image files need Pillow (pip install pillow); .npy files do not") from None
    with pillow.open(file) as image:
        return np.asarray(image.convert("RGB").resize((SIZE, SIZE)))


class ImageBatches(PlannedBatches):
    """An endless stream of batches of `size` images, in another order in every epoch; what is left over is left out."""

    members = "images"

    def __init__(self, images: Sequence[Image], labels: Sequence[int], size: int, seed: int) -> None:
        self.images, self.labels = torch.from_numpy(np.stack(images)), torch.tensor(labels)
        self.size, self.seed, self.rank, self.world = min(size, len(labels)), seed, 0, 1

    def _plan(self, random: np.random.Generator) -> Iterator[npt.NDArray[Any]]:
        order = random.permutation(len(self.labels))
        yield from order[: len(order) // self.size * self.size].reshape(-1, self.size)

    def _cost(self, members: npt.NDArray[Any]) -> float:
        return len(members)

    def _read(self, members: npt.NDArray[Any]) -> Any:  # an ImageBatch
        index = torch.from_numpy(members)
        return ImageBatch(self.images[index], self.labels[index])
