"""Language modelling: continuing plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from regard.data.stream import PlannedBatches
from regard.data.windows import TokenWindows
from regard.metrics.perplexity import WindowBatches
from regard.models import SequenceModel
from regard.recipes.schema import Recipe
from regard.registry import TASKS
from regard.run_dir import RunDir
from regard.tasks.base import Dataset, TraceSpec
from regard.tasks.generator import Generator
from regard.tasks.text import TextTask, TextValidator, TokenDataset, batch_tokens
from regard.tasks.validator import SAMPLES, Validation

PROMPT_WORDS = 6  # words of a held-out text that are the prompt
SAMPLE_TOKENS = 60  # length of a continuation in a validation
BENCHMARK_TOKENS = 64  # length of a continuation in a benchmark


@TASKS.register("language-modelling")
class LanguageModellingTask(TextTask):
    """Trains on plain text, documents or one stream; the loss counts every token."""

    name = "language-modelling"
    about = "continue plain text"
    data = "text"
    measures = ("loss",)
    verb = "generate"
    usage = "'Once upon a time'"
    verbs = frozenset({"generate", "evaluate", "look", "draw", "explain", "bench", "export"})
    has_source = False
    output = "sequence"
    scores_pairs = True
    trace = TraceSpec("generate", input_sides=("inputs",), joined=True)
    explained = "continuation"

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        check_one_side(recipe)

    def packer(self, dataset: Dataset, static: bool) -> PlannedBatches:
        if self.recipe.data.documents != "stream":
            return super().packer(dataset, static)
        assert isinstance(dataset, TokenDataset)
        settings, context = self.recipe.training, self.recipe.model.max_positions
        return TokenWindows(
            dataset.stores, self.weights, context=context, batch_tokens=settings.batch_tokens, seed=settings.seed
        )

    def validator(self, run: RunDir, examples: Sequence[Any], device: torch.device) -> LanguageModelValidator:
        return LanguageModelValidator(self.recipe, run.tokenizers, examples, device)

    def workload(self, run: RunDir, model: SequenceModel, inputs: list[Any]) -> tuple[str, Callable[[], int]]:
        generate = Generator.for_recipe(model, run.tokenizers, self.recipe)
        prompts = [" ".join(text.split()[:PROMPT_WORDS]) for text in inputs]

        def tokens() -> int:
            return sum(len(found.hypotheses[0].tokens) for found in generate(prompts, tokens=BENCHMARK_TOKENS))

        return f"prompts continued by up to {BENCHMARK_TOKENS} tokens", tokens


class LanguageModelValidator(TextValidator):
    """The loss on the held-out text, and a few continuations to read."""

    @cached_property
    def _windows(self) -> WindowBatches:
        return WindowBatches.of(
            self.tokenizers[1],
            [text for _, text in self.pairs],
            context=self.recipe.model.max_positions,
            stride=self.recipe.model.max_positions,
            stream=self.recipe.data.documents == "stream",
            batch_tokens=batch_tokens(self.recipe),
        )

    def _measure(self, model: SequenceModel) -> Validation:
        score = self._windows.score(model, self.device)
        return Validation(score.loss, samples=self._continuations(model), bits_per_byte=score.bits_per_byte)

    def _continuations(self, model: SequenceModel) -> list[dict[str, str]]:
        """Continue the beginnings of a few held-out texts."""
        chosen = self._texts()[: min(SAMPLES, self.recipe.training.validate_lines)]
        if not chosen:
            return []
        ends = [_end_of_words(text, PROMPT_WORDS) for text in chosen]
        prompts = [text[:end] for text, end in zip(chosen, ends, strict=True)]
        outputs = Generator.for_recipe(model, self.tokenizers, self.recipe)(prompts, tokens=SAMPLE_TOKENS)
        return [
            {"source": prompt, "reference": text[end:], "output": output.texts[0]}
            for prompt, text, end, output in zip(prompts, chosen, ends, outputs, strict=True)
        ]

    def _texts(self) -> list[str]:
        """The first documents; of a stream, the text at its beginning and after each third."""
        if self.recipe.data.documents != "stream":
            return [text for _, text in self.pairs[:SAMPLES]]
        text = self.pairs[0][1]
        begins = [text.find("\n", len(text) * part // SAMPLES) + 1 if part else 0 for part in range(SAMPLES)]
        return [text[begin : begin + 500] for begin in begins if text[begin : begin + 500].strip()]


def _end_of_words(text: str, count: int) -> int:
    """The index at which the first `count` words of a text end."""
    match = re.match(rf"\s*(\S+\s+){{0,{count - 1}}}\S+", text)
    return match.end() if match else 0


def check_one_side(recipe: Recipe) -> None:
    """Raise a ValueError if plain text is to have two vocabularies."""
    if not recipe.text.shared:
        raise ValueError("plain text has one side: text.shared must be true")
