"""What all tasks that predict a class have in common: class names, prediction, accuracy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from regard import distributed
from regard.devices import autocast
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import Batch
from regard.run_dir import RunDir
from regard.tasks.base import Output, Task
from regard.tasks.validator import SAMPLES, Validation, Validator


@dataclass(frozen=True)
class Prediction:
    """The likeliest class of an input, and the probabilities of all classes, likeliest first."""

    label: str
    probability: float
    probabilities: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.label


class ClassTask(Task):
    """A task whose examples are pairs of an input and the name of its class."""

    measures: tuple[str, ...] = ("loss", "exact")
    verb = "predict"
    output: Output = "class"
    scores_pairs = False

    @abstractmethod
    def batches(
        self, run: RunDir, inputs: Sequence[Any], labels: Sequence[int] | None = None
    ) -> Iterator[tuple[list[int], Batch]]:
        """Batches of inputs, each with the indices of its inputs. `labels` are class ids, where they are known."""

    @abstractmethod
    def read_input(self, argument: str) -> Any:
        """The input that an argument of the command line stands for."""

    @abstractmethod
    def show_input(self, index: int, given: Any) -> str:
        """A held-out input in words, for the samples of a validation."""

    def class_id(self, run: RunDir, name: str) -> int:
        if name not in run.classes:
            known = ", ".join(run.classes[:10]) + (", ..." if len(run.classes) > 10 else "")
            raise UserError(f"there is no class {name[:60]!r} in {run.path}, which has {known}")
        return run.classes.index(name)

    def predict(
        self,
        run: RunDir,
        model: SequenceModel,
        inputs: Sequence[Any],
        device: torch.device,
        progress: Callable[[int], None] | None = None,
    ) -> list[Prediction]:
        """Predict the class of each input; which inputs share a batch does not matter."""
        found: list[Prediction | None] = [None] * len(inputs)
        with torch.inference_mode():
            for indices, batch in self.batches(run, inputs):
                probabilities = model.logits(batch.to(device)).float().softmax(-1).cpu()
                for i, row in zip(indices, probabilities, strict=True):
                    values, ids = row.sort(descending=True, stable=True)
                    named = {run.classes[c]: p for c, p in zip(ids.tolist(), values.tolist(), strict=True)}
                    found[i] = Prediction(next(iter(named)), float(values[0]), named)
                if progress is not None:
                    progress(len(indices))
        return [prediction for prediction in found if prediction is not None]

    def validator(self, run: RunDir, examples: Sequence[Any], device: torch.device) -> ClassValidator:
        return ClassValidator(self, run, examples, device)

    def workload(self, run: RunDir, model: SequenceModel, inputs: list[Any]) -> tuple[str, Callable[[], int]]:
        device = next(model.parameters()).device
        return "predictions", lambda: len(self.predict(run, model, inputs, device)) * 0  # no tokens are written


class ClassValidator(Validator):
    """The loss and the accuracy on held-out examples."""

    def __init__(self, task: ClassTask, run: RunDir, examples: Sequence[Any], device: torch.device) -> None:
        super().__init__(task.recipe, device)
        self.task, self.run, self.examples = task, run, list(examples)

    @cached_property
    def _batches(self) -> list[tuple[list[int], Batch]]:
        labels = [self.task.class_id(self.run, name) for _, name in self.examples]
        batches = self.task.batches(self.run, [given for given, _ in self.examples], labels)
        return [(indices, batch.to(self.device)) for indices, batch in batches]

    def _measure(self, model: SequenceModel) -> Validation:
        def scored(part: tuple[list[int], Batch]) -> tuple[float, list[int]]:
            return model(part[1]).item(), model.logits(part[1]).argmax(-1).tolist()

        loss, predicted = 0.0, [0] * len(self.examples)
        with autocast(self.recipe.training.precision, self.device):
            scores = distributed.spread(scored, self._batches)
        for (indices, _), (batch_loss, labels) in zip(self._batches, scores, strict=True):
            loss += batch_loss
            for i, label in zip(indices, labels, strict=True):
                predicted[i] = label
        names = [self.run.classes[label] for label in predicted]
        right = sum(name == reference for name, (_, reference) in zip(names, self.examples, strict=True))
        samples = [
            {"source": self.task.show_input(i, given), "reference": reference, "output": names[i]}
            for i, (given, reference) in enumerate(self.examples[: min(SAMPLES, self.recipe.training.validate_lines)])
        ]
        return Validation(loss / len(self.examples), exact=100 * right / len(self.examples), samples=samples)
