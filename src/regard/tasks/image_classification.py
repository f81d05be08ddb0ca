"""Classification of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.data.corpora import no_data
from regard.data.image_files import Example, Image, ImageShape
from regard.data.images import AugmentedBatches, ImageBatches, ImageStore, is_decoded, open_images, split_members
from regard.data.stream import BatchStream
from regard.errors import UserError
from regard.models.vit import ImageBatch, ViTSettings
from regard.nn.augment import Augmentation
from regard.nn.image_tokens import to_unit
from regard.packed import Batch
from regard.recipes.schema import Recipe
from regard.registry import CORPORA, TASKS
from regard.run_dir import RunDir
from regard.tasks.axes import (
    Hidden,
    InspectableTask,
    Inspection,
    element,
    patch_axis,
    picture,
    refuse_edges,
    refuse_special,
    without_patches,
)
from regard.tasks.base import Dataset, TraceSpec
from regard.tasks.classes import ClassTask, InputBatch
from regard.tasks.text import check_files

BATCH = 256  # images in a batch of prediction


@dataclass(frozen=True)
class ImageDataset(Dataset):
    """Images with their classes, and which of them to train on."""

    store: ImageStore
    members: npt.NDArray[np.int64]

    @cached_property
    def digest(self) -> str:
        return self.store.digest(self.members)


@TASKS.register("image-classification")
class ImageClassificationTask(ClassTask, InspectableTask):
    """Trains on images and the names of their classes; `training.batch_tokens` counts images."""

    name = "image-classification"
    about = "name the class of an image"
    data = "images"
    sections = ("augment",)
    usage = "image.png"
    builtin_usage = "'test 1'"
    verbs = frozenset({"predict", "evaluate", "look", "draw", "explain", "export"})
    has_source = False
    targets = "images"
    trace = TraceSpec("predict")
    explained = "image class"

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        if recipe.data.mix:
            raise ValueError("data.mix is not for images: name several folders in data.images")
        size = getattr(CORPORA[recipe.data.corpus], "size", None) if recipe.data.corpus else None
        if isinstance(recipe.model, ViTSettings) and size not in (None, recipe.model.image):
            raise ValueError(f"model.image is {recipe.model.image}, and the images have {size} pixels a side")

    @property
    def shape(self) -> ImageShape:
        model = self.recipe.model
        assert isinstance(model, ViTSettings)
        return ImageShape(model.image, model.channels, model.resize, model.resample)

    def check_files(self, resumed: bool) -> list[str]:
        data = self.recipe.data
        lines = check_files(data, resumed)
        new = data.images is not None and not is_decoded(data.images, data, self.shape)
        return [*lines, "decoding the images into the cache, once"] if new else lines

    @cached_property
    def store(self) -> ImageStore:
        """The images to train on, and those that `data.held_out` holds out."""
        return self._store(None, None)

    def _store(self, progress: Callable[[str, int], None] | None, say: Callable[[str], None] | None) -> ImageStore:
        data = self.recipe.data
        if data.images is None:
            return ImageStore.of(self._built_in("train", data.count))
        return open_images(data.images, data, self.shape, progress, say).first(data.count)

    def held_out(self, split: str) -> list[Example]:
        data = self.recipe.data
        given = {"valid": data.valid, "test": data.test}.get(split)
        if given is not None:
            store = open_images(given, data, self.shape)
            return [store[number] for number in range(len(store))]
        if data.images is None:
            return self._built_in(split)
        if not data.held_out or split not in ("valid", "test"):
            raise UserError(f"the recipe has no {split} images: set data.{split}, or data.held_out to a share of them")
        members = split_members(len(self.store), data, split)
        if not len(members):
            raise UserError(
                f"data.held_out = {data.held_out} of {len(self.store)} images is less than one image: raise it"
            )
        return [self.store[number] for number in members]

    def _built_in(self, split: str, count: int | None = None) -> list[Example]:
        """The examples of a split of a built-in corpus."""
        data = self.recipe.data
        if data.corpus is None:
            raise no_data(data)
        return [(self.shape.of_array(image), name) for image, name in CORPORA[data.corpus].images(split, count)]

    def digest(self, examples: Sequence[Any]) -> str:
        return ImageStore.of(examples).digest()

    def class_names(self) -> list[str]:
        names = self.store.classes
        if len(names) < 2:
            raise UserError(f"the training images need at least two classes, and all are {names[0]!r}")
        order = {name: number for number, name in enumerate(self.recipe.data.classes)}
        return sorted(names, key=lambda name: (order.get(name, len(order)), name))

    def dataset(
        self,
        run: RunDir,
        progress: Callable[[str, int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> ImageDataset:
        return ImageDataset(self.store, split_members(len(self.store), self.recipe.data, "train"))

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        assert isinstance(dataset, ImageDataset)
        settings, store = self.recipe.training, dataset.store
        ids = self.class_ids(run, store.classes, "the training data")
        labels = [ids[store.labels[number]] for number in dataset.members]
        batches = ImageBatches(store.pixels, dataset.members, labels, settings.batch_tokens, settings.seed)
        augmentation = Augmentation(**self.recipe.augment.model_dump())
        return AugmentedBatches(batches, settings.seed, augmentation) if augmentation.varies else batches

    def describe(self, run: RunDir, dataset: Dataset, static: bool) -> list[str]:
        assert isinstance(dataset, ImageDataset)
        count, size = len(dataset.members), self.recipe.training.batch_tokens
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
        return self.shape.read(argument)

    def inspect(self, run: RunDir, given: Any) -> Inspection:
        (only,) = self.batches(run, [given])
        assert isinstance(only.batch, ImageBatch) and isinstance(self.recipe.model, ViTSettings)
        image = to_unit(only.batch.images)
        patches = patch_axis(image[0].numpy(), self.recipe.model.patch)
        if self.recipe.model.pooling == "class-token":
            others = [one | {"predicts": False} for one in patches.elements]
            patches = replace(patches, elements=[element("class", -1, special=True), *others])
        return Inspection(replace(only.batch, images=image), patches)

    def hide(self, inspection: Inspection, hidden: Hidden) -> Inspection:
        """Give the pixels of some patches the mean colour, which the model reads as zeros."""
        assert isinstance(self.recipe.model, ViTSettings)
        refuse_edges(hidden, "patches")
        refuse_special(hidden, inspection.axis)
        mean = self.recipe.model.pixel_mean
        image = without_patches(inspection.axis, inspection.content.images[0].numpy(), hidden.elements, mean)
        images = torch.from_numpy(image)[None]
        return Inspection(replace(inspection.content, images=images), replace(inspection.axis, arrays=picture(image)))

    def input_list(self, given: Any) -> tuple[list[Any], bool]:
        single = isinstance(given, str | Path) or getattr(given, "ndim", 4) < 4
        images = [given] if single else list(given)
        return [self.shape.read(i) if isinstance(i, str | Path) else self.shape.of_array(i) for i in images], single

    def show_input(self, index: int, given: Any) -> str:
        return f"held-out image {index + 1}"
