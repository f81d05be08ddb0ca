"""Generation of texts from feature vectors, as `Translator` does from texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from regard.data.packing import sentence_batches
from regard.decoding import Hypothesis
from regard.decoding.search import SearchRequest, search, select_runner
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import PackedFeatures
from regard.recipes.schema import DecodingSettings, Recipe
from regard.tasks.translator import Answer
from regard.text import Tokenizer


@dataclass(frozen=True)
class TextWriter:
    """Writes the texts of inputs, given as feature vectors, with one model and its decoding settings.

    The text of an input depends on the input, the settings, the seed and (in sampling) its number, not on the others.
    """

    model: SequenceModel
    tokenizer: Tokenizer
    settings: DecodingSettings
    longest: int  # maximum number of tokens of a text
    seed: int = 0
    precision: str = "auto"  # on a GPU, as in `regard.precision`

    @classmethod
    def for_recipe(
        cls, model: SequenceModel, tokenizer: Tokenizer, recipe: Recipe, settings: DecodingSettings | None = None
    ) -> Self:
        """Use the recipe's decoding settings (or the given ones) and its maximum length."""
        chosen = recipe.decoding if settings is None else settings
        return cls(model, tokenizer, chosen, recipe.model.max_positions, precision=recipe.training.precision)

    def __call__(
        self,
        inputs: Sequence[Any],
        *,
        nbest: int = 1,
        first: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Write the texts of inputs, arrays [n, F], of which the first has the number `first`."""
        answers = [Answer()] * len(inputs)
        for batch in sentence_batches([len(given) for given in inputs], self.settings.batch_tokens):
            source = PackedFeatures.from_arrays([inputs[i] for i in batch])
            request = SearchRequest(
                source.to(next(self.model.parameters()).device),
                self.settings,
                nbest,
                banned=self.tokenizer.forbidden(),
                max_length=self.longest,
                seed=self.seed,
                lines=[first + i for i in batch],
            )
            for i, hypotheses in zip(batch, self.search(request), strict=True):
                texts = tuple(self.text_of(hypothesis.tokens) for hypothesis in hypotheses)
                answers[i] = Answer(texts, tuple(hypotheses))
            if progress is not None:
                progress(len(batch))
        return answers

    def with_prompt(self, **prompt: str) -> Self:
        """The same writer with another prompt, such as `language="de"`."""
        raise UserError(f"this model has no prompt, so it takes no {' and no '.join(prompt)}")

    def text_of(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Find the best texts of each input of a batch."""
        with torch.inference_mode():
            return search(self.model, request, run=select_runner(self.model, self.precision))
