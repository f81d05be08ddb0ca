"""Validation during training: loss, what fits the task, and a few outputs to read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from regard.devices import autocast
from regard.models import SequenceModel
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

    def numbers(self) -> dict[str, float]:
        perplexity = math.exp(min(self.loss, 80)) if self.rmse is None else None  # numbers have none
        named = {"loss": self.loss, "perplexity": perplexity, "bits_per_byte": self.bits_per_byte}
        named |= {"bleu": self.bleu, "chrf": self.chrf, "exact": self.exact}
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
