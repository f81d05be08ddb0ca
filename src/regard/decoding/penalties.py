"""What a hypothesis may contain, how long it may be, and what its length is worth.

Shapes: N sentences, K slots each, t tokens generated so far, P tokens of the longest prefix, Q of the longest prompt,
V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.recipes.schema import Decoding
from regard.text import END

WORST = -1e6  # log-probability of what the model finds impossible but the rules demand
NONE = -1  # where a row of tokens has ended


def length_penalties(alpha: float, longest: int) -> Tensor:
    """[longest + 1] the penalty ((5 + n) / 6) ** alpha of n tokens (Wu et al. 2016, equation 14).

    A table rather than a formula at each step: the same n gives the same bits whatever the batch.

    >>> length_penalties(1.0, 7)[[1, 7]].tolist()
    [1.0, 2.0]
    """
    return torch.tensor([((5 + n) / 6) ** alpha for n in range(longest + 1)], dtype=torch.float32)


def longest_output(settings: Decoding, source_length: int, prefix_length: int = 0) -> int:
    """The most tokens to generate, the end mark counted: floor(max_ratio * source length + max_extra).

    At least one, and always enough to end after a forced prefix.
    """
    return max(1, prefix_length + 1, math.floor(settings.max_ratio * source_length + settings.max_extra))


@dataclass(frozen=True)
class Rules:
    """Which tokens may come next: forced prefixes, forbidden tokens, the minimum length, no repeated n-grams.

    And which are made less likely: those that were said already, in the prompt or since.
    """

    limit: Tensor  # [N] the most tokens to generate, the end mark counted
    prefix: Tensor  # [N, P] what each sentence has to begin with; NONE past its end
    prompt: Tensor  # [N, Q] what was said before the first token; NONE past its end
    forbidden: Tensor  # [F] ids never generated
    min_length: int
    no_repeat: int
    repetition: float
    longest: int  # of all limits, at most

    @classmethod
    def of(
        cls,
        settings: Decoding,
        lengths: Sequence[int],
        prefixes: Sequence[Sequence[int]] | None,
        forbidden: Sequence[int],
        device: torch.device,
        prompts: Sequence[Sequence[int]] | None = None,
        longest: int | Sequence[int] | None = None,
    ) -> Rules:
        """For sources of these lengths in tokens, their end marks counted; `longest` is the most that is possible."""
        prefixes = [()] * len(lengths) if prefixes is None else prefixes
        prompts = [()] * len(lengths) if prompts is None else prompts
        for name, given in (("prefixes", prefixes), ("prompts", prompts)):
            if len(given) != len(lengths):
                raise ValueError(f"{len(given)} {name} for {len(lengths)} sentences")
        if any(END in prefix for prefix in prefixes):
            raise ValueError("a prefix cannot contain the end mark")
        limits = [longest_output(settings, n, len(p)) for n, p in zip(lengths, prefixes, strict=True)]
        if longest is not None:
            most = [longest] * len(limits) if isinstance(longest, int) else longest
            limits = [min(pair) for pair in zip(limits, most, strict=True)]
        return cls(
            limit=torch.tensor(limits, dtype=torch.long, device=device),
            prefix=_padded(prefixes, device),
            prompt=_padded(prompts, device),
            forbidden=torch.tensor(list(forbidden), dtype=torch.long, device=device),
            min_length=settings.min_length,
            no_repeat=settings.no_repeat,
            repetition=settings.repetition_penalty,
            longest=max(limits),
        )

    def keep(self, sentences: Tensor) -> Rules:
        """Only these sentences, [M] indices into the present N."""
        limit, prefix, prompt = (rows[sentences] for rows in (self.limit, self.prefix, self.prompt))
        return replace(self, limit=limit, prefix=prefix, prompt=prompt)

    def discourage(self, logits: Tensor, history: Tensor) -> Tensor:
        """The logits [N, K, V] with those of tokens said already pushed down: l / r where l > 0, else l * r.

        Keskar et al. 2019, section 4.1, with the negative logits they did not speak of: dividing would raise them.
        Said is what stands in the prompt or in `history` [N, K, t].
        """
        if self.repetition == 1:
            return logits
        before = self.prompt[:, None].expand(-1, logits.shape[1], -1)
        seen = among(torch.cat([before, history], -1), logits.shape[-1])
        return torch.where(seen, torch.where(logits > 0, logits / self.repetition, logits * self.repetition), logits)

    def apply(self, logp: Tensor, history: Tensor) -> Tensor:
        """The log-probabilities [N, K, V] with -inf for what may not follow `history` [N, K, t]. Changes `logp`.

        What is allowed keeps the model's own log-probability. Where nothing is, the hypothesis ends.
        """
        step = history.shape[-1]
        forced = self._forced(logp, step)
        end = logp[..., END].clamp(min=WORST)  # a copy, from before the end mark is forbidden
        logp.index_fill_(-1, self.forbidden, -math.inf)
        if step < self.min_length:
            logp[..., END] = -math.inf
        if 0 < self.no_repeat <= step:
            logp.masked_fill_(repeats(history, self.no_repeat, logp.shape[-1]), -math.inf)
        stuck = logp.amax(-1) == -math.inf
        logp[..., END] = torch.where(stuck, end, logp[..., END])
        return logp if forced is None else torch.where((self.prefix[:, step] >= 0)[:, None, None], forced, logp)

    def _forced(self, logp: Tensor, step: int) -> Tensor | None:
        """[N, K, V] with -inf for all but the prefix's token at this step; None past every prefix."""
        if step >= self.prefix.shape[1]:
            return None
        token = self.prefix[:, step].clamp(min=0)[:, None, None].expand(-1, logp.shape[1], 1)
        return torch.full_like(logp, -math.inf).scatter(-1, token, logp.gather(-1, token).clamp(min=WORST))


def repeats(history: Tensor, size: int, vocabulary: int) -> Tensor:
    """[N, K, V] True where a token would complete an n-gram of this size that `history` [N, K, t >= size] has."""
    grams = history.unfold(-1, size, 1)  # [N, K, t - size + 1, size]
    context = history[..., history.shape[-1] - size + 1 :]  # [N, K, size - 1]
    seen = (grams[..., :-1] == context[..., None, :]).all(-1)
    return among(torch.where(seen, grams[..., -1], NONE), vocabulary)


def among(tokens: Tensor, vocabulary: int) -> Tensor:
    """[N, K, V] True for the ids among `tokens` [N, K, any], of which NONE is no id."""
    spare = torch.where(tokens == NONE, vocabulary, tokens)  # what is no id marks a spare column
    found = torch.zeros(*tokens.shape[:2], vocabulary + 1, dtype=torch.bool, device=tokens.device)
    return found.scatter_(-1, spare, True)[..., :vocabulary]


def _padded(lists: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[N, longest] with NONE where a list has ended."""
    width = max(map(len, lists), default=0)
    rows = [[*tokens, *[NONE] * (width - len(tokens))] for tokens in lists]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(lists), width)
