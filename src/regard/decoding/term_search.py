"""Beam search whose outputs must or must not contain terms: a `SearchState` that tracks the terms of each beam."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.decoding.beam_state import Choice, SearchState, num_beams
from regard.decoding.constraints import MIN_LOGPROB, Constraints, SingleCandidate
from regard.decoding.terms import Candidates, Match, TermProgress, allowed, share_out
from regard.recipes.schema import DecodingSettings
from regard.text import EOS

UNMET_PENALTY = 1e9  # more than any difference of scores: see MIN_LOGPROB


@dataclass(eq=False, kw_only=True)
class TermSearchState(SearchState):
    """Selects candidates by their progress in the terms of `constraints`, and ranks outputs by unmet terms first."""

    progress: TermProgress

    @classmethod
    def create(
        cls, settings: DecodingSettings, nbest: int, constraints: Constraints, capacity: int, **options: Any
    ) -> Self:
        assert constraints.terms is not None
        beams = num_beams(settings, nbest)
        progress = TermProgress.create(constraints.terms, beams)
        return super().create(settings, nbest, constraints, capacity, progress=progress, **options)

    def reset(self, begin: Tensor) -> None:
        super().reset(begin)
        self.progress.reset()

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield from self.progress.tensors()

    def sentence_tensors(self) -> Iterator[Tensor]:
        yield from super().sentence_tensors()
        yield from self.progress.tensors()

    def select(self, sentences: Tensor) -> Self:
        state = super().select(sentences)
        assert state.constraints.terms is not None
        state.progress = self.progress.select(state.constraints.terms, sentences)
        return state

    def _mask(self, logits: Tensor, offset: Tensor | None, history: Tensor) -> SingleCandidate | None:
        single = super()._mask(logits, offset, history)
        self.progress.mask_avoided(logits)
        return single

    def _choose(self, logits: Tensor, history: Tensor, penalty: Tensor) -> Choice:
        """Select from the most likely candidates and those that continue a term."""
        logits, offset = self._normalise(logits)
        extra = self.progress.candidates(logits.shape[1])
        required = logits.gather(-1, extra.tokens)  # also if a mask excludes them
        value, token, single = self._top_candidates(logits, offset, history, self.beams + 1)  # EOS may be ruled out
        required[..., -1] = logits[..., EOS]  # no term: masks apply
        required = required if offset is None else required - offset[..., None]
        return self._share_out(value, token, extra, required, None if single is None else single.forced, penalty)

    def _share_out(
        self,
        value: Tensor,
        token: Tensor,
        extra: Candidates,
        extra_value: Tensor,
        forced: Tensor | None,
        penalty: Tensor,
    ) -> Choice:
        """Select from the most likely candidates [N, K, C] and those of terms [N, K, W], by banks: see `terms`.

        Where a prefix is `forced` [N, 1, 1], there is one candidate only, and terms do not restrict it.
        """
        progress, beams = self.progress, value.shape[1]
        forced = torch.zeros_like(extra.valid[:, :1, :1]) if forced is None else forced
        is_eos = extra.tokens == EOS  # which no term contains
        same = token[..., :, None] == extra.tokens[..., None, :]
        valid = extra.valid & ~forced & ~(same.any(-2) & is_eos)
        likely = value.masked_fill((same & valid[..., None, :]).any(-1), -math.inf)  # no candidate twice
        possible = torch.where(is_eos, extra_value, extra_value.clamp(min=MIN_LOGPROB))
        tokens = torch.cat([token, extra.tokens], -1)
        values = torch.cat([likely, possible.masked_fill(~valid, -math.inf)], -1)  # [N, K, M]
        present = Match(progress.match.partial[:, :beams], progress.match.met[:, :beams])
        before, needed = progress.needed(present), progress.needed_after(tokens)
        left = self.constraints.limit - self.step
        would_end = (token[..., 0] == EOS) & (before > 0) & (before < left[:, None])  # [N, K]
        if not self.reorders:  # from there, a single beam generates its terms only
            left = progress.end_in_time(would_end[:, 0], self.step, before[:, 0], left)
        of_terms = torch.arange(tokens.shape[-1], device=tokens.device) >= token.shape[-1]
        fits = allowed(needed, before, tokens, left) & (~would_end[..., None] | of_terms | (needed == 0))
        blocked = ~(fits & (values > -math.inf)).any(-1, keepdim=True)  # by avoided terms: the others are then ignored
        values = values.masked_fill(~(fits | blocked | forced), -math.inf)
        total = (self.total[:, :beams, None] + values).flatten(1)
        bank, count = needed.flatten(1), total.shape[1]
        if self.reorders:
            whole = self.finished_scores.masked_fill(progress.unmet > 0, -math.inf)
            total = torch.cat([total, whole * penalty], 1)
            bank = F.pad(bank, (0, self.beams))  # bank 0: nothing is needed any more
        index = share_out(total, bank, self.beams)
        total = total.gather(1, index).masked_fill(index >= count, -math.inf)
        index = index.clamp(max=count - 1)
        parents = index // tokens.shape[-1]
        chosen, logprobs = (x.flatten(1).gather(1, index) for x in (tokens, values))
        progress.advance(parents, chosen)
        return Choice(parents, chosen, logprobs, total)

    def _best_finished(self, scores: Tensor) -> Tensor:
        unmet = torch.cat([self.progress.unmet, self.progress.unmet_terms()], 1)
        top = _ranking(scores, unmet).topk(self.beams).indices
        torch.gather(unmet, 1, top, out=self.progress.unmet)
        return top

    def ranking(self) -> Tensor:
        return _ranking(self.finished_scores, self.progress.unmet)


def _ranking(scores: Tensor, unmet: Tensor) -> Tensor:
    """Numbers that rank hypotheses with these scores [N, K]: by unmet terms first, then by score."""
    return scores.double() - UNMET_PENALTY * unmet
