"""Classification of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from regard.data.packing import BatchStream
from regard.data.transforms import ClassLabelsOnly, class_labels_only
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.recipes.schema import Recipe
from regard.registry import TASKS
from regard.run_dir import RunDir
from regard.tasks.base import Dataset, Output, TraceSpec
from regard.tasks.translation import TranslationTask, TranslationValidator
from regard.tasks.validator import Validation
from regard.text import UNK


@TASKS.register("classification")
class ClassificationTask(TranslationTask):
    """Trains on pairs of a text and the name of its class; the loss counts one target per text."""

    name = "classification"
    about = "name the class of a text"
    data = "pairs"
    measures: tuple[str, ...] = ("loss", "exact")
    verb = "translate"
    usage = "'a sentence'"
    verbs = frozenset({"translate", "evaluate", "compare", "look", "draw", "explain", "bench", "export"})
    has_source = True
    output: Output = "class"
    scores_pairs = True
    trace = TraceSpec("classify")

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        if recipe.text.shared:
            raise ValueError("classification needs text.shared = false: classes have a vocabulary of their own")

    def check_targets(self, corpus: str, targets: list[str], encoded: list[list[int]]) -> None:
        for name, ids in zip(targets, encoded, strict=True):
            if len(ids) != 2:  # the class and EOS
                raise UserError(f"{corpus}: a class must be one word, and {name[:60]!r} is not")
            if ids[0] == UNK:
                raise UserError(
                    f"{corpus}: {name[:60]!r} is not one of the model's classes: "
                    "choose another --out, or raise text.vocabulary or text.sample"
                )

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        return ClassLabelsOnly(self.packer(dataset, static))

    def validator(self, run: RunDir, examples: Sequence[Any], device: torch.device) -> ClassificationValidator:
        return ClassificationValidator(self.recipe, run.tokenizers, examples, device)


class ClassificationValidator(TranslationValidator):
    """The loss and the accuracy on held-out texts."""

    @cached_property
    def _batches(self) -> list[SeqBatch]:
        return [class_labels_only(batch) for batch in super()._batches]

    def _measure(self, model: SequenceModel) -> Validation:
        return replace(super()._measure(model), bleu=None, chrf=None)
