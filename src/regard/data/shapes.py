"""Built-in images of coloured shapes on a noisy background. The class is colour and shape, as in "red circle".

`shapes` has one shape near the middle of an image. `clutter` has one anywhere, among grey shapes that do not matter:
the pixels that an explanation has to find are known. An image is a function of its split and its number, so the splits
never share an image.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from regard.data.image_files import Example, Image
from regard.data.stream import generator
from regard.errors import UserError
from regard.registry import CORPORA

SIZE, CLUTTER_SIZE = 24, 48  # pixels of a side
GREY_SHAPES = 3  # number of grey shapes in a cluttered image
COLOURS = {"red": (0.9, 0.2, 0.2), "green": (0.2, 0.8, 0.3), "blue": (0.25, 0.35, 0.95)}
SHAPES = ("circle", "square", "triangle", "cross")
CLASSES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
SPLITS = {"train": (0, 12000), "valid": (1, 600), "test": (2, 600)}  # seed and number of images
NOISE = 0.08
Region = npt.NDArray[np.bool_]  # [side, side], True for the pixels of a shape


@CORPORA.register("shapes")
class Shapes:
    """The built-in corpus `shapes`."""

    kind = "images"
    name = "shapes"
    size = SIZE

    @classmethod
    def images(cls, split: str, count: int | None = None) -> Iterator[Example]:
        """The first `count` images of a split, each with the name of its class."""
        return ((image, label) for image, label, _ in cls.examples(split, count))

    @classmethod
    def examples(cls, split: str, count: int | None = None) -> Iterator[tuple[Image, str, Region]]:
        """The same, with the region of the coloured shape."""
        if split not in SPLITS:
            raise UserError(f"corpus {cls.name!r} has no split {split!r}; it has {', '.join(SPLITS)}")
        seed, usual = SPLITS[split]
        for number in range(usual if count is None else count):
            label = CLASSES[number % len(CLASSES)]
            image, region = cls.draw(label, generator(seed, number))
            yield image, label, region

    @classmethod
    def draw(cls, label: str, random: np.random.Generator) -> tuple[Image, Region]:
        """An image of this class; position, size, shade and noise are drawn."""
        radius = random.uniform(6, 9)
        centre = SIZE / 2 + random.uniform(-2.5, 2.5, 2)
        colour, shape = label.split()
        region = inside(shape, centre, radius, SIZE)
        image = np.full((SIZE, SIZE, 3), random.uniform(0.05, 0.6))
        image[region] = np.array(COLOURS[colour]) * random.uniform(0.7, 1.1)
        return _noisy(image, random), region


@CORPORA.register("clutter")
class Clutter(Shapes):
    """The built-in corpus `clutter`."""

    name = "clutter"
    size = CLUTTER_SIZE

    @classmethod
    def draw(cls, label: str, random: np.random.Generator) -> tuple[Image, Region]:
        """An image with a shape of this class and three grey ones, each in a quarter of its own."""
        colour, shape = label.split()
        shapes = [shape, *random.choice(SHAPES, GREY_SHAPES)]
        radii = random.uniform(5, 8, len(shapes))
        centres = _apart(radii, random)
        background = random.uniform(0.05, 0.6)
        image = np.full((CLUTTER_SIZE, CLUTTER_SIZE, 3), background)
        for name, centre, radius in zip(shapes[1:], centres[1:], radii[1:], strict=True):
            image[inside(name, centre, radius, CLUTTER_SIZE)] = (background + random.uniform(0.25, 0.75)) % 1.0
        region = inside(shape, centres[0], radii[0], CLUTTER_SIZE)
        image[region] = np.array(COLOURS[colour]) * random.uniform(0.7, 1.1)
        return _noisy(image, random), region


def inside(shape: str, centre: npt.NDArray[np.float64], radius: float, size: int) -> Region:
    """The pixels of a shape around `centre` (x, y)."""
    y, x = np.mgrid[:size, :size]
    dx, dy = (x - centre[0]) / radius, (y - centre[1]) / radius  # the shape is within [-1, 1]
    region: Region = {
        "circle": dx**2 + dy**2 <= 1,
        "square": np.maximum(abs(dx), abs(dy)) <= 0.85,
        "triangle": (dy <= 0.9) & (dy >= 2 * abs(dx) - 1),
        "cross": (np.minimum(abs(dx), abs(dy)) <= 0.3) & (np.maximum(abs(dx), abs(dy)) <= 1),
    }[shape]
    return region


def _apart(radii: npt.NDArray[np.float64], random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Random centres [4, 2] of shapes with these radii, one in each quarter of the image."""
    half = CLUTTER_SIZE // 2
    quarters = random.permutation([[0, 0], [0, half], [half, 0], [half, half]])
    return quarters + np.stack([random.uniform(radius, half - 1 - radius, 2) for radius in radii])


def _noisy(image: npt.NDArray[np.float64], random: np.random.Generator) -> Image:
    noisy = np.clip(image + random.normal(0, NOISE, image.shape), 0, 1)
    return np.rint(255 * noisy).astype(np.uint8)
