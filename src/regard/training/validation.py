"""Looks at held-out pairs during training: loss, perplexity, BLEU, and a few translations to read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from regard.data.packing import sentence_batches
from regard.decoding.lines import LineTranslator
from regard.devices import autocast
from regard.evaluation import score_texts
from regard.models import Translator
from regard.recipes.schema import Recipe
from regard.rows import PairBatch
from regard.text import BEGIN, Tokenizer, encode_side

SAMPLES = 3


@dataclass(frozen=True)
class Look:
    """One look: mean negative log-likelihood a target token, and what the translations were worth."""

    loss: float
    bleu: float | None = None
    chrf: float | None = None
    exact: float | None = None
    samples: list[dict[str, str]] = field(default_factory=list)

    def numbers(self) -> dict[str, float]:
        named = {"loss": self.loss, "perplexity": math.exp(min(self.loss, 80)), "bleu": self.bleu, "chrf": self.chrf}
        return {k: round(v, 6) for k, v in {**named, "exact": self.exact}.items() if v is not None}


def pair_batches(
    pairs: Sequence[tuple[str, str]], tokenizers: tuple[Tokenizer, Tokenizer], recipe: Recipe
) -> list[tuple[list[int], PairBatch]]:
    """Text pairs as batches for teacher forcing, each with the indices of its pairs, alike in length."""
    first = recipe.data.mix[0] if recipe.data.mix else recipe.data
    sides = []
    for side, tag in enumerate((first.source_tag, first.target_tag)):
        tokens, _ = encode_side(
            tokenizers[side],
            [pair[side] for pair in pairs],
            tag=tag,
            longest=recipe.model.max_positions,
            lowercase=recipe.data.lowercase,
        )
        sides.append(tokens)
    sources, targets = sides
    lengths = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
    groups = sentence_batches(lengths, max(recipe.training.batch_tokens, 2048))
    return [(g, PairBatch.of([sources[i] for i in g], [targets[i] for i in g], begin=BEGIN)) for g in groups]


@dataclass
class Validator:
    """Measures a model on the held-out pairs of a recipe."""

    recipe: Recipe
    tokenizers: tuple[Tokenizer, Tokenizer]
    pairs: list[tuple[str, str]]
    device: torch.device

    @cached_property
    def _batches(self) -> list[PairBatch]:
        return [batch.to(self.device) for _, batch in pair_batches(self.pairs, self.tokenizers, self.recipe)]

    def look(self, model: Translator) -> Look:
        """Leaves the model as it was, and draws no random numbers."""
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), autocast(self.recipe.training.precision, self.device):
                total = sum(model.loss(batch).item() for batch in self._batches)
                loss = total / sum(batch.tokens for batch in self._batches)
                return self._translate(model, loss)
        finally:
            model.train(training)

    def _translate(self, model: Translator, loss: float) -> Look:
        """Greedy translations of the first held-out lines: quick, and enough to see progress."""
        chosen = self.pairs[: self.recipe.training.validate_lines]
        if not chosen:
            return Look(loss)
        greedy = self.recipe.decoding.model_copy(update={"method": "beam", "beam": 1})
        translate = LineTranslator.for_recipe(model, self.tokenizers, self.recipe, greedy)
        outputs = [answer.texts[0] for answer in translate([source for source, _ in chosen])]
        scores = score_texts(outputs, [target for _, target in chosen])
        samples = [
            {"source": source, "reference": target, "output": output}
            for (source, target), output in list(zip(chosen, outputs, strict=True))[:SAMPLES]
        ]
        return Look(loss, scores.bleu, scores.chrf, scores.exact, samples)
