"""Length penalty and output constraints.

Shapes: N sentences, K beams (or samples) each, T tokens of capacity, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.decoding import repetition
from regard.decoding.terms import NO_TOKEN, TermTable
from regard.recipes.schema import DecodingSettings
from regard.text import EOS

MIN_LOGPROB = -1e6  # log-probability of a token that the model finds impossible but a constraint demands


def length_penalty(alpha: float, length: int) -> float:
    """((5 + n) / 6) ** alpha for n tokens, EOS counted (Wu et al. 2016, equation 14).

    >>> length_penalty(1.0, 7)
    2.0
    """
    return float(((5 + length) / 6) ** alpha)


def length_penalties(alpha: float, longest: int) -> Tensor:
    """[longest + 1] the penalty of 0, 1, ... tokens; a table, so that a length has the same bits in every batch."""
    return torch.tensor([length_penalty(alpha, n) for n in range(longest + 1)], dtype=torch.float32)


def max_length(settings: DecodingSettings, source_length: int, prefix_length: int = 0) -> int:
    """The maximum number of tokens to generate, EOS counted: floor(max_ratio * source length + max_extra).

    At least one, and always enough to end after a forced prefix.
    """
    return max(1, prefix_length + 1, math.floor(settings.max_ratio * source_length + settings.max_extra))


class SingleCandidate(NamedTuple):
    """The one candidate of beams that have no choice, [N or 1, K or 1, 1] each."""

    forced: Tensor | None  # whether a prefix forces it; None: there are no prefixes
    token: Tensor | int
    logprob: Tensor


@dataclass(frozen=True)
class Constraints:
    """Forced prefixes, banned tokens, terms, lengths, repeated n-grams, and the repetition penalty."""

    limit: Tensor  # [N] maximum number of tokens to generate, EOS counted
    prefix: Tensor  # [N, P] tokens that each output must begin with, padded with NO_TOKEN
    prompt: Tensor  # [N, Q] tokens that the repetition penalty counts as generated, padded with NO_TOKEN
    banned: Tensor  # [B] ids that are never generated
    banned_first: Tensor  # [F] ids that are not generated first, after the prefix
    ends: Tensor  # [E] ids that end an output as EOS does
    samples: bool  # whether tokens are drawn
    min_length: int
    no_repeat: int  # size of n-grams that may not be repeated; 0: none
    repetition: float  # repetition penalty; 1: none
    longest: int  # the greatest limit, known to the host
    terms: TermTable | None = None  # that outputs must or must not contain

    @classmethod
    def of(
        cls,
        settings: DecodingSettings,
        lengths: Sequence[int],
        device: torch.device,
        *,
        prefixes: Sequence[Sequence[int]] | None = None,
        banned: Sequence[int] = (),
        prompts: Sequence[Sequence[int]] | None = None,
        capacity: int | Sequence[int] | None = None,
        terms: TermTable | None = None,
    ) -> Constraints:
        """The constraints of sources of these lengths, EOS counted; `capacity`: the maximum output of the model."""
        prefixes = [()] * len(lengths) if prefixes is None else prefixes
        prompts = [()] * len(lengths) if prompts is None else prompts
        for name, given in (("prefixes", prefixes), ("prompts", prompts)):
            if len(given) != len(lengths):
                raise ValueError(f"{len(given)} {name} for {len(lengths)} sentences")
        if any(EOS in prefix for prefix in prefixes):
            raise ValueError("a prefix cannot contain EOS")
        limits = [max_length(settings, n, len(p)) for n, p in zip(lengths, prefixes, strict=True)]
        if terms is not None:
            needed = terms.capacity_needed.tolist()
            limits = [max(limit, len(p) + n) for limit, p, n in zip(limits, prefixes, needed, strict=True)]
        if capacity is not None:
            each = [capacity] * len(limits) if isinstance(capacity, int) else capacity
            limits = [min(pair) for pair in zip(limits, each, strict=True)]
        return cls(
            limit=torch.tensor(limits, dtype=torch.long, device=device),
            prefix=_padded(prefixes, device),
            prompt=_padded(prompts, device),
            banned=_ids({*banned, *settings.stop_ids, *settings.suppress_ids}, device),
            banned_first=_ids(settings.begin_suppress_ids, device),
            ends=_ids(settings.stop_ids, device),
            samples=settings.method == "sample",
            min_length=settings.min_length,
            no_repeat=settings.no_repeat_ngram,
            repetition=settings.repetition_penalty,
            longest=max(limits),
            terms=terms,
        )

    @property
    def read_history(self) -> bool:
        """Whether the constraints depend on the tokens generated so far."""
        return self.no_repeat > 0 or self.repetition != 1

    def tensors(self) -> tuple[Tensor, ...]:
        tensors = self.limit, self.prefix, self.prompt, self.banned, self.banned_first, self.ends
        return tensors if self.terms is None else (*tensors, *self.terms.tensors())

    def sentence_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that have a row for each sentence, in a fixed order."""
        tensors = self.limit, self.prefix, self.prompt
        return tensors if self.terms is None else (*tensors, *self.terms.sentence_tensors())

    def widened(self, prefix: int, prompt: int) -> Constraints:
        """Return them with columns for prefixes and prompts of these lengths."""
        wide = [
            F.pad(x, (0, max(0, width - x.shape[1])), value=NO_TOKEN)
            for x, width in ((self.prefix, prefix), (self.prompt, prompt))
        ]
        return replace(self, prefix=wide[0], prompt=wide[1])

    def to(self, device: torch.device) -> Constraints:
        names = ("limit", "prefix", "prompt", "banned", "banned_first", "ends")
        terms = None if self.terms is None else self.terms.to(device)
        return replace(self, **{name: getattr(self, name).to(device) for name in names}, terms=terms)

    def select(self, sentences: Tensor) -> Constraints:
        """Select sentences, [M] indices into the present N."""
        limit, prefix, prompt = (select_rows(x, sentences) for x in (self.limit, self.prefix, self.prompt))
        terms = None if self.terms is None else self.terms.select(sentences)
        return replace(self, limit=limit, prefix=prefix, prompt=prompt, terms=terms)

    def penalize_repetition(self, logits: Tensor, history: Tensor) -> Tensor:
        """Lower the logits [N, K, V] of tokens in the prompt or in `history` [N, K, t], if there is a penalty."""
        if self.repetition == 1:
            return logits
        before = self.prompt[:, None].expand(-1, logits.shape[1], -1)
        return repetition.penalized(logits, torch.cat([before, history], -1), self.repetition)

    def can_exclude_all(self, vocabulary: int) -> bool:
        """Return whether a prefix or a mask may leave a beam without a choice of tokens."""
        always = len(self.banned) + len(self.banned_first) + 1  # min_length excludes EOS
        always += 0 if self.terms is None else self.terms.avoid.shape[1] * self.terms.patterns.shape[2]
        return self.prefix.shape[1] > 0 or self.no_repeat > 0 or always >= vocabulary

    def single_candidate(self, logits: Tensor, offset: Tensor | None, step: Tensor) -> SingleCandidate:
        """Return the candidate of beams that have only one, from logits [N, K, V] before `mask`.

        It is the prefix's token inside a prefix, and else EOS. `step` [N] is the number of tokens so far; the
        log-probability is logit - offset [N, K].
        """
        width = self.prefix.shape[1]
        if width:
            step = step[:, None]
            token = self.prefix.gather(1, step.clamp(max=width - 1))  # [N, 1]
            forced = (token >= 0) & (step < width)
            token = torch.where(forced, token, EOS)[..., None]  # [N, 1, 1]
            logit = logits.gather(-1, token.expand(-1, logits.shape[1], -1))
            logp = logit if offset is None else logit - offset[..., None]
            return SingleCandidate(forced[..., None], token, logp.clamp(min=MIN_LOGPROB))
        logp = logits[..., EOS, None] if offset is None else (logits[..., EOS] - offset)[..., None]
        return SingleCandidate(None, EOS, logp.clamp(min=MIN_LOGPROB))

    def mask(self, logits: Tensor, step: Tensor, history: Tensor) -> None:
        """Put -inf in place where a token may not follow; `step` [N] is the number of tokens so far."""
        if len(self.ends):  # EOS stands for all of them: the most likely one in a search, their sum in sampling
            ends = torch.cat([logits[..., EOS, None], logits.index_select(-1, self.ends)], -1)
            logits[..., EOS] = ends.logsumexp(-1) if self.samples else ends.amax(-1)
        logits.index_fill_(-1, self.banned, -math.inf)
        if len(self.banned_first):
            is_first = step == (self.prefix >= 0).sum(1)
            chosen = logits.index_select(-1, self.banned_first)
            logits.index_copy_(-1, self.banned_first, chosen.masked_fill(is_first[:, None, None], -math.inf))
        if self.min_length:
            logits[..., EOS].masked_fill_((step < self.min_length)[:, None], -math.inf)
        if 0 < self.no_repeat <= history.shape[-1]:
            logits.masked_fill_(repetition.completed_ngrams(history, step, self.no_repeat, logits.shape[-1]), -math.inf)


def select_rows(x: Tensor, sentences: Tensor) -> Tensor:
    """Select rows of x [N, ...] by indices [M]."""
    return x[: len(sentences)] if x.numel() == 0 and len(sentences) <= len(x) else x.index_select(0, sentences)


def _ids(ids: Iterable[int], device: torch.device) -> Tensor:
    """The ids in ascending order, as a tensor."""
    return torch.tensor(sorted({*ids}), dtype=torch.long, device=device)


def _padded(lists: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[N, longest], padded with NO_TOKEN."""
    width = max(map(len, lists), default=0)
    rows = [[*tokens, *[NO_TOKEN] * (width - len(tokens))] for tokens in lists]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(lists), width)
