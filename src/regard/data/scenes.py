"""Built-in images with captions: one to three coloured shapes, and what they are in English or Spanish.

A scene is a function of its split and its number, and its caption a function of what is drawn: a phrase for one shape
or for several equal ones ("two small red stars"), or a sentence about two ("a small red star is above a large blue
ring"), whose subject is the smaller one or, if they are equally large, the left or the upper one. Which shapes a word
speaks of is known.

About one in eight combinations of shape and colour, and of the two shapes of a sentence, is held out by a hash of the
words: `train` and `valid` have none of them, and a scene of `test` has at least one.

The corpus `scenes-parts` shows shapes and colours apart: shapes in random colours that look like none of the named ones
("a small ___ star"), and named colours on random blobs that look like none of the shapes ("a small red ___"). Of two
shapes in a scene one is named. `MASKED` stands for the missing words, whose loss is masked. A model that learns shapes
and colours together also learns which of them never meet; here, neither says anything about the other.
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
MASKED = "___"  # in captions: the name of a shape or a colour that has none
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
NOUN_SHARE = 0.7  # of the shapes of `scenes-parts`, which have a noun; the others have a named colour, as is easier
HOLLOW = "ff"  # last byte of the outline of a hollow blob

Mask = npt.NDArray[np.bool_]  # [SIDE, SIDE]
Pixels = npt.NDArray[np.uint8]  # [SIDE, SIDE, 3]
Language = Literal["en", "es"]
LANGUAGES: tuple[Language, ...] = get_args(Language)


class ShapeKind(NamedTuple):
    """The kind of a shape."""

    shape: str  # of NOUNS, or an outline without a name such as "~40c08020e0" (`_blob`)
    colour: str  # of COLOURS, or one without a name such as "#c08040"
    size: str

    @property
    def has_noun(self) -> bool:
        """Whether the shape has a name."""
        return self.shape in NOUNS

    @property
    def has_colour(self) -> bool:
        """Whether the colour has a name."""
        return self.colour in COLOURS

    @property
    def rgb(self) -> tuple[float, ...]:
        """Red, green and blue, from 0 to 1."""
        return COLOURS[self.colour][1:] if self.has_colour else tuple(n / 255 for n in bytes.fromhex(self.colour[1:]))


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
    masked_noun: int | None = None  # the number of a shape whose noun the caption leaves out

    def pixels(self) -> Pixels:
        """Draw the scene."""
        random = generator(*self.noise, 1)  # not the one that arranged the shapes
        image = np.full((SIDE, SIDE, 3), random.uniform(0.15, 0.5))
        free = np.ones((SIDE, SIDE), bool)  # the first shapes are in front
        for drawn in self.shapes:
            image[drawn.mask & free] = np.array(drawn.kind.rgb) * random.uniform(*SHADES)
            free &= ~drawn.mask
        image += random.normal(0, 0.04, image.shape)
        return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)

    def words(self, language: Language) -> list[CaptionWord]:
        """The words of the caption."""
        if self.relation is None:
            return _phrase(self.shapes[0].kind, tuple(range(len(self.shapes))), language)
        relation = RELATIONS[self.relation][language == "es"]
        between = [CaptionWord(word, "relation", (0, 1)) for word in relation.split()]
        first, second = (_phrase(drawn.kind, (n,), language) for n, drawn in enumerate(self.shapes))
        masked = ("shape", (self.masked_noun,))
        return [w._replace(text=MASKED) if w[1:] == masked else w for w in (*first, *between, *second)]

    def caption(self, language: Language) -> str:
        return " ".join(word.text for word in self.words(language))

    def region(self, shapes: Sequence[int]) -> Mask:
        """[SIDE, SIDE] the pixels of some of its shapes."""
        return np.logical_or.reduce([self.shapes[n].mask for n in shapes])

    @property
    def held_out(self) -> bool:
        """Whether it has a combination that is held out of training."""
        kinds = [drawn.kind for drawn in self.shapes]
        pairs = [("colour", kind.shape, kind.colour) for kind in kinds if kind.has_noun and kind.has_colour]
        if self.relation is not None and all(kind.has_noun for kind in kinds):
            pairs.append(("pair", kinds[0].shape, kinds[1].shape))
        return any(is_held_out(*pair) for pair in pairs)


@cache
def is_held_out(combination: str, first: str, second: str) -> bool:
    """Whether `train` and `valid` never combine these two: ("colour", shape, colour) or ("pair", shape, shape)."""
    return crc32(f"{combination}|{first}|{second}".encode()) % HELD_OUT_ONE_IN == 0


def _phrase(kind: ShapeKind, shapes: tuple[int, ...], language: Language) -> list[CaptionWord]:
    """ "a small red cross", "dos cruces rojas pequeñas"."""
    several = len(shapes) > 1
    noun, feminine = NOUNS.get(kind.shape, (MASKED, kind.shape[2] in "13579bdf"))  # of blobs: a random gender
    colour = kind.colour if kind.has_colour else MASKED
    if language == "en":
        article = NUMBERS[len(shapes)][0] if several else "a"
        named = (english.plural(kind.shape) if several else kind.shape) if kind.has_noun else MASKED
        parts = [(article, "article"), (kind.size, "size"), (colour, "colour"), (named, "shape")]
    else:
        article = NUMBERS[len(shapes)][1] if several else ("una" if feminine else "un")
        noun = spanish.plural(noun) if several and kind.has_noun else noun

        def agreeing(word: str) -> str:
            return spanish.adjective_forms(word)[feminine][several]

        colour = agreeing(COLOURS[kind.colour][0]) if kind.has_colour else MASKED
        parts = [(article, "article"), (noun, "shape"), (colour, "colour"), (agreeing(SIZES[kind.size]), "size")]
    return [CaptionWord(text, role, shapes) for text, role in parts]


@cache
def _grid() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    return y, x


def _inside(shape: str, dx: npt.NDArray[np.float64], dy: npt.NDArray[np.float64]) -> Mask:
    """Whether a shape covers points, given relative to its centre in units of its radius."""
    if shape not in NOUNS:
        covered = _blob(shape, dx, dy)
    elif shape in ("square", "cross"):
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


def _blob(outline: str, dx: npt.NDArray[np.float64], dy: npt.NDArray[np.float64]) -> Mask:
    """A lobed outline without a name, as of a bean or a puddle; every third one is hollow.

    Its radius is 1 + a cos(2 angle + b) + c cos(3 angle + d), scaled to 1 at most. Of the five bytes in hexadecimal
    digits, four say what a to d are, and the last whether it is hollow.
    """
    two, turn_two, three, turn_three, last = (n / 255 for n in bytes.fromhex(outline[1:]))

    def radius(angle: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        waves = (0.2 + 0.2 * two) * np.cos(2 * (angle + np.pi * turn_two))
        return np.asarray(1 + waves + (0.12 + 0.18 * three) * np.cos(3 * (angle + 2 * np.pi / 3 * turn_three)))

    edge = radius(np.arctan2(dx, dy)) / radius(np.linspace(0, 2 * np.pi, 60)).max()
    distance = np.hypot(dx, dy)
    return np.asarray((distance <= edge) & ((distance > 0.6 * edge) | (last < 2 / 3)))


# -- random scenes -----------------------------------------------------------------------------------------------------


def _attempt(arrangement: str, random: np.random.Generator, noise: tuple[int, int], apart: bool) -> DrawnScene | None:
    """A random scene of an arrangement; None if its shapes do not fit."""
    relation: str | None = None
    if arrangement == "inside":
        shapes, relation = _nested(random, apart), "inside"
    elif arrangement == "related":
        shapes, relation = _related(random, apart)
    else:
        kind = _kind(random, apart)
        shapes = [_placed(kind, random) for _ in range(SINGLE_KIND.index(arrangement))]
        shapes = [] if any(_overlap(*pair) for pair in combinations(shapes, 2)) else shapes
    both_nouns = apart and relation is not None and all(drawn.kind.has_noun for drawn in shapes)
    masked_noun = int(random.integers(2)) if both_nouns else None  # so that no noun is learned from another
    return DrawnScene(tuple(shapes), relation, noise, masked_noun) if shapes else None


def _nested(random: np.random.Generator, apart: bool) -> list[DrawnShape]:
    """A small shape, and a large ring of another colour around it; none if the colours are the same."""
    inner = _kind(random, apart)._replace(size="small")
    outer = _kind(random, apart)._replace(size="large")
    outer = outer._replace(shape="ring" if outer.has_noun else outer.shape[:-2] + HOLLOW)
    around = _placed(outer, random)
    x, y = (centre + float(random.uniform(-0.5, 0.5)) for centre in (around.x, around.y))
    within = DrawnShape(inner, x, y, float(random.uniform(*RADII["small"])) - 0.5)
    return [within, around] if inner.colour != outer.colour else []


def _related(random: np.random.Generator, apart: bool) -> tuple[list[DrawnShape], str | None]:
    """Two different shapes, the one that the caption begins with first, and their relation; none if it is not clear."""
    first, second = (_placed(_kind(random, apart), random) for _ in range(2))
    relation = _relation(first, second)
    if first.kind == second.kind or _overlap(first, second) or relation is None:
        return [], None
    sizes = first.kind.size, second.kind.size
    if sizes == ("large", "small") or (sizes[0] == sizes[1] and relation in ("right", "below")):
        return [second, first], OPPOSITES[relation]
    return [first, second], relation


def _kind(random: np.random.Generator, apart: bool) -> ShapeKind:
    """A random kind; `apart`: it has a noun and a colour without a name, or less often the reverse."""
    kind = ShapeKind(*(names[int(random.random() * len(names))] for names in CHOICES))
    if not apart:
        return kind
    if random.random() < NOUN_SHARE:
        return kind._replace(colour=_unnamed_colour(random))
    return kind._replace(shape="~" + random.bytes(5).hex())


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


def scenes(split: str, count: int | None = None, apart: bool = False) -> Iterator[DrawnScene]:
    """The first `count` scenes of a split; `apart`: of each shape, either the noun or the colour has no name."""
    if split not in SPLITS:
        raise UserError(f"the corpora of scenes have no split {split!r}; they have {', '.join(SPLITS)}")
    seed, usual = SPLITS[split]
    names, limits = list(ARRANGEMENTS), np.cumsum(list(ARRANGEMENTS.values()))
    for number in range(usual if count is None else count):
        random = generator(seed, number)
        arrangement = names[int(np.searchsorted(limits, random.random() * limits[-1], "right"))]
        scene = None
        while scene is None or scene.held_out != (split == "test"):
            scene = _attempt(arrangement, random, (seed, number), apart)
        yield scene


@CORPORA.register("scenes")
class Scenes:
    """The built-in corpus `scenes`, with English captions."""

    kind = "captions"
    language: Language = "en"
    apart = False  # in training; the held-out splits are the same

    @classmethod
    def examples(cls, split: str, count: int | None = None) -> Iterator[tuple[DrawnScene, str]]:
        """The first `count` scenes of a split, each with its caption."""
        return ((scene, scene.caption(cls.language)) for scene in scenes(split, count, cls.apart and split == "train"))


@CORPORA.register("scenes-es")
class ScenesEs(Scenes):
    """The same scenes with Spanish captions."""

    language: Language = "es"


@CORPORA.register("scenes-parts")
class ScenesParts(Scenes):
    """Scenes to learn shapes and colours from, each without the other."""

    apart = True
    held_out_corpus = "scenes"  # has the same held-out splits: a mix of both has them once


@CORPORA.register("scenes-parts-es")
class ScenesPartsEs(ScenesParts):
    """The same scenes with Spanish captions."""

    held_out_corpus = "scenes-es"
    language: Language = "es"
