"""Images from folders, tables, .npz and idx files: formats, the cache, splits, and bad input in one line each."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard import tasks
from regard.data.cache_entry import cache_home
from regard.data.image_files import ImageShape, class_folders, read_idx
from regard.data.images import ImageStore, is_decoded, open_images, split_members
from regard.errors import UserError
from regard.recipes.schema import DataSettings, Recipe
from regard.runs import LoadedRun
from regard.training.setup import train

pil = pytest.importorskip("PIL.Image")
RGB, GREY = ImageShape(8, 3), ImageShape(8, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "images"


def noise(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def folder(tmp_path: Path, classes: dict[str, int], side: int = 8) -> Path:
    """A folder of images, whose brightness is 20 for the first class, 220 for the last."""
    home = tmp_path / "images"
    for n, (name, count) in enumerate(classes.items()):
        (home / name).mkdir(parents=True)
        level = 20 + 200 * n // max(len(classes) - 1, 1)
        for i in range(count):
            pixels = np.clip(level + noise(100 * n + i, side, side, 3).astype(int) // 16, 0, 255).astype(np.uint8)
            pil.fromarray(pixels).save(home / name / f"{i}.png")
    return home


def data(images: Any, **settings: Any) -> DataSettings:
    return DataSettings.model_validate({"images": str(images), **settings})


def test_files_of_the_right_size_are_read_as_their_pixels(tmp_path: Path) -> None:
    pixels = noise(0, 8, 8, 3)
    for name, mode in (("a.png", "RGB"), ("a.bmp", "RGB"), ("a.webp", "RGB")):
        pil.fromarray(pixels, mode).save(tmp_path / name, **({"lossless": True} if name.endswith("webp") else {}))
        np.testing.assert_array_equal(RGB.read(tmp_path / name), pixels)
    pil.fromarray(pixels[:, :, 0]).save(tmp_path / "grey.png")
    np.testing.assert_array_equal(RGB.read(tmp_path / "grey.png"), pixels[:, :, :1].repeat(3, 2))
    np.testing.assert_array_equal(GREY.read(tmp_path / "grey.png"), pixels[:, :, :1])
    pil.fromarray(pixels[:, :, 0].astype(np.uint16) << 8).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(GREY.read(tmp_path / "deep.png"), pixels[:, :, :1])


def test_transparent_pixels_become_white_and_orientation_is_followed(tmp_path: Path) -> None:
    clear = np.concatenate([noise(0, 8, 8, 3), np.zeros((8, 8, 1), np.uint8)], 2)
    clear[:, :4, 3] = 255
    pil.fromarray(clear).save(tmp_path / "clear.png")
    found = RGB.read(tmp_path / "clear.png")
    np.testing.assert_array_equal(found[:, :4], clear[:, :4, :3])
    assert (found[:, 4:] == 255).all()
    turned, exif = pil.fromarray(noise(1, 8, 8, 3)), pil.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to show it upright
    turned.save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(RGB.read(tmp_path / "turned.png"), np.rot90(np.asarray(turned), -1))


def test_other_sizes_are_scaled_and_cropped_to_the_centre() -> None:
    wide = np.zeros((16, 64, 3), np.uint8)
    wide[:, 24:40] = 200  # the middle 16 columns of 64
    found = RGB.of_array(wide)
    assert found.shape == (8, 8, 3) and found.min() > 150 and (found[:, 2:6] == 200).all()  # interpolated at the edges
    np.testing.assert_array_equal(RGB.of_array(noise(0, 8, 8, 3) / 255.0), noise(0, 8, 8, 3))


def test_other_sizes_are_stretched_if_asked(tmp_path: Path) -> None:
    wide = noise(2, 10, 30, 3)
    nearest = ImageShape(8, 3, "stretch", "nearest").of_array(wide)
    rows, columns = (np.arange(8) + 0.5) * 10 // 8, (np.arange(8) + 0.5) * 30 // 8  # the centres of the new pixels
    np.testing.assert_array_equal(nearest, wide[rows.astype(int)[:, None], columns.astype(int)])
    pil.fromarray(noise(3, 400, 640, 3)).save(tmp_path / "large.jpg")
    found = ImageShape(8, 3, "stretch", "bilinear").read(tmp_path / "large.jpg")
    whole = pil.open(tmp_path / "large.jpg").resize((8, 8), pil.Resampling.BILINEAR)
    np.testing.assert_array_equal(found, np.asarray(whole))


def test_the_cache_tells_how_images_were_scaled(tmp_path: Path) -> None:
    home = folder(tmp_path, {"cat": 1, "dog": 1}, side=12)
    open_images(str(home), data(home), RGB)
    assert is_decoded(str(home), data(home), ImageShape(8, 3, "crop", "bicubic"))
    for other in (ImageShape(8, 3, "stretch"), ImageShape(8, 3, "crop", "box")):
        assert not is_decoded(str(home), data(home), other)


def test_a_folder_gives_one_image_of_each_class_in_turn(tmp_path: Path) -> None:
    home = folder(tmp_path, {"cat": 3, "dog": 1, "owl": 2})
    (home / "cat" / "notes.txt").write_text("not an image")
    (home / ".hidden").mkdir()
    assert [name for _, name in class_folders(home)] == ["cat", "dog", "owl", "cat", "owl", "cat"]
    store = open_images(str(home), data(home), RGB)
    assert len(store) == 6 and store.classes == ("cat", "dog", "owl") and store.pixels.shape == (6, 8, 8, 3)
    np.testing.assert_array_equal(store[0][0], np.asarray(pil.open(home / "cat" / "0.png")))


def test_a_table_names_files_relative_to_itself(tmp_path: Path) -> None:
    home = folder(tmp_path, {"cat": 2, "dog": 2})
    table = home / "list.tsv"
    table.write_text("dog/1.png\ta dog\ncat/0.png\ta cat\n")
    store = open_images(str(table), data(table), RGB)
    assert [store[n][1] for n in range(2)] == ["a dog", "a cat"]
    np.testing.assert_array_equal(store[0][0], np.asarray(pil.open(home / "dog" / "1.png")))


def test_npz_and_idx_files_give_their_arrays(tmp_path: Path) -> None:
    pixels, labels = noise(0, 5, 8, 8, 3), np.array([2, 0, 1, 1, 2])
    np.savez(tmp_path / "a.npz", images=pixels, labels=labels, classes=np.array(["x", "y", "z"]))
    store = open_images(str(tmp_path / "a.npz"), data("a.npz"), RGB)
    np.testing.assert_array_equal(store.pixels, pixels)
    assert [store[n][1] for n in range(5)] == ["z", "x", "y", "y", "z"]
    renamed = data("a.npz", classes=["X", "Y", "Z"])
    assert open_images(str(tmp_path / "a.npz"), renamed, RGB)[0][1] == "Z"
    grey = pixels[..., 0]
    images, names = tmp_path / "train-images-idx3-ubyte.gz", tmp_path / "train-labels-idx1-ubyte.gz"
    images.write_bytes(gzip.compress(struct.pack(">HBBIII", 0, 8, 3, 5, 8, 8) + grey.tobytes()))
    names.write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 5) + labels.astype(np.uint8).tobytes()))
    np.testing.assert_array_equal(read_idx(images, 3), grey)
    store = open_images("train-images-idx3-ubyte", data("x", folder=str(tmp_path)), GREY)
    np.testing.assert_array_equal(store.pixels[..., 0], grey)
    assert store[0][1] == "2"


def test_images_are_decoded_once_and_again_when_a_file_or_the_size_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, read = folder(tmp_path, {"cat": 2, "dog": 2}), []
    plain = ImageShape.read
    monkeypatch.setattr(ImageShape, "read", lambda self, path: read.append(path) or plain(self, path))
    assert not is_decoded(str(home), data(home), RGB)
    first = open_images(str(home), data(home), RGB)
    assert is_decoded(str(home), data(home), RGB)
    assert len(read) == 4 and open_images(str(home), data(home), RGB).digest() == first.digest() and len(read) == 4
    open_images(str(home), data(home), GREY)
    assert len(read) == 8
    pil.fromarray(noise(9, 8, 8, 3)).save(home / "dog" / "7.png")
    assert len(open_images(str(home), data(home), RGB)) == 5 and len(read) == 13
    (damaged, *_) = (entry for entry in cache.iterdir() if (entry / "pixels.bin").stat().st_size == 5 * 192)
    content = bytearray((damaged / "pixels.bin").read_bytes())
    content[100] ^= 1
    (damaged / "pixels.bin").write_bytes(content)
    said: list[str] = []
    assert len(open_images(str(home), data(home), RGB, say=said.append)) == 5 and len(read) == 18
    assert "damaged: rebuilding" in said[0]
    assert isinstance(first.pixels.base, np.memmap) and cache_home() == tmp_path / "cache"


def test_held_out_images_are_neither_trained_on_nor_shared() -> None:
    both = data("x", held_out=0.1, split_seed=3)
    parts = [split_members(200, both, split).tolist() for split in ("train", "valid", "test")]
    assert sorted(n for part in parts for n in part) == list(range(200)) and [len(part) for part in parts] == [
        160,
        20,
        20,
    ]
    tested = data("x", held_out=0.1, split_seed=3, test=["t"])
    assert len(split_members(200, tested, "train")) == 180
    assert split_members(200, tested, "valid").tolist() == parts[1]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda home: home.mkdir(), "has no folders: it needs one for each class"),
        (lambda home: (home / "cat").mkdir(parents=True), "cat has no images"),
        (lambda home: (folder(home.parent, {"cat": 1}) / "cat" / "bad.png").write_text("x"), r"cannot read .*bad\.png"),
        (lambda home: None, "no such file"),
        (lambda home: home.with_suffix(".npz").write_bytes(b"junk"), "cannot read"),
    ],
)
def test_bad_data_get_one_line(make: Any, why: str, tmp_path: Path) -> None:
    home = tmp_path / "images"
    make(home)
    path = home if not home.with_suffix(".npz").exists() else home.with_suffix(".npz")
    with pytest.raises(UserError, match=why) as caught:
        open_images(str(path), data(path), RGB)
    assert "\n" not in str(caught.value)


def test_bad_arrays_get_one_line(tmp_path: Path) -> None:
    cases = {
        "labels": ({"images": noise(0, 2, 8, 8)}, "has no array 'labels'"),
        "counts": ({"images": noise(0, 2, 8, 8), "labels": np.arange(3)}, "2 images of shape"),
        "high": ({"images": noise(0, 2, 8, 8), "labels": np.array([0, 9])}, "label 9, but there are only 2"),
    }
    for name, (arrays, why) in cases.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(UserError, match=why):
            open_images(str(tmp_path / f"{name}.npz"), data("x", classes=["a", "b"]), GREY)
    short = tmp_path / "t-images-idx3-ubyte"
    short.write_bytes(struct.pack(">HBBIII", 0, 8, 3, 5, 8, 8) + bytes(10))
    with pytest.raises(UserError, match="should have 320 bytes after its header, and has 10"):
        read_idx(short, 3)
    short.write_bytes(struct.pack(">HBBIII", 0, 8, 3, 2**31, 2**31, 2**31))
    with pytest.raises(UserError, match="should have"):
        read_idx(short, 3)
    (tmp_path / "labels.txt").write_text("x")
    with pytest.raises(UserError, match="images come from folders"):
        open_images(str(tmp_path / "labels.txt"), data("x"), RGB)


def recipe(home: Path, **settings: Any) -> Recipe:
    model = {"family": "vit", "image": 8, "patch": 4, "width": 16, "heads": 2, "layers": 1, "ffn_width": 16}
    return Recipe.model_validate(
        {
            "data": {"images": str(home), "held_out": 0.2},
            "model": model | {"stem": "convolutions", "dropout": 0.0},
            "augment": {"flip": True, "shift": 1, "operations": 1, "mixup": 0.2},
            "training": {
                **{"steps": 40, "batch_tokens": 16, "learning_rate": 0.01, "warmup": 4, "schedule": "constant"},
                **{"validate_every": 20, "save_every": 20, "best": "exact", "average": 0, **settings},
            },
        }
    )


def test_one_class_alone_is_refused(tmp_path: Path) -> None:
    home = folder(tmp_path, {"cat": 10})
    with pytest.raises(UserError, match="need at least two classes, and all are 'cat'"):
        train(recipe(home), tmp_path / "run", device="cpu", quiet=True)


def test_a_folder_is_learned_resumed_and_used(tmp_path: Path) -> None:
    home = folder(tmp_path, {"dark": 30, "bright": 30})
    whole = train(recipe(home), tmp_path / "whole", device="cpu", quiet=True)
    train(recipe(home, steps=20), tmp_path / "parts", device="cpu", quiet=True)
    parts = train(recipe(home), tmp_path / "parts", device="cpu", quiet=True)
    metrics = [json.loads(line) for line in (whole.path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["exact"] for entry in metrics if entry["kind"] == "valid"][-1] == 100
    loaded = [LoadedRun.load(run.path, weights="last", device="cpu") for run in (whole, parts)]
    for one, other in zip(*(model.module.state_dict().values() for model in loaded), strict=True):
        assert torch.equal(one, other)
    assert [p.label for p in loaded[0].predictions([noise(0, 8, 8, 3) // 16 + n for n in (20, 220)])] == [
        "dark",
        "bright",
    ]
    task = tasks.of(whole.recipe)
    assert len(task.held_out("valid")) == len(task.held_out("test")) == 12


def test_a_store_in_memory_and_one_on_disk_have_the_same_digest(tmp_path: Path) -> None:
    home = folder(tmp_path, {"cat": 2, "dog": 2})
    store = open_images(str(home), data(home), RGB)
    assert ImageStore.of([store[n] for n in range(4)]).digest() == store.digest()
    assert store.first(2).digest() != store.digest()


def test_draws_are_a_function_of_seed_and_position_and_differ_between_batches() -> None:
    from regard.data.images import AugmentedBatches, ImageBatches
    from regard.nn.augment import Augmentation

    def stream(seed: int) -> AugmentedBatches:
        images = ImageBatches(noise(0, 12, 4, 4, 1), np.arange(12), [0] * 12, 4, seed)
        return AugmentedBatches(images, seed, Augmentation(flip=True, cutmix=1.0))

    drawn = [stream(1).batch_at(n).draws for n in range(6)]  # three batches of each of two epochs
    assert all(torch.equal(draws, stream(1).batch_at(n).draws) for n, draws in enumerate(drawn))
    assert len({tuple(draws.flatten().tolist()) for draws in drawn}) == 6
    assert not torch.equal(drawn[0], stream(2).batch_at(0).draws)
