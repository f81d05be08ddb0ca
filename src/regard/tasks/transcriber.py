"""Transcription of log-mel features: by CTC, by a decoder, or by both, which score each other's candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from regard.decoding import Hypothesis
from regard.decoding.ctc import Transcript, greedy, log_probability, prefix_beam_search
from regard.decoding.search import SearchRequest, search, select_runner
from regard.models import SequenceModel
from regard.models.decoder_state import DecoderState
from regard.models.speech import SpeechModel
from regard.packed import PackedFeatures, PackedLayout, PackedTokens
from regard.precision import autocast
from regard.recipes.schema import DecodingSettings, Recipe
from regard.tasks.speech_prompt import Prompt, languages
from regard.tasks.text_writer import TextWriter
from regard.text import BOS, EOS, Tokenizer


@dataclass(frozen=True)
class Transcriber(TextWriter):
    """Transcribes recordings, given as log-mel features.

    CTC alone: greedy search (a beam of one) or prefix beam search. A decoder alone: as other texts are written. Both:
    each finds candidates, and log p = w · CTC + (1 - w) · decoder ranks them all (w: `decoding.ctc_weight`, or else
    `model.ctc_weight`). Outputs of a model with a prompt begin with it.
    """

    model: SpeechModel
    language: str | None = None  # language of the prompt; None: detected in each recording
    task: str = "transcribe"

    @classmethod
    def for_recipe(
        cls, model: SequenceModel, tokenizer: Tokenizer, recipe: Recipe, settings: DecodingSettings | None = None
    ) -> Self:
        writer = super().for_recipe(model, tokenizer, recipe, settings)
        return replace(writer, language=recipe.data.language, task=recipe.data.speech_task)

    def with_prompt(self, **prompt: str) -> Self:
        changed = replace(self, language=prompt.get("language", self.language), task=prompt.get("task", self.task))
        _ = changed.prompt  # checks it
        return changed

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.model.settings.prompt, self.tokenizer, self.language, self.task)

    def text_of(self, tokens: Sequence[int]) -> str:
        text = super().text_of(tokens)
        return text if self.model.settings.prompt == "none" else text.strip()  # its words begin with spaces

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        model = self.model
        assert isinstance(model, SpeechModel) and isinstance(request.source, PackedFeatures)
        if not model.has_ctc:
            return super().search(request) if model.settings.prompt == "none" else self._search_after_prompt(request)
        with torch.inference_mode(), autocast(self.precision, request.source.layout.device):
            encoded, layout = model.encode(request.source)
            frames = [log_probs.cpu() for log_probs in model.ctc_log_probs(encoded, layout)]
        by_ctc = [self._ctc(rows) for rows in frames]
        if not model.has_decoder:
            return [[_hypothesis(t.tokens, t.score) for t in each[: request.nbest]] for each in by_ctc]
        # All that the beam holds, so that the best text does not depend on how many are wanted.
        wide = self.settings.beam if self.settings.method == "beam" else request.nbest
        written = super().search(replace(request, nbest=wide))
        candidates = [_distinct(ctc, texts) for ctc, texts in zip(by_ctc, written, strict=True)]
        with torch.inference_mode(), autocast(self.precision, request.source.layout.device):
            by_decoder = decoder_scores(model, encoded, layout, candidates)
        chosen, ranked = self.settings.ctc_weight, []
        weight = model.settings.ctc_weight if chosen is None else chosen
        for rows, texts, scores in zip(frames, candidates, by_decoder, strict=True):
            both = zip(log_probability(rows, texts), scores, strict=True)
            rated = [_hypothesis(t, weight * a + (1 - weight) * b) for t, (a, b) in zip(texts, both, strict=True)]
            ranked.append(sorted(rated, key=lambda h: -h.score)[: request.nbest])
        return ranked

    def _search_after_prompt(self, request: SearchRequest) -> list[list[Hypothesis]]:
        prompt, model, source = self.prompt, self.model, request.source
        runner = select_runner(model, self.precision)
        with torch.inference_mode():
            if not prompt.detects:
                return search(model, replace(request, prefixes=[prompt.ids()] * len(source.layout)), run=runner)
            with autocast(self.precision, source.layout.device):
                encoded = EncodedSource(model, *model.encode(source))
                detected = detect_languages(encoded, list(languages(self.tokenizer).values()))
            request = replace(request, prefixes=[prompt.ids(language) for language in detected])
            return search(encoded if runner is None else model, request, run=runner)

    def _ctc(self, log_probs: Tensor) -> list[Transcript]:
        """The texts that CTC finds, without those that are too short, unless all are: log_probs [T, V]."""
        beam, fewest = self.settings.beam, self.settings.min_length
        transcripts = [greedy(log_probs)] if beam == 1 else prefix_beam_search(log_probs, beam, beam)
        return [transcript for transcript in transcripts if len(transcript.tokens) >= fewest] or transcripts


@dataclass(frozen=True)
class EncodedSource:
    """A model that has already encoded its source, for a search."""

    model: SpeechModel
    encoded: Tensor  # [S', D]
    layout: PackedLayout

    def start(self, source: Any) -> DecoderState:
        return self.model.start_encoded(self.encoded, self.layout)

    def step(self, state: DecoderState, tokens: Tensor) -> tuple[Tensor, DecoderState]:
        return self.model.step(state, tokens)


def detect_languages(source: EncodedSource, ids: list[int]) -> list[int]:
    """The likeliest of the languages' tokens `ids` as the first token of each recording."""
    begin = torch.full((len(source.layout), 1), BOS, device=source.encoded.device)
    logits, _ = source.step(source.start(None), begin)
    chosen: list[int] = torch.tensor(ids)[logits[:, 0, ids].argmax(-1).cpu()].tolist()
    return chosen


def _hypothesis(tokens: Sequence[int], score: float) -> Hypothesis:
    """CTC gives a text a probability, but not its tokens one by one."""
    return Hypothesis(tuple(tokens), (score,), score, finished=True)


def _distinct(transcripts: list[Transcript], written: list[Hypothesis]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys([*(t.tokens for t in transcripts), *(h.tokens for h in written)]))


def decoder_scores(
    model: SpeechModel, encoded: Tensor, layout: PackedLayout, candidates: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[float]]:
    """The log-probability, EOS included, that the decoder gives each candidate of each recording.

    encoded [S', D], laid out by `layout`; each recording is repeated for its candidates, in one pass.
    """
    parts = layout.split(encoded)
    repeated = [part for part, texts in zip(parts, candidates, strict=True) for _ in texts]
    source = PackedLayout([len(part) for part in repeated], device=encoded.device)
    texts = [list(text) for each in candidates for text in each]
    inputs = PackedTokens.from_lists([[BOS, *text] for text in texts]).to(encoded.device)
    labels = PackedTokens.from_lists([[*text, EOS] for text in texts]).ids.to(encoded.device)
    logits = model.project(model.decode(inputs, torch.cat(repeated), source)).float()
    scores = iter(logits.log_softmax(-1).gather(1, labels[:, None])[:, 0].split(list(inputs.layout.lengths)))
    return [[float(next(scores).sum()) for _ in each] for each in candidates]
