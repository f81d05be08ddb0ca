"""Reading of images: files through Pillow, and arrays. All become S x S pixels of C channels, as uint8.

A larger or smaller image is scaled so that its shorter side has S pixels, and cropped to its centre; or both its sides
are scaled to S pixels. Transparent pixels become white. Grey and colour are converted into each other.
"""

from __future__ import annotations

import gzip
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from regard.data.corpora import expand, read_pairs
from regard.data.labelled import class_name
from regard.errors import UserError, first_line
from regard.recipes.schema import DataSettings

Image = npt.NDArray[np.uint8]  # [S, S, C]
SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif"),
    ".npy",
)
TABLES = (".tsv", ".csv", ".jsonl", ".parquet")
IDX_UINT8 = 0x08  # the type code of an idx file of bytes
MAX_IDX_ENTRIES = 1 << 34  # bytes of an idx file, whose header might say anything


@dataclass(frozen=True)
class ImageShape:
    """The images that a model reads: pixels of a side, and channels (1: grey, 3: red, green and blue).

    Others are made so by `resize`, "crop" or "stretch", with the filter `resample` of Pillow.
    """

    side: int
    channels: int
    resize: str = "crop"
    resample: str = "bicubic"

    @property
    def array(self) -> tuple[int, int, int]:
        return self.side, self.side, self.channels

    def read(self, path: str | Path) -> Image:
        """Read an image file, or a .npy array of numbers from 0 to 1 or whole numbers from 0 to 255."""
        file = Path(path)
        try:
            if file.suffix.lower() == ".npy":
                return self.of_array(np.load(file, allow_pickle=False), str(file))
            return self._decode(file)
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror or first_line(error)}") from error
        except Exception as error:  # decoders raise many kinds for damaged files
            raise UserError(f"{file}: not an image that can be read: {first_line(error)}") from error

    def of_array(self, given: Any, name: str = "predict") -> Image:
        """Convert an array [height, width] or [height, width, channels]; whole numbers up to 255, or from 0 to 1."""
        array = np.asarray(given)
        if array.ndim == 2:
            array = array[:, :, None]
        if array.ndim != 3 or array.shape[2] not in (1, 3) or 0 in array.shape or array.dtype.kind not in "uif":
            raise UserError(
                f"{name}: {array.dtype} of shape {array.shape}; an image is an array of numbers [height, width] or "
                "[height, width, 3]"
            )
        pixels = array if array.dtype == np.uint8 else _bytes(array, name)
        if pixels.shape == self.array:
            return pixels
        return self._fitted(pillow(name).fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]))

    def _decode(self, file: Path) -> Image:
        with pillow(str(file)).open(file) as image:
            if self.resize == "crop":
                image.draft(None, (self.side, self.side))  # a large JPEG is decoded at a fraction of its size
            return self._fitted(image)

    def _fitted(self, image: Any) -> Image:
        """Convert a Pillow image."""
        from PIL import Image as pil
        from PIL import ImageOps

        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):
            image = pil.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if "A" in image.getbands() or "transparency" in image.info:
            image = pil.alpha_composite(pil.new("RGBA", image.size, "white"), image.convert("RGBA"))
        image = image.convert("RGB" if self.channels == 3 else "L")
        if image.size != (self.side, self.side):
            size, filter_ = (self.side, self.side), pil.Resampling[self.resample.upper()]
            image = image.resize(size, filter_) if self.resize == "stretch" else ImageOps.fit(image, size, filter_)
        return np.asarray(image, np.uint8).reshape(self.array)


def _bytes(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.uint8]:
    """Whole numbers up to 255, or numbers from 0 to 1, as bytes."""
    scaled = array * 255.0 if array.dtype.kind == "f" else array
    if not (np.isfinite(scaled).all() and scaled.min() >= 0 and scaled.max() <= 255):
        raise UserError(f"{name}: pixels are numbers from 0 to 1, or whole numbers from 0 to 255")
    return np.rint(scaled).astype(np.uint8)


def pillow(name: str) -> Any:
    """The module PIL.Image, without which no image file can be read."""
    try:
        from PIL import Image as module
    except ImportError:
        raise UserError(
            f"{name}: image files and other sizes need Pillow (pip install 'regard[vision]'); arrays do not"
        ) from None
    return module


Example = tuple[Image, str]  # an image and the name of its class


def read_images(names: str | list[str], data: DataSettings, shape: ImageShape) -> Iterator[Example]:
    """Read the images and the names of their classes, of folders, tables, .npz and idx files, one at a time."""
    for path in expand(names, data.folder):
        listed = _listed(path, data)
        if listed is not None:
            yield from ((shape.read(file), name) for file, name in listed)
        else:
            arrays = _npz(path) if path.suffix.lower() == ".npz" else _idx_pair(path)
            yield from _of_arrays(path, *arrays, data, shape)


