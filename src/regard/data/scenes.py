"""Built-in images with captions: one to three coloured shapes, and what they are in English or Spanish.

A scene is a function of its split and its number, and its caption a function of what is drawn: a phrase for one shape
or for several equal ones ("two small red stars"), or a sentence about two ("a small red star is above a large blue
ring"), whose subject is the smaller one or, if they are equally large, the left or the upper one. Which shapes a word
speaks of is known.

About one in eight combinations of shape and colour, and of the two shapes of a sentence, is held out by a hash of the
words: `train` and `valid` have none of them, and a scene of `test` has at least one.

The corpus `scenes-shapes` is a first stage of training: nearly all of its shapes have random colours that look like
none of the named ones, and captions leave them out ("a small star"). A model that names shapes surely before it learns
colours has no reason to learn which shapes it never sees in a colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Literal, NamedTuple, get_args
from zlib import crc32

import numpy as np
import numpy.typing as npt

from regard.data.builtin import english, spanish
from regard.data.stream import generator
from regard.errors import UserError
from regard.registry import CORPORA

SIDE = 48  # pixels of an image
NOUNS = {  # English, and the Spanish noun with its gender
    "circle": ("círculo", False),
    "square": ("cuadrado", False),
    "triangle": ("triángulo", False),
    "ring": ("anillo", False),
    "cross": ("cruz", True),
    "star": ("estrella", True),
    "moon": ("luna", True),
}
COLOURS = {  # English, Spanish, red, green, blue
    "red": ("rojo", 0.90, 0.12, 0.12),
    "green": ("verde", 0.10, 0.70, 0.20),
    "blue": ("azul", 0.15, 0.30, 0.95),
    "yellow": ("amarillo", 0.95, 0.85, 0.10),
    "purple": ("morado", 0.60, 0.15, 0.75),
    "white": ("blanco", 0.95, 0.95, 0.95),
}
PALETTE = np.array([rgb for _, *rgb in COLOURS.values()])  # [named colours, 3]
COLOUR_GAP = 0.25  # distance of unnamed colours from the named ones, at least; channels are from 0 to 1
SHADES = (0.8, 1.05)  # what the colour of a shape is multiplied with
RADII = {"small": (4.5, 5.5), "large": (8.5, 10.0)}
SIZES = {"small": "pequeño", "large": "grande"}
CHOICES = [tuple(names) for names in (NOUNS, COLOURS, SIZES)]
RELATIONS = {
    "left": ("is to the left of", "está a la izquierda de"),
    "right": ("is to the right of", "está a la derecha de"),
    "above": ("is above", "está encima de"),
    "below": ("is below", "está debajo de"),
    "inside": ("is inside", "está dentro de"),
}
NUMBERS = {2: ("two", "dos"), 3: ("three", "tres")}
ARRANGEMENTS = {"one": 0.2, "two": 0.15, "three": 0.1, "inside": 0.1, "related": 0.45}  # share of the scenes
SINGLE_KIND = ("none", "one", "two", "three")  # arrangements of equal shapes, by their number
OPPOSITES = {"left": "right", "right": "left", "above": "below", "below": "above"}
SPLITS = {"train": (0, 24000), "valid": (1, 500), "test": (2, 1000)}  # seed and number of scenes
HELD_OUT_ONE_IN = 8
GAP = 2.0  # pixels between two shapes, at least

Mask = npt.NDArray[np.bool_]  # [SIDE, SIDE]
Pixels = npt.NDArray[np.uint8]  # [SIDE, SIDE, 3]
Language = Literal["en", "es"]
LANGUAGES: tuple[Language, ...] = get_args(Language)


class ShapeKind(NamedTuple):
    """The kind of a shape."""

    shape: str
    colour: str  # of COLOURS, or an unnamed one such as "#c08040"
    size: str

    @property
    def named(self) -> bool:
        """Whether captions name the colour."""
        return self.colour in COLOURS

    @property
    def rgb(self) -> tuple[float, ...]:
        """Red, green and blue, from 0 to 1."""
        return COLOURS[self.colour][1:] if self.named else tuple(n / 255 for n in bytes.fromhex(self.colour[1:]))


@dataclass(frozen=True)
class DrawnShape:
    """A shape and where it is: its centre and its radius, in pixels."""

    kind: ShapeKind
    x: float
    y: float
    radius: float

    @property
    def mask(self) -> Mask:
        """The pixels that it covers."""
        y, x = _grid()
        return _inside(self.kind.shape, (x - self.x) / self.radius, (y - self.y) / self.radius)


class CaptionWord(NamedTuple):
    """A word of a caption, its part in it, and the numbers of the shapes that it speaks of."""

    text: str
    role: str  # "article", "size", "colour", "shape" or "relation"
    shapes: tuple[int, ...]


@dataclass(frozen=True)
class DrawnScene:
    """Shapes on a grey background; `relation` is that of the first of two different ones to the second."""

    shapes: tuple[DrawnShape, ...]
    relation: str | None
    noise: tuple[int, int]  # the seed of background, shades and noise

    def pixels(self) -> Pixels:
        """Draw the scene."""
        random = generator(*self.noise, 1)  # not the one that arranged the shapes
        image = np.full((SIDE, SIDE, 3), random.uniform(0.15, 0.5))
        for drawn in self.shapes:
            image[drawn.mask] = np.array(drawn.kind.rgb) * random.uniform(*SHADES)
        image += random.normal(0, 0.04, image.shape)
        return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)

    def words(self, language: Language) -> list[CaptionWord]:
        """The words of the caption."""
        if self.relation is None:
            return _phrase(self.shapes[0].kind, tuple(range(len(self.shapes))), language)
        relation = RELATIONS[self.relation][language == "es"]
        between = [CaptionWord(word, "relation", (0, 1)) for word in relation.split()]
        first, second = (_phrase(drawn.kind, (n,), language) for n, drawn in enumerate(self.shapes))
        return [*first, *between, *second]

    def caption(self, language: Language) -> str:
        return " ".join(word.text for word in self.words(language))

    def region(self, shapes: Sequence[int]) -> Mask:
        """[SIDE, SIDE] the pixels of some of its shapes."""
        return np.logical_or.reduce([self.shapes[n].mask for n in shapes])

    @property
    def held_out(self) -> bool:
        """Whether it has a combination that is held out of training."""
        kinds = [drawn.kind for drawn in self.shapes]
        pairs = [("colour", kind.shape, kind.colour) for kind in kinds if kind.named]
        pairs += [] if self.relation is None else [("pair", kinds[0].shape, kinds[1].shape)]
        return any(is_held_out(*pair) for pair in pairs)


@cache
def is_held_out(combination: str, first: str, second: str) -> bool:
    """Whether `train` and `valid` never combine these two: ("colour", shape, colour) or ("pair", shape, shape)."""
    return crc32(f"{combination}|{first}|{second}".encode()) % HELD_OUT_ONE_IN == 0


def _phrase(kind: ShapeKind, shapes: tuple[int, ...], language: Language) -> list[CaptionWord]:
    """ "a small red cross", "dos cruces rojas pequeñas"."""
    several, (noun, feminine) = len(shapes) > 1, NOUNS[kind.shape]
    if language == "en":
        article = NUMBERS[len(shapes)][0] if several else "a"
        named = english.plural(kind.shape) if several else kind.shape
        colours = [(kind.colour, "colour")] if kind.named else []
        parts = [(article, "article"), (kind.size, "size"), *colours, (named, "shape")]
    else:
        article = NUMBERS[len(shapes)][1] if several else ("una" if feminine else "un")
        named = spanish.plural(noun) if several else noun
        adjectives = [(COLOURS[kind.colour][0], "colour")] if kind.named else []
        adjectives += [(SIZES[kind.size], "size")]
        agreeing = [(spanish.adjective_forms(word)[feminine][several], role) for word, role in adjectives]
        parts = [(article, "article"), (named, "shape"), *agreeing]
    return [CaptionWord(text, role, shapes) for text, role in parts]


@cache
def _grid() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    return y, x


def _inside(shape: str, dx: npt.NDArray[np.float64], dy: npt.NDArray[np.float64]) -> Mask:
    """Whether a shape covers points, given relative to its centre in units of its radius."""
    if shape in ("square", "cross"):
        near, far = np.minimum(abs(dx), abs(dy)), np.maximum(abs(dx), abs(dy))
        covered = far <= 0.85 if shape == "square" else (near <= 0.3) & (far <= 1)
    elif shape == "triangle":
        covered = (dy <= 0.85) & (dy >= 2 * abs(dx) - 1)
    elif shape == "star":  # five rays: the radius falls from 1 at a ray to 0.4 between two
        angle = abs((np.arctan2(dx, -dy) / (2 * np.pi / 5) + 0.5) % 1 - 0.5) * 2
        covered = np.hypot(dx, dy) <= 1.05 - 0.65 * angle
    else:
        distance = np.hypot(dx, dy)
        covered = distance <= 1
        if shape == "ring":
            covered &= distance >= 0.68
        elif shape == "moon":
            covered &= np.hypot(dx - 0.5, dy) > 0.75
    return np.asarray(covered)


# -- random scenes -----------------------------------------------------------------------------------------------------


def _attempt(
    arrangement: str, random: np.random.Generator, noise: tuple[int, int], unnamed: float
) -> DrawnScene | None:
    """A random scene of an arrangement; None if its shapes do not fit."""
    relation: str | None = None
    if arrangement == "inside":
        shapes, relation = _nested(random, unnamed), "inside"
    elif arrangement == "related":
        shapes, relation = _related(random, unnamed)
    else:
        kind = _kind(random, unnamed)
        shapes = [_placed(kind, random) for _ in range(SINGLE_KIND.index(arrangement))]
        shapes = [] if any(_overlap(*pair) for pair in combinations(shapes, 2)) else shapes
    return DrawnScene(tuple(shapes), relation, noise) if shapes else None


def _nested(random: np.random.Generator, unnamed: float) -> list[DrawnShape]:
    """A small shape, and a large ring of another colour around it; none if the colours are the same."""
    inner = _kind(random, unnamed)._replace(size="small")
    outer = _kind(random, unnamed)._replace(shape="ring", size="large")
    around = _placed(outer, random)
    x, y = (centre + float(random.uniform(-0.5, 0.5)) for centre in (around.x, around.y))
    within = DrawnShape(inner, x, y, float(random.uniform(*RADII["small"])) - 0.5)
    return [within, around] if inner.colour != outer.colour else []


def _related(random: np.random.Generator, unnamed: float) -> tuple[list[DrawnShape], str | None]:
    """Two different shapes, the one that the caption begins with first, and their relation; none if it is not clear."""
    first, second = (_placed(_kind(random, unnamed), random) for _ in range(2))
    relation = _relation(first, second)
    if first.kind == second.kind or _overlap(first, second) or relation is None:
        return [], None
    sizes = first.kind.size, second.kind.size
    if sizes == ("large", "small") or (sizes[0] == sizes[1] and relation in ("right", "below")):
        return [second, first], OPPOSITES[relation]
    return [first, second], relation


def _kind(random: np.random.Generator, unnamed: float) -> ShapeKind:
    """A random kind, whose colour is with this probability an unnamed one."""
    kind = ShapeKind(*(names[int(random.random() * len(names))] for names in CHOICES))
    return kind._replace(colour=_unnamed_colour(random)) if unnamed and random.random() < unnamed else kind


def _unnamed_colour(random: np.random.Generator) -> str:
    """A random colour that differs from the background and from all shades of the named colours."""
    while True:
        rgb = random.random(3)
        shades = np.clip((rgb @ PALETTE.T) / (PALETTE**2).sum(1), *SHADES)  # the nearest of each named colour
        if rgb.max() > 0.6 and np.linalg.norm(rgb - shades[:, None] * PALETTE, axis=1).min() > COLOUR_GAP:
            return "#" + np.rint(rgb * 255).astype(np.uint8).tobytes().hex()


def _placed(kind: ShapeKind, random: np.random.Generator) -> DrawnShape:
    radius = random.uniform(*RADII[kind.size])
    x, y = random.uniform(radius + 0.5, SIDE - radius - 0.5, 2)
    return DrawnShape(kind, float(x), float(y), float(radius))


def _overlap(first: DrawnShape, second: DrawnShape) -> bool:
    return math.hypot(first.x - second.x, first.y - second.y) < first.radius + second.radius + GAP


def _relation(first: DrawnShape, second: DrawnShape) -> str | None:
    """The relation of the first of two shapes to the second; None if it is not clear."""
    dx, dy = first.x - second.x, first.y - second.y
    if 2 * abs(dy) < abs(dx):
        return "left" if dx < 0 else "right"
    if 2 * abs(dx) < abs(dy):
        return "above" if dy < 0 else "below"
    return None


def scenes(split: str, count: int | None = None, unnamed: float = 0.0) -> Iterator[DrawnScene]:
    """The first `count` scenes of a split; `unnamed` is the share of kinds whose colour captions do not name."""
    if split not in SPLITS:
        raise UserError(f"the corpora of scenes have no split {split!r}; they have {', '.join(SPLITS)}")
    seed, usual = SPLITS[split]
    names, limits = list(ARRANGEMENTS), np.cumsum(list(ARRANGEMENTS.values()))
    for number in range(usual if count is None else count):
        random = generator(seed, number)
        arrangement = names[int(np.searchsorted(limits, random.random() * limits[-1], "right"))]
        scene = None
        while scene is None or scene.held_out != (split == "test"):
            scene = _attempt(arrangement, random, (seed, number), unnamed)
        yield scene


@CORPORA.register("scenes")
class Scenes:
    """The built-in corpus `scenes`, with English captions."""

    kind = "captions"
    language: Language = "en"
    unnamed = 0.0

    @classmethod
    def examples(cls, split: str, count: int | None = None) -> Iterator[tuple[DrawnScene, str]]:
        """The first `count` scenes of a split, each with its caption."""
        return ((scene, scene.caption(cls.language)) for scene in scenes(split, count, cls.unnamed))


@CORPORA.register("scenes-shapes")
class ScenesShapes(Scenes):
    """Scenes whose shapes nearly all have colours that captions do not name, to learn shapes from first."""

    unnamed = 0.98  # the others are for the vocabulary


@CORPORA.register("scenes-es")
class ScenesEs(Scenes):
    """The same scenes with Spanish captions."""

    language: Language = "es"
