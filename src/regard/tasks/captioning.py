"""Captioning: from an image to a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.data.image_files import Image, ImageShape
from regard.data.scenes import LANGUAGES, SIDE, DrawnScene
from regard.models.captioner import CHANNELS, CaptionerSettings
from regard.registry import TASKS
from regard.tasks.axes import Hidden, Inspection, patch_axis, picture, refuse_edges, without_patches
from regard.tasks.base import TraceSpec
from regard.tasks.feature_text import FeatureTextTask
from regard.tasks.regions import WordRegion

Table = npt.NDArray[Any]
GREY = 0.5  # of hidden patches


def patch_rows(image: Table, side: int) -> Table:
    """[S, S, C] -> [patches, C side²]: the pixels of each patch, in reading order."""
    across = len(image) // side
    grid = image.reshape(across, side, across, side, image.shape[2])
    return grid.transpose(0, 2, 1, 3, 4).reshape(across**2, -1)


@TASKS.register("captioning")
class CaptioningTask(FeatureTextTask):
    """Trains on images and their captions; `training.batch_tokens` counts the tokens of captions."""

    name = "captioning"
    about = "describe an image in words"
    data = "captions"
    verb = "caption"
    usage = "image.png"
    builtin_usage = "'test 1'"
    rows = "patches"
    verbs = frozenset({"caption", "evaluate", "look", "draw", "bench"})
    trace = TraceSpec("write")
    scale = 1 / 255  # pixels are stored as bytes

    @property
    def members(self) -> str:
        return "images"

    @property
    def settings(self) -> CaptionerSettings:
        assert isinstance(self.recipe.model, CaptionerSettings)
        return self.recipe.model

    @property
    def shape(self) -> ImageShape:
        return ImageShape(self.settings.image, CHANNELS)

    def read_input(self, argument: str) -> Image:
        return self.shape.read(argument)

    def image(self, given: Any) -> Image:
        """The pixels of an input (a built-in scene, an array, or a file), as many as the model reads."""
        if isinstance(given, str | Path):
            return self.shape.read(given)
        return self.shape.of_array(given.pixels() if isinstance(given, DrawnScene) else given, self.verb)

    def stored_features(self, given: Any) -> Image:
        return patch_rows(self.image(given), self.settings.patch)

    def input_list(self, given: Any) -> tuple[list[Any], bool]:
        single = isinstance(given, str | Path | DrawnScene) or getattr(given, "ndim", 4) in (2, 3)
        return [given] if single else list(given), single

    def inspect(self, given: Any) -> Inspection:
        image = self.image(given)
        return Inspection(self.features(image), patch_axis(image / 255, self.settings.patch))

    def hide(self, inspection: Inspection, hidden: Hidden) -> Inspection:
        """Make some patches grey."""
        refuse_edges(hidden, "patches")
        features, axis = inspection.content.copy(), inspection.axis
        features[list(hidden.elements)] = GREY
        image = without_patches(axis, axis.arrays["image"], hidden.elements, GREY)
        return Inspection(features, replace(axis, arrays=picture(image)))

    def show_input(self, index: int, given: Any) -> str:
        return f"held-out image {index + 1}"

    def word_regions(self, given: Any, text: str) -> list[WordRegion] | None:
        """The patches that each word of a caption speaks of; None if they are not known."""
        if not isinstance(given, DrawnScene):
            return None
        words = next((given.words(language) for language in LANGUAGES if given.caption(language) == text), None)
        return None if words is None else [WordRegion(word.role, self._patches(given, word.shapes)) for word in words]

    def _patches(self, scene: DrawnScene, shapes: Sequence[int]) -> npt.NDArray[np.bool_]:
        """[patches] those with pixels of some shapes."""
        pixel = np.arange(self.settings.image) * SIDE // self.settings.image
        region = scene.region(shapes)[np.ix_(pixel, pixel)]
        return np.any(patch_rows(region[..., None], self.settings.patch), 1)
