"""Validation during training: loss, what fits the task, and a few outputs to read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from regard import distributed
from regard.metrics.text_scores import score_texts
from regard.models import SequenceModel
from regard.packed import TextBatch
from regard.precision import autocast
from regard.recipes.schema import Recipe

SAMPLES = 3  # outputs to read


@dataclass(frozen=True)
class Validation:
    """One validation: mean negative log-likelihood per target, and scores of the outputs where a task has them."""

    loss: float
    bleu: float | None = None
    chrf: float | None = None
    exact: float | None = None
    samples: list[dict[str, str]] = field(default_factory=list)
    bits_per_byte: float | None = None
    rmse: float | None = None
    mae: float | None = None
    r2: float | None = None
    wer: float | None = None
    cer: float | None = None

    def numbers(self) -> dict[str, float]:
        # Numbers have no perplexity, and CTC has none per token.
        perplexity = math.exp(min(self.loss, 80)) if self.rmse is None and self.wer is None else None
        named = {"loss": self.loss, "perplexity": perplexity, "bits_per_byte": self.bits_per_byte}
        named |= {"bleu": self.bleu, "chrf": self.chrf, "exact": self.exact}
        named |= {"wer": self.wer, "cer": self.cer}
        named |= {"rmse": self.rmse, "mae": self.mae, "r2": self.r2}
        return {k: round(v, 6) for k, v in named.items() if v is not None}


class Validator(ABC):
    """Measures a model on the held-out examples of a recipe."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device

    def validate(self, model: SequenceModel) -> Validation:
        """Measure a model; its mode and the random number generators are left unchanged."""
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), autocast(self.recipe.training.precision, self.device):
                return self._measure(model)
        finally:
            model.train(training)

    @abstractmethod
    def _measure(self, model: SequenceModel) -> Validation: ...


def text_scores(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """BLEU, chrF and the share of exact outputs, as fields of `Validation`."""
    scores = score_texts(outputs, references)
    return {"bleu": scores.bleu, "chrf": scores.chrf, "exact": scores.exact}


class OutputValidator(Validator):
    """The loss of reference texts, and scores of greedy outputs for the first `training.validate_lines` inputs."""

    references: Sequence[str]

    @property
    @abstractmethod
    def _batches(self) -> Sequence[TextBatch]:
        """All examples, for teacher forcing."""

    @abstractmethod
    def _inputs(self, count: int) -> Sequence[Any]:
        """The first inputs, as `_writer` takes them."""

    @abstractmethod
    def _writer(self, model: SequenceModel) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """A greedy search, which is quick and enough to see progress: from inputs to answers with `texts`."""

    @abstractmethod
    def _show(self, index: int) -> str:
        """An input in words, for the samples."""

    def _scores(self, outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Scores of outputs: fields of `Validation`."""
        return text_scores(outputs, references)

    def _measure(self, model: SequenceModel) -> Validation:
        total = sum(distributed.spread(lambda batch: model(batch).item(), self._batches))
        loss = total / sum(batch.num_targets for batch in self._batches)
        references = self.references[: self.recipe.training.validate_lines]
        if not references:
            return Validation(loss)
        inputs, size = self._inputs(len(references)), -(-len(references) // distributed.world_size())
        parts = [inputs[begin : begin + size] for begin in range(0, len(inputs), size)]  # one for each process
        written = distributed.spread(self._writer(model), parts)
        outputs = [answer.texts[0] for answers in written for answer in answers]
        samples = [
            {"source": self._show(i), "reference": reference, "output": output}
            for i, (reference, output) in enumerate(list(zip(references, outputs, strict=True))[:SAMPLES])
        ]
        return Validation(loss, samples=samples, **self._scores(outputs, references))
