"""The built-in scenes: what is drawn, what is said about it, and what is held out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regard.data.scenes import (
    COLOURS,
    MASKED,
    NOUNS,
    SHADES,
    SIDE,
    SIZES,
    DrawnScene,
    DrawnShape,
    Scenes,
    ScenesEs,
    ScenesParts,
    ScenesPartsEs,
    ShapeKind,
    is_held_out,
    scenes,
)
from regard.errors import UserError


def drawn(shape: str, colour: str, size: str, x: float = 24, y: float = 24) -> DrawnShape:
    return DrawnShape(ShapeKind(shape, colour, size), x, y, 5.0 if size == "small" else 9.0)


CROSS, RING = drawn("cross", "red", "small", 10, 24), drawn("ring", "blue", "large", 36, 24)
CAPTIONS = [
    (DrawnScene((CROSS,), None, (0, 0)), "a small red cross", "una cruz roja pequeña"),
    (DrawnScene((RING, RING), None, (0, 0)), "two large blue rings", "dos anillos azules grandes"),
    (DrawnScene((CROSS,) * 3, None, (0, 0)), "three small red crosses", "tres cruces rojas pequeñas"),
    (
        DrawnScene((CROSS, RING), "left", (0, 0)),
        "a small red cross is to the left of a large blue ring",
        "una cruz roja pequeña está a la izquierda de un anillo azul grande",
    ),
    (
        DrawnScene((drawn("star", "green", "small"), drawn("ring", "white", "large")), "inside", (0, 0)),
        "a small green star is inside a large white ring",
        "una estrella verde pequeña está dentro de un anillo blanco grande",
    ),
    (
        DrawnScene((drawn("moon", "yellow", "large"), drawn("circle", "purple", "large")), "below", (0, 0)),
        "a large yellow moon is below a large purple circle",
        "una luna amarilla grande está debajo de un círculo morado grande",
    ),
]


@pytest.mark.parametrize(("scene", "english", "spanish"), CAPTIONS, ids=[row[1] for row in CAPTIONS])
def test_captions_by_hand(scene: DrawnScene, english: str, spanish: str) -> None:
    assert (scene.caption("en"), scene.caption("es")) == (english, spanish)


def test_scenes_are_the_same_every_time_and_differ_between_splits() -> None:
    one, again, other = (list(scenes(split, 40)) for split in ("train", "train", "valid"))
    assert one == again and not set(one) & set(other)
    assert np.array_equal(one[3].pixels(), again[3].pixels())
    pairs = list(Scenes.examples("train", 40)), list(ScenesEs.examples("train", 40))
    assert [scene for scene, _ in pairs[0]] == [scene for scene, _ in pairs[1]] == one
    with pytest.raises(UserError, match="no split 'dev'"):
        next(scenes("dev"))


def combinations(scene: DrawnScene) -> list[tuple[str, str, str]]:
    kinds = [shape.kind for shape in scene.shapes]
    pairs = [("pair", kinds[0].shape, kinds[1].shape)] if scene.relation else []
    return [*(("colour", kind.shape, kind.colour) for kind in kinds), *pairs]


def test_training_has_no_combination_that_is_held_out_and_every_test_scene_has_one() -> None:
    train = {combination for scene in scenes("train", 1500) for combination in combinations(scene)}
    assert not any(is_held_out(*combination) for combination in train)
    test = [[c for c in combinations(scene) if is_held_out(*c)] for scene in scenes("test", 300)]
    assert all(test) and len({c for held_out in test for c in held_out}) > 5
    for names in (NOUNS, COLOURS, SIZES):  # every word occurs in training
        words = {word for scene in scenes("train", 300) for kind in scene.shapes for word in kind.kind}
        assert set(names) <= words


def test_what_a_caption_says_is_what_is_drawn() -> None:
    """The relation by the centres; the subject is the smaller one, or of equal ones the left or the upper one."""
    seen = set()
    for scene in scenes("train", 400):
        for n, shape in enumerate(scene.shapes):
            assert all(shape.radius <= centre <= SIDE - shape.radius for centre in (shape.x, shape.y))
            limits = (3.9, 5.5) if shape.kind.size == "small" else (8.5, 10.0)
            assert limits[0] <= shape.radius <= limits[1]
            if scene.relation != "inside":
                assert not any((shape.mask & other.mask).any() for other in scene.shapes[n + 1 :])
        if scene.relation is None:
            assert len({shape.kind for shape in scene.shapes}) == 1
            continue
        first, second = scene.shapes
        seen.add(scene.relation)
        dx, dy = first.x - second.x, first.y - second.y
        assert {
            "left": dx < -2 * abs(dy),
            "right": dx > 2 * abs(dy),
            "above": dy < -2 * abs(dx),
            "below": dy > 2 * abs(dx),
            "inside": math.hypot(dx, dy) + first.radius <= 0.68 * second.radius + 1,
        }[scene.relation]
        sizes = first.kind.size, second.kind.size
        assert sizes == ("small", "large") or (sizes[0] == sizes[1] and scene.relation in ("left", "above"))
    assert seen == {"left", "right", "above", "below", "inside"}


@pytest.mark.parametrize("shape", NOUNS)
def test_a_shape_has_its_area_and_its_colour(shape: str) -> None:
    """The areas of geometry, in units of the radius; the star and the moon by fine sampling elsewhere."""
    y, x = (np.mgrid[-400:400, -400:400] + 0.5) / 380
    distance, turn = np.hypot(x, y), np.degrees(np.arctan2(x, -y)) % 72
    sampled = {
        "star": distance <= 1.05 - 0.65 * np.minimum(turn, 72 - turn) / 36,
        "moon": (distance <= 1) & (np.hypot(x - 0.5, y) > 0.75),
    }
    area = {
        "circle": math.pi,
        "square": 1.7**2,
        "triangle": 1.85 * 1.85 / 2,
        "ring": math.pi * (1 - 0.68**2),
        "cross": 2 * 2 * 0.6 - 0.6**2,
        **{name: inside.mean() * (800 / 380) ** 2 for name, inside in sampled.items()},
    }[shape]
    offsets = [(23.03 + n / 10, 23.03 + k / 10) for n in range(10) for k in range(10)]  # the rim averages out
    areas = [drawn(shape, "red", "large", *offset).mask.sum() for offset in offsets]
    assert np.mean(areas) == pytest.approx(area * 9**2, rel=0.01)
    for colour, (_, *rgb) in COLOURS.items():
        scene = DrawnScene((DrawnShape(ShapeKind(shape, colour, "large"), 24, 24, 9.0),), None, (3, 4))
        shown = scene.pixels()[scene.shapes[0].mask].mean(0) / 255
        assert np.abs(shown / shown.max() - np.array(rgb) / max(rgb)).max() < 0.1


def test_parts_name_a_shape_or_its_colour_but_never_both_and_never_two_shapes() -> None:
    """So that nothing is learned about combinations, held out or not; nor are the held-out pairs of shapes drawn."""
    seen, nouns_of_two = set(), set()
    for scene, _ in ScenesParts.examples("train", 400):
        kinds = [shape.kind for shape in scene.shapes]
        assert all((kind.shape in NOUNS) != (kind.colour in COLOURS) for kind in kinds)
        words = scene.words("en")
        nouns, colours = ([word for word in words if word.role == role] for role in ("shape", "colour"))
        named = [noun.text != MASKED for noun in nouns]
        assert len(named) == len(colours) == (2 if scene.relation else 1) and sum(named) <= 1
        for noun, colour in zip(nouns, colours, strict=True):
            kind = kinds[noun.shapes[0]]
            assert colour.text == (kind.colour if kind.colour in COLOURS else MASKED)
            assert noun.text in (MASKED, kind.shape, f"{kind.shape}s", f"{kind.shape}es")
        if scene.relation and all(kind.shape in NOUNS for kind in kinds):
            nouns_of_two.add(tuple(named))
            assert not is_held_out("pair", kinds[0].shape, kinds[1].shape)
        seen |= {word.text for word in words}
    assert {*NOUNS, *COLOURS} <= seen and nouns_of_two == {(True, False), (False, True)}
    for split in ("valid", "test"):  # what training is for: whole captions
        assert list(ScenesParts.examples(split, 5)) == list(Scenes.examples(split, 5))


def test_colours_without_a_name_look_like_none_that_has_one() -> None:
    kinds = [shape.kind for scene, _ in ScenesParts.examples("train", 300) for shape in scene.shapes]
    unnamed = [kind for kind in kinds if kind.colour not in COLOURS]
    shades = np.linspace(*SHADES, 50)[:, None, None] * np.array([rgb for _, *rgb in COLOURS.values()])
    assert len(unnamed) > 100
    for kind in unnamed:
        assert np.linalg.norm(shades - np.array(kind.rgb), axis=-1).min() > 0.24
    assert ShapeKind("star", "#ff8000", "small").rgb == (1, 128 / 255, 0)


def test_blobs_look_like_none_of_the_shapes() -> None:
    """No shape, of any radius and at any place nearby, covers nearly the same pixels: the share of their union."""
    blobs = {shape for scene in scenes("train", 60, apart=True) for shape in scene.shapes if not shape.kind.has_noun}
    large = [shape.kind._replace(size="large") for shape in sorted(blobs, key=str)][:20]
    offsets, radii = (-2.0, 0.0, 2.0), (7.0, 8.0, 9.0)
    others = [DrawnShape(ShapeKind(noun, "red", "large"), 24 + x, 24 + y, r).mask
              for noun in NOUNS for x in offsets for y in offsets for r in radii]  # fmt: skip
    for kind in large:
        mask = DrawnShape(kind, 24, 24, 9.0).mask
        assert mask.any() and max((mask & other).sum() / (mask | other).sum() for other in others) < 0.9


def test_captions_of_parts_mask_the_missing_word() -> None:
    star, blob = drawn("star", "#ff8000", "small"), drawn("~0100000000", "red", "large")  # a feminine blob
    one = DrawnScene((star, blob), "left", (0, 0))
    assert one.caption("en") == "a small ___ star is to the left of a large red ___"
    assert one.caption("es") == "una estrella ___ pequeña está a la izquierda de una ___ roja grande"
    assert [word.role for word in one.words("en")[:4]] == ["article", "size", "colour", "shape"]
    several = DrawnScene((drawn("~0000000000", "red", "large"),) * 2, None, (0, 0))
    assert (several.caption("en"), several.caption("es")) == ("two large red ___", "dos ___ rojos grandes")
    assert next(ScenesPartsEs.examples("train", 1))[1] == next(scenes("train", 1, apart=True)).caption("es")


def test_the_first_shape_is_in_front() -> None:
    front, back = drawn("star", "red", "small"), drawn("square", "blue", "large")
    image = DrawnScene((front, back), "inside", (0, 0)).pixels().astype(int)
    red, blue = image[front.mask], image[back.mask & ~front.mask]
    assert (red[:, 0] > red[:, 2]).all() and (blue[:, 2] > blue[:, 0]).all()


def test_words_speak_of_shapes() -> None:
    scene = CAPTIONS[3][0]
    words = scene.words("en")
    assert [word.shapes for word in words] == [(0,)] * 4 + [(0, 1)] * 5 + [(1,)] * 4
    assert [word.role for word in words[:4]] == ["article", "size", "colour", "shape"]
    assert [word.role for word in scene.words("es")[:4]] == ["article", "shape", "colour", "size"]
    assert {word.role for word in words[4:9]} == {"relation"}
    both = scene.region((0, 1))
    assert np.array_equal(both, CROSS.mask | RING.mask) and both.sum() == CROSS.mask.sum() + RING.mask.sum()
    assert CAPTIONS[2][0].words("en")[0].shapes == (0, 1, 2)  # of three equal shapes, all
