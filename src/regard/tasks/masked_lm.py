"""Masked language modelling: guessing tokens that are hidden from the model (BERT)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch

from regard import distributed
from regard.data.masking import MaskedBatches, MaskingPolicy
from regard.data.packing import sentence_batches
from regard.data.stream import BatchStream, generator
from regard.metrics.masked_lm import score_masks
from regard.models import SequenceModel
from regard.models.bert import BertSettings
from regard.packed import SeqBatch
from regard.recipes.schema import Recipe
from regard.registry import TASKS
from regard.run_dir import RunDir
from regard.tasks.base import Dataset, TraceSpec
from regard.tasks.language_modelling import check_one_side
from regard.tasks.mask_filler import MaskFiller
from regard.tasks.text import TextTask, TextValidator, batch_tokens
from regard.tasks.validator import SAMPLES, Validation
from regard.text import BOS, EOS, Tokenizer
from regard.text.encode import chunk, prefix_ids
from regard.text.tokenizers import join_tokens


@TASKS.register("masked-lm")
class MaskedLMTask(TextTask):
    """Trains on documents of plain text; the loss counts the tokens to be guessed."""

    name = "masked-lm"
    about = "fill in masked tokens"
    data = "text"
    sections = ("text",)
    measures = ("loss", "exact")
    verb = "fill"
    usage = "'the [MASK] sat on the mat'"
    verbs = frozenset({"fill", "evaluate", "look", "draw", "explain", "bench", "export"})
    has_source = False
    output = "fills"
    scores_pairs = False
    trace = TraceSpec("fill", input_sides=("source", "inputs"))
    explained = "masks"

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        check_one_side(recipe)
        if recipe.data.documents == "stream":
            raise ValueError('masked-lm reads whole documents: data.documents must be "line" or "paragraph"')

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        policy = masking_policy(self.recipe, run.tokenizers[0])
        return MaskedBatches(self.packer(dataset, static), self.recipe.training.seed, policy)

    def validator(self, run: RunDir, examples: Sequence[Any], device: torch.device) -> MaskedLMValidator:
        return MaskedLMValidator(self.recipe, run.tokenizers, examples, device)

    def workload(self, run: RunDir, model: SequenceModel, inputs: list[Any]) -> tuple[str, Callable[[], int]]:
        tokenizer = run.tokenizers[0]
        fill = MaskFiller.for_recipe(model, tokenizer, self.recipe)
        limit = self.recipe.model.max_positions // 2  # with a mask and special tokens this fits into the model
        short = [tokenizer.decode(tokenizer.encode(text)[:limit]) for text in inputs]
        masked = [" ".join(["[MASK]", *text.split()[1:]]) for text in short]
        return "texts with one mask filled in", lambda: len(fill(masked, top=1)) * 0  # no tokens are written


def masking_policy(recipe: Recipe, tokenizer: Tokenizer) -> MaskingPolicy:
    return MaskingPolicy.of(tokenizer, cast(BertSettings, recipe.model).mask_prob)


class MaskedLMValidator(TextValidator):
    """The loss and the accuracy on masked tokens, which are the same ones in every validation."""

    @cached_property
    def _batches(self) -> list[SeqBatch]:
        tokenizer, prefix = self.tokenizers[0], prefix_ids(self.recipe)
        limit = self.recipe.model.max_positions - len(prefix) - 1
        documents = tokenizer.encode_batch([text for _, text in self.pairs])
        texts = [[*prefix, *part, EOS] for ids in documents for part in chunk(ids, limit)]
        groups = sentence_batches(list(map(len, texts)), batch_tokens(self.recipe))
        policy, random = masking_policy(self.recipe, tokenizer), generator(self.recipe.training.seed)
        clean = [SeqBatch.from_lists([[] for _ in group], [texts[i] for i in group], bos=BOS) for group in groups]
        return [policy.mask(batch, random).to(self.device) for batch in clean]

    def _measure(self, model: SequenceModel) -> Validation:
        scores = distributed.spread(lambda batch: score_masks(model, batch), self._batches)
        masks = sum(batch.num_targets for batch in self._batches)
        loss, right = (sum(numbers) for numbers in zip(*scores, strict=True))
        return Validation(loss / masks, exact=100 * right / masks, samples=self._samples(model))

    def _samples(self, model: SequenceModel) -> list[dict[str, str]]:
        """A few texts with their masks, with the first guesses, and as they were."""
        batch = self._batches[0]
        if not self.recipe.training.validate_lines or batch.loss_mask is None:
            return []
        guessed = torch.where(batch.loss_mask, model.logits(batch).argmax(-1), batch.source.ids)
        sides = [batch.source.layout.split(ids) for ids in (batch.source.ids, batch.labels, guessed)]
        show = self.tokenizers[0].token_texts
        texts = [[join_tokens(show(ids.tolist()[1:-1])) for ids in side[:SAMPLES]] for side in sides]
        return [{"source": a, "reference": b, "output": c} for a, b, c in zip(*texts, strict=True)]
