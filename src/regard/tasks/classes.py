"""Tasks that predict one thing for each input, in one pass without a search; and those that predict a class."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard import distributed
from regard.data.labelled import class_id
from regard.metrics.classes import ClassScores
from regard.models import SequenceModel
from regard.packed import Batch
from regard.run_dir import RunDir
from regard.tasks.base import Output, Task
from regard.tasks.validator import SAMPLES, Validation, Validator


@dataclass(frozen=True)
class Prediction:
    """The most likely class of an input, and the probabilities of all classes in descending order."""

    label: str
    probability: float
    probabilities: dict[str, float]
    truncated: bool = False  # whether the input was longer than the model reads

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class InputBatch:
    """A batch of inputs, the index of each, and the indices of those that were truncated."""

    indices: list[int]
    batch: Batch
    truncated: frozenset[int] = frozenset()


class PredictionTask(Task):
    """A task whose examples are pairs of an input and a label, which the model predicts in one pass.

    A subclass defines how inputs become batches, and what a row of the model's output means.
    """

    sections: tuple[str, ...] = ()
    verb = "predict"
    has_labels = True
    scores_pairs = False

    @abstractmethod
    def batches(self, run: RunDir, inputs: Sequence[Any], labels: Sequence[Any] | None = None) -> Iterator[InputBatch]:
        """Batches of inputs. `labels` are encoded as the batch has them, where they are known."""

    @abstractmethod
    def read_input(self, argument: str) -> Any:
        """The input that an argument of the command line stands for."""

    def read_argument(self, argument: str) -> Any:
        """The same, or a held-out example that a text such as "test 3" names, where inputs are not texts."""
        return self.read_input(argument)

    @abstractmethod
    def input_list(self, given: Any) -> tuple[list[Any], bool]:
        """The inputs that an argument of `Model.predict` stands for, and whether it is a single one."""

    @abstractmethod
    def show_input(self, index: int, given: Any) -> str:
        """A held-out input in words, for the samples of a validation."""

    @abstractmethod
    def prediction(self, run: RunDir, row: Tensor) -> Any:
        """The prediction that a row of the model's output means, as a dataclass with a field `truncated`."""

    def predict(
        self,
        run: RunDir,
        model: SequenceModel,
        inputs: Sequence[Any],
        device: torch.device,
        progress: Callable[[int], None] | None = None,
    ) -> list[Any]:
        """A prediction for each input; which inputs share a batch does not matter."""
        predictions: list[Any] = [None] * len(inputs)
        with torch.inference_mode():
            for some in self.batches(run, inputs):
                rows = model.logits(some.batch.to(device)).float().cpu()
                for i, row in zip(some.indices, rows, strict=True):
                    predictions[i] = replace(self.prediction(run, row), truncated=i in some.truncated)
                if progress is not None:
                    progress(len(some.indices))
        return predictions

    def workload(self, run: RunDir, model: SequenceModel, inputs: list[Any]) -> tuple[str, Callable[[], int]]:
        device = next(model.parameters()).device
        return "predictions", lambda: len(self.predict(run, model, inputs, device)) * 0  # no tokens are written


class ClassTask(PredictionTask):
    """A task whose labels are the names of classes; the model gives each class a logit."""

    measures: tuple[str, ...] = ("loss", "exact")
    output: Output = "class"

    def class_ids(self, run: RunDir, names: Sequence[str], what: str) -> list[int]:
        """The ids of classes; `what` they are the classes of, for the message if the model does not have one."""
        ids = {name: number for number, name in enumerate(run.classes)}
        return [class_id(name, ids, what) for name in names]

    def prediction(self, run: RunDir, row: Tensor) -> Prediction:
        values, ids = row.softmax(-1).sort(descending=True, stable=True)
        named = {run.classes[c]: p for c, p in zip(ids.tolist(), values.tolist(), strict=True)}
        return Prediction(next(iter(named)), float(values[0]), named)

    def validator(self, run: RunDir, examples: Sequence[Any], device: torch.device) -> ClassValidator:
        return ClassValidator(self, run, examples, device)

    def score(self, run: RunDir, predictions: Sequence[Prediction], names: Sequence[str]) -> ClassScores:
        """Compare predictions with the names of the right classes."""
        predicted = self.class_ids(run, [prediction.label for prediction in predictions], "the predictions")
        return ClassScores.of(predicted, self.class_ids(run, names, "the held-out data"), run.classes)


class ClassValidator(Validator):
    """The loss and the accuracy on held-out examples."""

    def __init__(self, task: ClassTask, run: RunDir, examples: Sequence[Any], device: torch.device) -> None:
        super().__init__(task.recipe, device)
        self.task, self.run, self.examples = task, run, list(examples)
        # Here, so that an unknown class is reported before training.
        self.labels = task.class_ids(run, [name for _, name in self.examples], "the held-out data")

    @cached_property
    def _batches(self) -> list[tuple[list[int], Batch]]:
        batches = self.task.batches(self.run, [given for given, _ in self.examples], self.labels)
        return [(some.indices, some.batch.to(self.device)) for some in batches]

    def _measure(self, model: SequenceModel) -> Validation:
        def scored(part: tuple[list[int], Batch]) -> tuple[float, list[int]]:
            return model(part[1]).item(), model.logits(part[1]).argmax(-1).tolist()

        loss, predicted = 0.0, [0] * len(self.examples)
        results = distributed.spread(scored, self._batches)
        for (indices, _), (batch_loss, labels) in zip(self._batches, results, strict=True):
            loss += batch_loss
            for i, label in zip(indices, labels, strict=True):
                predicted[i] = label
        scores = ClassScores.of(predicted, self.labels, self.run.classes)
        samples = [
            {"source": self.task.show_input(i, given), "reference": name, "output": self.run.classes[predicted[i]]}
            for i, (given, name) in enumerate(self.examples[: min(SAMPLES, self.recipe.training.validate_lines)])
        ]
        return Validation(loss / len(self.examples), exact=scores.accuracy, samples=samples)
