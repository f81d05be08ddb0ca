"""Transcription of log-mel features: by CTC, by a decoder, or by both, which score each other's candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.decoding import Hypothesis
from regard.decoding.ctc import Transcript, greedy, log_probability, prefix_beam_search
from regard.decoding.search import SearchRequest
from regard.models.speech import SpeechModel
from regard.packed import PackedFeatures, PackedLayout, PackedTokens
from regard.precision import autocast
from regard.tasks.text_writer import TextWriter
from regard.text import BOS, EOS


@dataclass(frozen=True)
class Transcriber(TextWriter):
    """Transcribes recordings, given as log-mel features.

    CTC alone: greedy search (a beam of one) or prefix beam search. A decoder alone: as other texts are written. Both:
    each finds candidates, and log p = w · CTC + (1 - w) · decoder ranks them all (w: `model.ctc_weight`).
    """

    model: SpeechModel

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        model = self.model
        assert isinstance(model, SpeechModel) and isinstance(request.source, PackedFeatures)
        if not model.has_ctc:
            return super().search(request)
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
        weight, ranked = model.settings.ctc_weight, []
        for rows, texts, scores in zip(frames, candidates, by_decoder, strict=True):
            both = zip(log_probability(rows, texts), scores, strict=True)
            rated = [_hypothesis(t, weight * a + (1 - weight) * b) for t, (a, b) in zip(texts, both, strict=True)]
            ranked.append(sorted(rated, key=lambda h: -h.score)[: request.nbest])
        return ranked

    def _ctc(self, log_probs: Tensor) -> list[Transcript]:
        """The texts that CTC finds, without those that are too short, unless all are: log_probs [T, V]."""
        beam, fewest = self.settings.beam, self.settings.min_length
        transcripts = [greedy(log_probs)] if beam == 1 else prefix_beam_search(log_probs, beam, beam)
        return [transcript for transcript in transcripts if len(transcript.tokens) >= fewest] or transcripts


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
