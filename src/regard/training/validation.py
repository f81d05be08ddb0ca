"""Looks at held-out data during training: loss, perplexity, what fits the task, and a few outputs to read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F

from regard.data.corpora import corpora
from regard.data.packing import class_labels_only, generator, sentence_batches
from regard.decoding.translate import Translator
from regard.devices import autocast
from regard.evaluation import score_texts
from regard.evaluation.perplexity import WindowBatches
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.recipes.schema import BertSettings, Recipe
from regard.text import BOS, EOS, Tokenizer, encode_side
from regard.text.encode import ContextBudget, chunk, prefix_ids
from regard.text.tokenizers import join_tokens

SAMPLES = 3
PROMPT_WORDS = 6  # of a held-out text, for the model to go on from
SAMPLE_TOKENS = 60


@dataclass(frozen=True)
class Validation:
    """One look: mean negative log-likelihood a target token, and what the outputs were worth."""

    loss: float
    bleu: float | None = None
    chrf: float | None = None
    exact: float | None = None
    samples: list[dict[str, str]] = field(default_factory=list)
    bits_per_byte: float | None = None

    def numbers(self) -> dict[str, float]:
        named = {"loss": self.loss, "perplexity": math.exp(min(self.loss, 80)), "bits_per_byte": self.bits_per_byte}
        named |= {"bleu": self.bleu, "chrf": self.chrf, "exact": self.exact}
        return {k: round(v, 6) for k, v in named.items() if v is not None}


def encode_pairs(
    pairs: Sequence[tuple[str, str]], tokenizers: tuple[Tokenizer, Tokenizer], recipe: Recipe
) -> tuple[list[list[int]], list[list[int]], list[bool]]:
    """The source and the target tokens of text pairs for teacher forcing, and which pairs had to be truncated."""
    first = corpora(recipe.data)[0]
    front, room, plain = prefix_ids(recipe), ContextBudget.of(recipe), recipe.data.is_text
    sources, one = encode_side(
        tokenizers[0],
        [source for source, _ in pairs],
        tag=first.source_tag,
        max_len=room.source,
        lowercase=recipe.data.lowercase,
        prefix=front,
    )
    sources = [[] for _ in pairs] if plain else sources
    targets, other = encode_side(
        tokenizers[1],
        [target for _, target in pairs],
        tag=first.target_tag,
        max_len=[room.target(len(source)) for source in sources],
        lowercase=recipe.data.lowercase,
        prefix=front if plain else (),  # of plain text the target is what is read
    )
    return sources, targets, [(a and not plain) or b for a, b in zip(one, other, strict=True)]


def token_batches(
    sources: list[list[int]], targets: list[list[int]], recipe: Recipe
) -> list[tuple[list[int], SeqBatch]]:
    """Batches for teacher forcing, each with the indices of its pairs, alike in length."""
    lengths = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
    groups = sentence_batches(lengths, max(recipe.training.batch_tokens, 2048))
    return [(g, SeqBatch.from_lists([sources[i] for i in g], [targets[i] for i in g], bos=BOS)) for g in groups]


def pair_batches(
    pairs: Sequence[tuple[str, str]], tokenizers: tuple[Tokenizer, Tokenizer], recipe: Recipe
) -> list[tuple[list[int], SeqBatch]]:
    """Text pairs as batches for teacher forcing, each with the indices of its pairs."""
    sources, targets, _ = encode_pairs(pairs, tokenizers, recipe)
    return token_batches(sources, targets, recipe)


@dataclass
class Validator:
    """Measures a model on the held-out pairs of a recipe."""

    recipe: Recipe
    tokenizers: tuple[Tokenizer, Tokenizer]
    pairs: list[tuple[str, str]]
    device: torch.device

    @cached_property
    def _batches(self) -> list[SeqBatch]:
        found = [batch for _, batch in pair_batches(self.pairs, self.tokenizers, self.recipe)]
        return [(class_labels_only(b) if self.recipe.classifies else b).to(self.device) for b in found]

    def validate(self, model: SequenceModel) -> Validation:
        """Leaves the model as it was, and draws no random numbers."""
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), autocast(self.recipe.training.precision, self.device):
                return self._measure(model)
        finally:
            model.train(training)

    def _measure(self, model: SequenceModel) -> Validation:
        total = sum(model(batch).item() for batch in self._batches)
        return self._translate(model, total / sum(batch.num_targets for batch in self._batches))

    def _translate(self, model: SequenceModel, loss: float) -> Validation:
        """Greedy translations of the first held-out lines: quick, and enough to see progress."""
        chosen = self.pairs[: self.recipe.training.validate_lines]
        if not chosen:
            return Validation(loss)
        greedy = self.recipe.decoding.model_copy(update={"method": "beam", "beam": 1})
        translate = Translator.for_recipe(model, self.tokenizers, self.recipe, greedy)
        outputs = [answer.texts[0] for answer in translate([source for source, _ in chosen])]
        scores = score_texts(outputs, [target for _, target in chosen])
        samples = [
            {"source": source, "reference": target, "output": output}
            for (source, target), output in list(zip(chosen, outputs, strict=True))[:SAMPLES]
        ]
        if self.recipe.classifies:  # BLEU has nothing to say of single words
            return Validation(loss, exact=scores.exact, samples=samples)
        return Validation(loss, scores.bleu, scores.chrf, scores.exact, samples)


class LanguageModelValidator(Validator):
    """Measures a model that continues text: its loss on the held-out text, and a few continuations to read."""

    @cached_property
    def _laid(self) -> WindowBatches:
        return WindowBatches.out(
            self.tokenizers[1],
            [text for _, text in self.pairs],
            context=self.recipe.model.max_positions,
            stride=self.recipe.model.max_positions,
            stream=self.recipe.data.documents == "stream",
            batch_tokens=max(self.recipe.training.batch_tokens, 2048),
        )

    def _measure(self, model: SequenceModel) -> Validation:
        score = self._laid.score(model, self.device)
        return Validation(score.loss, samples=self._continuations(model), bits_per_byte=score.bits_per_byte)

    def _continuations(self, model: SequenceModel) -> list[dict[str, str]]:
        """What the model makes of the beginnings of a few held-out texts."""
        from regard.decoding.generate import Generator

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
        """The first documents; of a stream, what stands at its beginning and after each third."""
        if self.recipe.data.documents != "stream":
            return [text for _, text in self.pairs[:SAMPLES]]
        text = self.pairs[0][1]
        lines = [text.find("\n", len(text) * part // SAMPLES) + 1 if part else 0 for part in range(SAMPLES)]
        return [text[at : at + 500] for at in lines if text[at : at + 500].strip()]


class MaskedLMValidator(Validator):
    """Measures a model that fills gaps in: always the same gaps, so that looks can be compared."""

    @cached_property
    def _batches(self) -> list[SeqBatch]:
        from regard.data.masking import MaskingPolicy

        tokenizer, front = self.tokenizers[0], prefix_ids(self.recipe)
        room = self.recipe.model.max_positions - len(front) - 1
        tokens = tokenizer.encode_batch([text for _, text in self.pairs])
        pieces = [[*front, *piece, EOS] for ids in tokens for piece in chunk(ids, room)]
        groups = sentence_batches(list(map(len, pieces)), max(self.recipe.training.batch_tokens, 2048))
        assert isinstance(self.recipe.model, BertSettings)
        gaps, random = MaskingPolicy.of(tokenizer, self.recipe.model.mask_prob), generator(self.recipe.training.seed)
        whole = [SeqBatch.from_lists([[] for _ in g], [pieces[i] for i in g], bos=BOS) for g in groups]
        return [gaps.mask(batch, random).to(self.device) for batch in whole]

    def _measure(self, model: SequenceModel) -> Validation:
        total, right, gaps = 0.0, 0, sum(batch.num_targets for batch in self._batches)
        for batch in self._batches:
            logits = model.logits(batch)[batch.loss_mask].float()
            labels = batch.labels[batch.loss_mask]
            total += F.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(-1) == labels).sum())
        return Validation(total / gaps, exact=100 * right / gaps, samples=self._filled(model))

    def _filled(self, model: SequenceModel) -> list[dict[str, str]]:
        """A few texts with their gaps, with the best guess in each, and as they were."""
        batch = self._batches[0]
        if not self.recipe.training.validate_lines or batch.loss_mask is None:
            return []
        guessed = torch.where(batch.loss_mask, model.logits(batch).argmax(-1), batch.source.ids)
        rows = [batch.source.layout.split(ids) for ids in (batch.source.ids, batch.labels, guessed)]
        show = self.tokenizers[0].token_texts
        texts = [[join_tokens(show(ids.tolist()[1:-1])) for ids in row[:SAMPLES]] for row in rows]
        return [{"source": a, "reference": b, "output": c} for a, b, c in zip(*texts, strict=True)]


def make_validator(
    recipe: Recipe, tokenizers: tuple[Tokenizer, Tokenizer], pairs: list[tuple[str, str]], device: torch.device
) -> Validator:
    """The one that suits what a recipe trains: translation (or classes), text that goes on, or text with gaps."""
    if not recipe.data.is_text:
        return Validator(recipe, tokenizers, pairs, device)
    kind = MaskedLMValidator if recipe.model.family == "bert" else LanguageModelValidator
    return kind(recipe, tokenizers, pairs, device)


def _end_of_words(text: str, count: int) -> int:
    """Where the first so many words of a text end."""
    found = re.match(rf"\s*(\S+\s+){{0,{count - 1}}}\S+", text)
    return found.end() if found else 0
