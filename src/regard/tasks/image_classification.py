"""Classification of images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.data.corpora import corpora
from regard.data.packing import BatchStream
from regard.data.shapes import CLASSES, SIZE, Image, ImageBatches, Shapes, check_image, read_image
from regard.models.vit import ImageBatch, ViTSettings
from regard.packed import Batch
from regard.recipes.schema import Recipe
from regard.registry import TASKS
from regard.run_dir import RunDir
from regard.tasks.base import Dataset
from regard.tasks.classes import ClassTask, InputBatch

BATCH = 256  # images in a batch of prediction


@dataclass(frozen=True)
class ImageDataset(Dataset):
    """Images in memory and the names of their classes."""

    examples: list[tuple[Image, str]]

    @property
    def digest(self) -> str:
        return _digest(self.examples)


@TASKS.register("image-classification")
class ImageClassificationTask(ClassTask):
    """Trains on images and the names of their classes; `training.batch_tokens` counts images."""

    name = "image-classification"
    about = "name the class of an image"
    data = "images"
    usage = "image.npy"
    verbs = frozenset({"predict", "evaluate"})
    has_source = False
    trace = None

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        if isinstance(recipe.model, ViTSettings) and recipe.model.image != SIZE:
            raise ValueError(f"model.image is {recipe.model.image}, and the images have {SIZE} pixels a side")

    def check_files(self, resumed: bool) -> list[str]:
        return []  # the images are built in

    def held_out(self, split: str) -> list[tuple[Image, str]]:
        return list(Shapes.images(split))

    def digest(self, examples: Sequence[Any]) -> str:
        return _digest(examples)

    def class_names(self) -> list[str]:
        return list(CLASSES)

    def dataset(
        self,
        run: RunDir,
        progress: Callable[[str, int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> ImageDataset:
        return ImageDataset([e for corpus in corpora(self.recipe.data) for e in Shapes.images("train", corpus.count)])

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        assert isinstance(dataset, ImageDataset)
        images, names = zip(*dataset.examples, strict=True)
        settings = self.recipe.training
        labels = self.class_ids(run, names, "the training data")
        return ImageBatches(images, labels, settings.batch_tokens, settings.seed)

    def describe(self, run: RunDir, dataset: Dataset, static: bool) -> list[str]:
        assert isinstance(dataset, ImageDataset)
        count, size = len(dataset.examples), self.recipe.training.batch_tokens
        return [f"data: {count:,} images of {len(run.classes)} classes, in batches of {min(size, count)}"]

    def describe_batch(self, run: RunDir, batch: Batch) -> list[dict[str, Any]]:
        assert isinstance(batch, ImageBatch)
        return [
            {"image": image.tolist(), "class": run.classes[label]}
            for image, label in zip(batch.images, batch.labels.tolist(), strict=True)
        ]

    def batches(self, run: RunDir, inputs: Sequence[Any], labels: Sequence[int] | None = None) -> Iterator[InputBatch]:
        for begin in range(0, len(inputs), BATCH):
            indices = range(begin, min(begin + BATCH, len(inputs)))
            images = torch.from_numpy(np.stack([inputs[i] for i in indices]))
            classes = torch.tensor([0 if labels is None else labels[i] for i in indices])
            yield InputBatch(list(indices), ImageBatch(images, classes))

    def read_input(self, argument: str) -> Image:
        return read_image(argument)

    def input_list(self, given: Any) -> tuple[list[Any], bool]:
        single = isinstance(given, str | Path) or getattr(given, "ndim", 4) == 3
        images = [given] if single else list(given)
        return [read_image(image) if isinstance(image, str | Path) else check_image(image) for image in images], single

    def show_input(self, index: int, given: Any) -> str:
        return f"held-out image {index + 1}"


def _digest(examples: Sequence[tuple[Image, str]]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for image, name in examples:
        hashed.update(image.tobytes() + name.encode())
    return hashed.hexdigest()
