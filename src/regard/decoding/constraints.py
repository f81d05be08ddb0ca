"""The length penalty, and the constraints on what a search may generate.

Shapes: N sentences, K beams (or samples) each, T tokens of capacity, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.recipes.schema import DecodingSettings
from regard.text import EOS

MIN_LOGPROB = -1e6  # log-probability of a token that the model finds impossible but a constraint demands
NONE = -1  # padding in lists of token ids


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
    """The most tokens to generate, EOS counted: floor(max_ratio * source length + max_extra).

    At least one, and always enough to end after a forced prefix.
    """
    return max(1, prefix_length + 1, math.floor(settings.max_ratio * source_length + settings.max_extra))


@dataclass(frozen=True)
class Constraints:
    """Which tokens may come next: forced prefixes, banned tokens, minimum and maximum length, no repeated n-grams.

    And which are made less likely: those that occur already, in the prompt or in the output.
    """

    limit: Tensor  # [N] the most tokens to generate, EOS counted
    prefix: Tensor  # [N, P] what each output has to begin with, padded with NONE
    prompt: Tensor  # [N, Q] what counts as said before the first token, padded with NONE
    banned: Tensor  # [B] ids that are never generated
    min_length: int
    no_repeat: int
    repetition: float
    longest: int  # the greatest limit, known to the host

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
        most: int | Sequence[int] | None = None,
    ) -> Constraints:
        """For sources of these lengths in tokens, EOS counted; `most` is what the model can generate at most."""
        prefixes = [()] * len(lengths) if prefixes is None else prefixes
        prompts = [()] * len(lengths) if prompts is None else prompts
        for name, given in (("prefixes", prefixes), ("prompts", prompts)):
            if len(given) != len(lengths):
                raise ValueError(f"{len(given)} {name} for {len(lengths)} sentences")
        if any(EOS in prefix for prefix in prefixes):
            raise ValueError("a prefix cannot contain the end mark")
        limits = [max_length(settings, n, len(p)) for n, p in zip(lengths, prefixes, strict=True)]
        if most is not None:
            each = [most] * len(limits) if isinstance(most, int) else most
            limits = [min(pair) for pair in zip(limits, each, strict=True)]
        return cls(
            limit=torch.tensor(limits, dtype=torch.long, device=device),
            prefix=_padded(prefixes, device),
            prompt=_padded(prompts, device),
            banned=torch.tensor(list(banned), dtype=torch.long, device=device),
            min_length=settings.min_length,
            no_repeat=settings.no_repeat_ngram,
            repetition=settings.repetition_penalty,
            longest=max(limits),
        )

    @property
    def read_history(self) -> bool:
        """Whether they depend on the tokens generated so far."""
        return self.no_repeat > 0 or self.repetition != 1

    def tensors(self) -> tuple[Tensor, ...]:
        return self.limit, self.prefix, self.prompt, self.banned

    def keep(self, sentences: Tensor) -> Constraints:
        """Only these sentences, [M] indices into the present N."""
        limit, prefix, prompt = (select(x, sentences) for x in (self.limit, self.prefix, self.prompt))
        return replace(self, limit=limit, prefix=prefix, prompt=prompt)

    def penalize_repetition(self, logits: Tensor, history: Tensor) -> Tensor:
        """The logits [N, K, V] with those of tokens that occur already pushed down: l / r where l > 0, else l * r.

        Keskar et al. 2019, section 4.1, and for negative logits, which dividing would raise, a product. The tokens are
        those of the prompt and of `history` [N, K, t], of which NONE is no token.
        """
        if self.repetition == 1:
            return logits
        before = self.prompt[:, None].expand(-1, logits.shape[1], -1)
        seen = among(torch.cat([before, history], -1), logits.shape[-1])
        return torch.where(seen, torch.where(logits > 0, logits / self.repetition, logits * self.repetition), logits)

    def forced(self, logits: Tensor, offset: Tensor | float, step: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where a prefix leaves no choice [N, 1], its token and that token's log-probability, logit - offset, [N, K].

        `step` [N] is how many tokens each sentence has. None: no sentence has a prefix.
        """
        width = self.prefix.shape[1]
        if not width:
            return None
        token = self.prefix.gather(1, step.clamp(max=width - 1)[:, None])
        inside = (token >= 0) & (step < width)[:, None]
        token = token.clamp(min=0).expand(logits.shape[:2])
        logp = logits.gather(-1, token[..., None]).squeeze(-1) - offset
        return inside, token, logp.clamp(min=MIN_LOGPROB)

    def mask(self, logits: Tensor, offset: Tensor | float, step: Tensor, history: Tensor) -> Tensor:
        """Put -inf where a token may not follow, in place; return the log-probability of EOS from before, [N, K]."""
        end = (logits[..., EOS] - offset).clamp(min=MIN_LOGPROB)
        logits.index_fill_(-1, self.banned, -math.inf)
        if self.min_length:
            logits[..., EOS].masked_fill_((step < self.min_length)[:, None], -math.inf)
        if 0 < self.no_repeat <= history.shape[-1]:
            logits.masked_fill_(repeats(history, step, self.no_repeat, logits.shape[-1]), -math.inf)
        return end


def select(x: Tensor, sentences: Tensor) -> Tensor:
    """These rows of x [N, ...], [M] indices."""
    return x[: len(sentences)] if x.numel() == 0 and len(sentences) <= len(x) else x.index_select(0, sentences)


def repeats(history: Tensor, step: Tensor, size: int, vocabulary: int) -> Tensor:
    """[N, K, V] True where a token would complete an n-gram of this size that `history` [N, K, t >= size] has.

    Of the history the first `step` [N] tokens are written and the rest is NONE, which is no token.
    """
    grams = history.unfold(-1, size, 1)  # [N, K, t - size + 1, size]
    last = (step[:, None] + torch.arange(1 - size, 0, device=step.device)).clamp(min=0)  # [N, size - 1]
    context = history.gather(-1, last[:, None].expand(-1, history.shape[1], -1))
    seen = (grams[..., :-1] == context[..., None, :]).all(-1) & (step >= size)[:, None, None]
    return among(torch.where(seen, grams[..., -1], NONE), vocabulary)


def among(tokens: Tensor, vocabulary: int) -> Tensor:
    """[N, K, V] True for the ids among `tokens` [N, K, any], of which NONE is no id."""
    spare = torch.where(tokens == NONE, vocabulary, tokens)  # NONE marks a spare column
    found = torch.zeros(*tokens.shape[:2], vocabulary + 1, dtype=torch.bool, device=tokens.device)
    return found.scatter_(-1, spare, True)[..., :vocabulary]


def _padded(lists: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[N, longest] with NONE where a list has ended."""
    width = max(map(len, lists), default=0)
    rows = [[*tokens, *[NONE] * (width - len(tokens))] for tokens in lists]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(lists), width)
