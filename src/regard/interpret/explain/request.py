"""The parts of an explanation of a run's output: the hiding of inputs, the black box, and a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from regard.errors import UserError
from regard.interpret.explain.image_masks import CELLS, Fill
from regard.interpret.explain.rise import BlackBox, Explanation, Numbers, Progress, explain
from regard.run_dir import RunDir
from regard.tasks.classes import ClassTask

MaskMethod = Literal["unknown", "drop"]
Unit = Literal["words", "tokens"]

MAX_CLASSES = 8  # shown, the most probable first


@dataclass(frozen=True)
class MaskingMode:
    """How parts of an input are hidden.

    Texts: the parts (`unit`, `span` neighbours at a time) and how, by the unknown token, or left out. A model on
    characters or byte pairs has never seen the unknown token, since these can spell any text; "drop" may then be the
    better choice, though it shifts the positions of what follows. Images: what hidden pixels become, and the number of
    cells of a mask along the longer side.
    """

    how: MaskMethod = "unknown"
    unit: Unit = "words"
    span: int = 1
    fill: Fill = "grey"
    cells: int = CELLS

    def __post_init__(self) -> None:
        for name, value, known in (
            ("how", self.how, get_args(MaskMethod)),
            ("unit", self.unit, get_args(Unit)),
            ("fill", self.fill, get_args(Fill)),
        ):
            if value not in known:
                raise UserError(f"{name} = {value!r}: choose from {', '.join(known)}")
        if self.span < 1:
            raise UserError(f"span = {self.span}: at least one word is hidden at a time")


@dataclass(frozen=True)
class ExplainRequest:
    """The black box of a run for one input, the explained output, and the attention [parts] that each part received.

    `others` are further numbers that claim to say what mattered, by name. `insertion` is the box that insertion curves
    start from, if it is another one. `image` [height, width, channels] is the image that is explained, from 0 to 1.
    """

    box: BlackBox
    output: str
    score: str  # a description of the score of the whole output
    attention: Callable[[], Numbers | None] = lambda: None
    truncated: bool = False  # whether the text was longer than the model reads
    masking: MaskingMode = MaskingMode()
    others: Callable[[], Mapping[str, Numbers]] = dict
    insertion: BlackBox | None = None
    image: Any = None

    @property
    def usual_masks(self) -> int:
        """The number of masks, unless another is asked for: as in RISE's paper for images."""
        return 1000 if self.image is None else 4000

    def explain(self, progress: Progress | None = None, **sampling: Any) -> Explanation:
        """Estimate the importance of each part; the settings are those of `Sampling`."""
        explanation = explain(self.box, progress=progress, **sampling)
        return replace(explanation, title=f"What “{self.output.strip()}” depended on")

    def orders(self, importance: Numbers, name: str = "importance") -> dict[str, Numbers]:
        """The numbers to sort the parts by: their importance, the attention that they received, and the others."""
        attention = self.attention()
        return {name: importance} | ({} if attention is None else {"attention": attention}) | dict(self.others())


def shown_classes(task: ClassTask, run: RunDir, scores: Numbers, target: str | None) -> tuple[int, list[int]]:
    """The class to explain, the most probable one or `target`, and the classes to show with it, by scores [classes]."""
    shown = np.argsort(-scores, kind="stable")[:MAX_CLASSES].tolist()
    if target is None:
        return shown[0], shown
    (explained,) = task.class_ids(run, [target], "the target")
    return explained, shown if explained in shown else [explained, *shown[:-1]]
