"""Labelled images of files: decoded once into memory-mapped arrays on disk, and batches of them.

A cache entry is a folder:

    pixels.bin      [N, S, S, C] uint8
    labels.bin      [N] uint32, indices of classes
    about.json      shape, names of the classes, digest of the arrays, checksum of this file

Its name is a digest of the images' sizes and of the names, sizes and times of their files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.data.cache_entry import CacheEntry, cache_home, folder_digest, new_hash
from regard.data.image_files import Example, Image, ImageShape, read_images, source_files
from regard.data.stream import START, BatchStream, PlannedBatch, PlannedBatches, StreamPosition, generator
from regard.errors import UserError
from regard.files import json_checksum
from regard.models.vit import ImageBatch
from regard.nn.augment import Augmentation
from regard.recipes.schema import DataSettings

VERSION = 1  # version of the layout above and of converting images
FILES = ["pixels.bin", "labels.bin"]
REPORT_EVERY = 500  # images between calls of `progress`

Progress = Callable[[str, int], None]


@dataclass(frozen=True, eq=False)
class ImageStore:
    """Images [N, S, S, C], memory-mapped, the index of each one's class [N], and the names of the classes."""

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint32]
    classes: tuple[str, ...]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> ImageStore:
        """Images in memory."""
        classes = tuple(sorted({name for _, name in examples}))
        index = {name: number for number, name in enumerate(classes)}
        pixels = np.stack([image for image, _ in examples])
        return cls(pixels, np.array([index[name] for _, name in examples], np.uint32), classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> Example:
        return self.pixels[number], self.classes[self.labels[number]]

    def first(self, count: int | None) -> ImageStore:
        """The first `count` images (None: all)."""
        return self if count is None else replace(self, pixels=self.pixels[:count], labels=self.labels[:count])

    def digest(self, members: npt.NDArray[Any] | None = None) -> str:
        """A digest of these images (default: all) and their classes."""
        hashed = hashlib.blake2b(digest_size=16)
        for number in range(len(self)) if members is None else members:
            hashed.update(self.pixels[number].tobytes() + self.classes[self.labels[number]].encode())
        return hashed.hexdigest()


def open_images(
    names: str | list[str],
    data: DataSettings,
    shape: ImageShape,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> ImageStore:
    """The images of files, from the cache; they are decoded if it does not have them."""
    entry, examples = _entry(names, data, shape), read_images(names, data, shape)
    write = partial(_write, entry.what, examples, shape, progress or (lambda name, count: None))
    return entry.opened(write, say or (lambda line: None))


def is_decoded(names: str | list[str], data: DataSettings, shape: ImageShape) -> bool:
    """Whether the cache has the images of files."""
    return _entry(names, data, shape).folder.exists()


def _entry(names: str | list[str], data: DataSettings, shape: ImageShape) -> CacheEntry[ImageStore]:
    """The cache entry of the images of files."""
    how = [] if shape == ImageShape(shape.side, shape.channels) else [shape.resize, shape.resample]
    facts: list[Any] = [VERSION, shape.array, *how, data.classes, data.columns, data.header, data.quoted]
    try:
        for path in source_files(names, data):
            state = path.stat()
            facts.append([str(path.absolute()), state.st_size, state.st_mtime_ns])
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror or error}") from error
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    name = ", ".join([names] if isinstance(names, str) else names)
    return CacheEntry(cache_home() / "images" / key, f"the images of {name}", partial(_open, shape=shape))


def _write(name: str, examples: Iterator[Example], shape: ImageShape, progress: Progress, folder: Path) -> None:
    """Write a cache entry; one image is in memory at a time."""
    classes: dict[str, int] = {}
    labels: list[int] = []
    hashes = [new_hash(), new_hash()]
    with open(folder / FILES[0], "wb") as file:
        for image, label in examples:
            labels.append(classes.setdefault(label, len(classes)))
            content = image.tobytes()
            hashes[0].update(content)
            file.write(content)
            if len(labels) % REPORT_EVERY == 0:
                progress(name, len(labels))
    if not labels:
        raise UserError(f"{name.removeprefix('the images of ')}: no images")
    content = np.array(labels, np.uint32).tobytes()
    hashes[1].update(content)
    (folder / FILES[1]).write_bytes(content)
    about: dict[str, Any] = {"version": VERSION, "shape": shape.array, "classes": list(classes), "images": len(labels)}
    about["digest"] = "".join(hashed.hexdigest() for hashed in hashes)
    about["checksum"] = json_checksum(about)
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _open(folder: Path, shape: ImageShape) -> ImageStore | None:
    """Open a cache entry; None if it does not exist or is not what was written."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        if about.pop("checksum") != json_checksum(about) or about["digest"] != folder_digest(folder, FILES):
            return None
        count, classes = about["images"], tuple(about["classes"])
        pixels = np.memmap(folder / FILES[0], np.uint8, "r", shape=(count, *shape.array))
        labels = np.fromfile(folder / FILES[1], np.uint32)
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError, AttributeError):
        return None
    except OSError as error:
        raise UserError(f"cannot read the images in {folder}: {error.strerror or error}") from error
    complete = len(labels) == count and (labels < len(classes)).all()
    return ImageStore(np.asarray(pixels), labels, classes) if complete else None


def split_members(count: int, data: DataSettings, split: str) -> npt.NDArray[np.int64]:
    """The numbers of the images that belong to a split: those that `data.held_out` draws or, to train on, the rest.

    It draws images for validation and as many for the test, unless the recipe names files of these.
    """
    order = np.random.Generator(np.random.PCG64(data.split_seed)).permutation(count)
    each = round(data.held_out * count)
    ends = np.cumsum([0, 0 if data.valid is not None else each, 0 if data.test is not None else each])
    if split == "train":
        return np.sort(order[ends[2] :])
    part = {"valid": 0, "test": 1}[split]
    return np.sort(order[ends[part] : ends[part + 1]])


class ImageBatches(PlannedBatches):
    """An endless stream of batches of `size` images, in another order in every epoch; what is left over is left out."""

    members = "images"

    def __init__(
        self, images: npt.NDArray[np.uint8], chosen: npt.NDArray[np.int64], labels: Sequence[int], size: int, seed: int
    ) -> None:
        """Batches of the `chosen` [M] of `images`, which may be memory-mapped, with the class ids of these."""
        self.images, self.chosen, self.labels = images, chosen, torch.tensor(labels)
        self.size, self.seed = min(size, len(labels)), seed

    def _plan(self, random: np.random.Generator) -> Iterator[npt.NDArray[Any]]:
        order = random.permutation(len(self.labels))
        yield from order[: len(order) // self.size * self.size].reshape(-1, self.size)

    def _cost(self, members: npt.NDArray[Any]) -> float:
        return len(members)

    def _read(self, members: npt.NDArray[Any]) -> Any:  # an ImageBatch
        return ImageBatch(torch.from_numpy(self.images[self.chosen[members]]), self.labels[torch.from_numpy(members)])


@dataclass(frozen=True)
class AugmentedBatches(BatchStream):
    """Batches with the random numbers that they are augmented by: a function of seed, epoch and number in the epoch."""

    batches_as_read: PlannedBatches
    seed: int
    augmentation: Augmentation

    def plan(self, position: StreamPosition = START) -> Iterator[PlannedBatch]:
        for planned in self.batches_as_read.plan(position):
            yield replace(planned, read=partial(self._read, planned))

    def _read(self, planned: PlannedBatch) -> ImageBatch:
        batch: ImageBatch = planned.read()
        random = generator(self.seed, planned.after.epoch, planned.after.batch)
        draws = torch.from_numpy(self.augmentation.draw(len(batch.labels), random))
        return replace(batch, draws=draws, augmentation=self.augmentation)


__all__ = ["AugmentedBatches", "Image", "ImageBatches", "ImageStore", "is_decoded", "open_images", "split_members"]
