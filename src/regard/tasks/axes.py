"""The inputs of a trace as plain data: the elements along an axis of attention, and how they are drawn.

| kind | elements | `about` and `arrays` |
|---|---|---|
| tokens | subwords, with the word of each as its group | |
| patches | of an image, each with its `box`: left, top, width, height in pixels | `width`, `height`; image [h, w, 3] |
| frames | of sound, each with its `time`: begin and end in seconds | `seconds`, `top` (kHz); spectrogram [n, bands] |
| steps | of a trajectory: return, state and action, with the step as their group | `steps`; frames [S, h, w, 3] |
| nodes | of a graph, each with its position `at`: x, y from 0 to 1 | `edges`, `focus`, `inside` |
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from regard.errors import UserError
from regard.run_dir import RunDir
from regard.tasks.classes import PredictionTask

AxisKind = Literal["tokens", "patches", "frames", "steps", "nodes"]
Element = dict[str, Any]
EXAMPLE = re.compile(r"(valid|test) (\d{1,9})")
EXAMPLES = 12  # offered by the page


def element(label: str, group: int, *, special: bool = False, predicts: bool = True, **more: Any) -> Element:
    """An element of an axis. `group` is shared by elements that are merged into one, such as the tokens of a word.

    `predicts`: the output is computed from this position. `more` is what its kind of axis adds.
    """
    kind = {"special": special, "punctuation": False, "given": True, "predicts": predicts}
    return {"label": label, "text": label, "group": -1 if special else group, **kind, **more}


@dataclass(frozen=True, eq=False)
class Axis:
    """The elements along one axis of attention maps, in the order of the model's sequence.

    `rows` are their positions in that sequence; None: every position is an element. `about` is JSON and `arrays` hold
    numbers from 0 to 1, both as the kind of the axis needs them.
    """

    kind: AxisKind
    elements: list[Element] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    rows: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.elements)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "elements": self.elements, **self.about}


@dataclass(frozen=True)
class Hidden:
    """Elements of an axis, and edges between two of them, that a model must do without."""

    elements: tuple[int, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Inspection:
    """An input as a model reads it, and the axis of its elements.

    `content` is a batch, or what the task makes its batches from. Positions outside the groups `unseen` must
    not attend to those inside.
    """

    content: Any
    axis: Axis
    unseen: tuple[tuple[int, ...], ...] = ()


class InspectableTask(PredictionTask):
    """A task whose inputs have elements that can be drawn and hidden."""

    @abstractmethod
    def inspect(self, run: RunDir, given: Any) -> Inspection:
        """An input as the model reads it; `content` is a batch of it."""

    @abstractmethod
    def hide(self, inspection: Inspection, hidden: Hidden) -> Inspection:
        """The same input without some of its elements or edges."""

    def read_argument(self, argument: str) -> Any:
        """The input that a text stands for: `test 3` is the third held-out example of that split."""
        named = EXAMPLE.fullmatch(argument.strip())
        if named is None:
            return self.read_input(argument)
        split, number = named[1], int(named[2])
        examples = self.held_out(split)
        if not 1 <= number <= len(examples):
            raise UserError(f"there is no example {argument.strip()!r}: {split} has {len(examples)}, counted from 1")
        return examples[number - 1][0]

    def examples(self) -> list[str]:
        """Inputs to begin with, for the page."""
        return [f"test {n}" for n in range(1, EXAMPLES + 1)]


def patch_axis(image: np.ndarray, side: int) -> Axis:
    """The patches of an image [h, w, channels] from 0 to 1, row by row, named by row and column from 1."""
    height, width = image.shape[:2]
    corners = [(y, x) for y in range(0, height, side) for x in range(0, width, side)]
    elements = [
        element(f"{y // side + 1},{x // side + 1}", n, box=[x, y, side, side]) for n, (y, x) in enumerate(corners)
    ]
    return Axis("patches", elements, {"width": width, "height": height}, picture(image))


def frame_axis(features: np.ndarray, times: np.ndarray, seconds: float, top: float) -> Axis:
    """The encoder's frames of a recording, from its log-mel features [n, bands]; `times` [frames + 1] are their ends.

    `top` is the highest frequency of the features, in kHz.
    """
    ends = [round(time, 4) for time in times.tolist()]
    elements = [
        element(f"{(begin + end) / 2:.2f} s", n, time=[begin, end]) for n, (begin, end) in enumerate(pairwise(ends))
    ]
    about = {"seconds": round(seconds, 4), "top": top}
    return Axis("frames", elements, about, {"spectrogram": to_shares(features)})


def to_shares(values: np.ndarray) -> np.ndarray:
    """Scale numbers linearly to the range from 0 to 1."""
    low, high = float(values.min()), float(values.max())
    return np.asarray((values - low) / (high - low or 1.0), np.float32)


def without_patches(axis: Axis, image: np.ndarray, elements: Sequence[int], value: npt.ArrayLike) -> np.ndarray:
    """An image [h, w, channels] with this value, or one for each channel, in all pixels of some patches."""
    image = image.copy()
    for n in elements:
        x, y, width, height = axis.elements[n]["box"]
        image[y : y + height, x : x + width] = value
    return image


def picture(image: np.ndarray) -> dict[str, np.ndarray]:
    """The array of an axis of patches: the image in red, green and blue."""
    return {"image": np.broadcast_to(image, (*image.shape[:2], 3))}


def refuse_special(hidden: Hidden, axis: Axis) -> None:
    """Refuse to hide elements that are not part of the input, such as a class token."""
    for n in hidden.elements:
        if axis.elements[n]["special"]:
            raise UserError(f"element {n} ({axis.elements[n]['label']}) is not part of the input: it cannot be hidden")


def refuse_edges(hidden: Hidden, kind: str) -> None:
    """Refuse hidden edges on an axis that has none."""
    if hidden.edges:
        raise UserError(f"only graphs have edges, and this input has {kind}")
