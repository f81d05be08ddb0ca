"""Translation: from a source text to a target text, also by a language model that continues the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.registry import TASKS
from regard.run_dir import RunDir
from regard.tasks.base import Output, TraceSpec
from regard.tasks.text import TextTask, TextValidator, pair_batches
from regard.tasks.translator import Translator
from regard.tasks.validator import OutputValidator


@TASKS.register("translation")
class TranslationTask(TextTask):
    """Trains on pairs; the loss counts every target token."""

    name = "translation"
    about = "from a source text to a target text"
    data = "pairs"
    measures: tuple[str, ...] = ("loss", "bleu", "exact")
    verb = "translate"
    usage = "'a sentence'"
    verbs = frozenset(
        {"translate", "evaluate", "align", "calibrate", "compare", "look", "draw", "explain", "bench", "export"}
    )
    has_source = True
    output: Output = "sequence"
    scores_pairs = True
    trace = TraceSpec("translate", has_alignment=True)
    explained = "translation"

    def validator(self, run: RunDir, examples: Sequence[Any], device: torch.device) -> TranslationValidator:
        return TranslationValidator(self.recipe, run.tokenizers, examples, device)

    def workload(self, run: RunDir, model: SequenceModel, inputs: list[Any]) -> tuple[str, Callable[[], int]]:
        translate = Translator.for_recipe(model, run.tokenizers, self.recipe)
        decoding = self.recipe.decoding
        how = "sampled" if decoding.method == "sample" else "greedy" if decoding.beam == 1 else f"beam {decoding.beam}"

        def tokens() -> int:
            best = [answer.hypotheses[0] for answer in translate(inputs) if answer.hypotheses]
            return sum(len(hypothesis.tokens) + hypothesis.finished for hypothesis in best)

        return f"sentences, {how}", tokens


class TranslationValidator(TextValidator, OutputValidator):
    """The loss of the references, and scores of greedy translations."""

    @cached_property
    def references(self) -> Sequence[str]:  # type: ignore[override]
        return [target for _, target in self.pairs]

    @cached_property
    def _batches(self) -> Sequence[SeqBatch]:
        batches = pair_batches(self.pairs, self.tokenizers, self.recipe)
        return [batch.to(self.device) for _, batch in batches]

    def _inputs(self, count: int) -> Sequence[str]:
        return [source for source, _ in self.pairs[:count]]

    def _writer(self, model: SequenceModel) -> Translator:
        greedy = self.recipe.decoding.model_copy(update={"method": "beam", "beam": 1})
        return Translator.for_recipe(model, self.tokenizers, self.recipe, greedy)

    def _show(self, index: int) -> str:
        return self.pairs[index][0]