def source_files(names: str | list[str], data: DataSettings) -> list[Path]:
    """All files that the images and their classes come from."""
    found: list[Path] = []
    for path in expand(names, data.folder):
        listed = _listed(path, data)
        if listed is None:
            found += [path] if path.suffix.lower() == ".npz" else [path, _labels_of(path)]
        else:
            found += [*([] if path.is_dir() else [path]), *(file for file, _ in listed)]
    return found


def _listed(path: Path, data: DataSettings) -> list[tuple[Path, str]] | None:
    """The image files of a folder or a table, with their classes; None for a file of arrays."""
    if path.is_dir():
        return class_folders(path)
    if not any(suffix.lower() in TABLES for suffix in path.suffixes):
        return None
    table = data.model_copy(update={"images": None, "pairs": str(path), "held_out": 0.0, "count": None, "mix": []})
    return [(path.parent / name, class_name(label)) for name, label in read_pairs(table, table)]


def class_folders(folder: Path) -> list[tuple[Path, str]]:
    """The image files of a folder with a folder for each class: one of each class in turn, sorted by name.

    The order makes any number of images from the start as even a sample as the folder allows.
    """
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        classes = {path.name: _image_files(path) for path in folders}
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror or error}") from error
    if not classes:
        raise UserError(f"{folder} has no folders: it needs one for each class, with images in it")
    for name, files in classes.items():
        if not files:
            raise UserError(f"{folder / name} has no images ({', '.join(SUFFIXES)})")
    columns = [[(file, class_name(name)) for file in files] for name, files in classes.items()]
    return [item for row in zip_longest(*columns) for item in row if item is not None]


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


def _npz(path: Path) -> tuple[Any, Any, list[str]]:
    """Images [N, height, width(, channels)], labels [N] and names of classes of an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = {"images", "labels"} - set(file.files)
            if missing:
                raise UserError(f"{path} has no array {' and '.join(sorted(missing))!r}, but {', '.join(file.files)}")
            names = [str(name) for name in file["classes"]] if "classes" in file.files else []
            return file["images"], file["labels"], names
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error


def _idx_pair(path: Path) -> tuple[Any, Any, list[str]]:
    """The images of an idx file, and the labels of the file beside it, as MNIST has them."""
    return read_idx(path, 3), read_idx(_labels_of(path), 1), []


def _labels_of(path: Path) -> Path:
    """The file of labels beside an idx file of images."""
    if "images-idx3" not in path.name:
        raise UserError(f"{path}: images come from folders, .tsv, .csv, .jsonl, .npz or *images-idx3-ubyte files")
    return path.with_name(path.name.replace("images-idx3", "labels-idx1"))


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Read an idx file of bytes, perhaps compressed with gzip."""
    try:
        opened: Any = gzip.open(path) if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
        with opened as file:
            return _idx_array(file, path, dimensions)
    except (OSError, EOFError, struct.error) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or first_line(error)}") from error


def _idx_array(file: IO[bytes], path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    zeros, kind, found = struct.unpack(">HBB", file.read(4))
    if zeros or kind != IDX_UINT8 or found != dimensions:
        raise UserError(f"{path} is not an idx file of bytes in {dimensions} dimensions")
    sizes = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
    count = int(np.prod(sizes, dtype=object))
    content = file.read(count + 1) if count <= MAX_IDX_ENTRIES else b""
    if len(content) != count:
        raise UserError(f"{path} should have {count:,} bytes after its header, and has {len(content):,}")
    return np.frombuffer(content, np.uint8).reshape(sizes)


def _of_arrays(
    path: Path, images: Any, labels: Any, default_names: list[str], data: DataSettings, shape: ImageShape
) -> Iterator[Example]:
    names = data.classes or default_names
    if labels.ndim != 1 or labels.dtype.kind not in "ui" or images.ndim not in (3, 4) or len(images) != len(labels):
        raise UserError(f"{path}: {len(images)} images of shape {images.shape[1:]}, and labels {labels.shape}")
    highest = int(labels.max(initial=0))
    if names and highest >= len(names):
        raise UserError(f"{path} has a label {highest}, but there are only {len(names)} names of classes")
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        yield shape.of_array(image, f"{path}, image {number}"), class_name(names[label]) if names else str(label)


__all__ = ["Example", "Image", "ImageShape", "class_folders", "read_idx", "read_images", "source_files"]
