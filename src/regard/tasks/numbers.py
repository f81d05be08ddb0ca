"""Regression: tasks that predict one or several numbers for each input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.corpora import corpora, describe, read_pairs
from regard.data.labelled import Numbers, parse_numbers
from regard.errors import UserError
from regard.metrics.numbers import NumberScores
from regard.models import SequenceModel
from regard.packed import Batch
from regard.run_dir import RunDir
from regard.tasks.base import Output
from regard.tasks.classes import PredictionTask
from regard.tasks.validator import SAMPLES, Validation, Validator

HELD_OUT = "the held-out data"


@dataclass(frozen=True)
class NumberPrediction:
    """The numbers that are predicted for an input."""

    numbers: tuple[float, ...]
    truncated: bool = False  # whether the input was longer than the model reads

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\t".join(f"{number:.6g}" for number in self.numbers)


class NumberTask(PredictionTask):
    """A task whose labels are texts of one number, or of several between spaces.

    The model predicts standardised numbers; means and deviations of the training data are stored in the run.
    """

    measures: tuple[str, ...] = ("loss",)
    output: Output = "numbers"

    def scales(self) -> list[tuple[float, float]]:
        rows: list[list[float]] = []
        for corpus in corpora(self.recipe.data):
            for _, target in read_pairs(corpus, self.recipe.data):
                rows.append(parse_numbers(target, describe(corpus), len(rows[0]) if rows else None))
        table = np.array(rows)
        deviations = table.std(0)
        if not deviations.all():
            raise UserError("all numbers of the training data are equal: there is nothing to learn")
        return list(zip(table.mean(0).tolist(), deviations.tolist(), strict=True))

    def labels(self, run: RunDir, targets: Sequence[str], what: str) -> list[list[float]]:
        """Standardised numbers; `what` they belong to, for messages."""
        labels: list[list[float]] = Numbers(run.scales).standardised(what, targets).tolist()
        return labels

    def prediction(self, run: RunDir, row: Tensor) -> NumberPrediction:
        pairs = zip(row.tolist(), run.scales, strict=True)
        return NumberPrediction(tuple(mean + deviation * number for number, (mean, deviation) in pairs))

    def score(self, run: RunDir, predictions: Sequence[NumberPrediction], targets: Sequence[str]) -> list[NumberScores]:
        """The scores of each of the numbers."""
        rows = [parse_numbers(target, HELD_OUT, len(run.scales)) for target in targets]
        columns = zip(zip(*(p.numbers for p in predictions), strict=True), zip(*rows, strict=True), strict=True)
        return [NumberScores.of(predicted, references) for predicted, references in columns]

    def validator(self, run: RunDir, examples: Sequence[Any], device: torch.device) -> NumberValidator:
        return NumberValidator(self, run, examples, device)


class NumberValidator(Validator):
    """The loss, and the errors in the units of the data, on held-out examples."""

    def __init__(self, task: NumberTask, run: RunDir, examples: Sequence[Any], device: torch.device) -> None:
        super().__init__(task.recipe, device)
        self.task, self.run, self.examples = task, run, list(examples)
        self.targets = [target for _, target in self.examples]
        self.labels = task.labels(run, self.targets, HELD_OUT)  # here, so that mistakes are reported before training

    @cached_property
    def _batches(self) -> list[tuple[list[int], Batch]]:
        batches = self.task.batches(self.run, [given for given, _ in self.examples], self.labels)
        return [(some.indices, some.batch.to(self.device)) for some in batches]

    def _measure(self, model: SequenceModel) -> Validation:
        loss, predictions = 0.0, dict[int, NumberPrediction]()
        for indices, batch in self._batches:
            loss += model(batch).item()
            rows = model.logits(batch).float().cpu()
            predictions |= {i: self.task.prediction(self.run, row) for i, row in zip(indices, rows, strict=True)}
        ordered = [predictions[i] for i in range(len(self.examples))]
        scores = NumberScores.mean(self.task.score(self.run, ordered, self.targets))
        samples = [
            {"source": self.task.show_input(i, given), "reference": target, "output": str(ordered[i])}
            for i, (given, target) in enumerate(self.examples[: min(SAMPLES, self.recipe.training.validate_lines)])
        ]
        errors = {"rmse": scores.rmse, "mae": scores.mae, "r2": scores.r2}
        return Validation(loss / len(self.examples), samples=samples, **errors)
