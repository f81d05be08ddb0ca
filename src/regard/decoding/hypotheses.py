"""What a search holds and what it hands back.

Shapes: N sentences still searched, K slots (beams or samples) each, t tokens generated so far, V the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from regard.errors import UserError
from regard.text import END


@dataclass(frozen=True)
class Hypothesis:
    """One output for one sentence."""

    tokens: tuple[int, ...]  # generated tokens, without begin mark and without the end mark
    logprobs: tuple[float, ...]  # log-probability of each generated token, the end mark's last when it was generated
    score: float  # what ranks it: sum of logprobs / length penalty
    finished: bool  # ended by the end mark (False: cut at the maximum length, or stopped by whoever watched)


@dataclass
class Report:
    """How close the decisions of a search were, sentence by sentence in the order searched.

    `margins[n]` is the smallest difference that decided what became of sentence n. Beam search: of penalised scores,
    between the last candidate kept and the first rejected at any step, and between neighbours in the final ranking.
    Sampling: of probability, between a draw and the nearer edge of the share of the token it fell on. Below the
    rounding error of the model, another batch or another kernel may decide otherwise. One report may serve many
    searches: each adds its sentences.
    """

    margins: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """What one step decided: slot k goes on from slot `parents[n, k]` with `tokens[n, k]`."""

    parents: Tensor  # [N, K]
    tokens: Tensor  # [N, K]
    steps: Tensor  # [N, K] the log-probabilities of these tokens
    margin: Tensor  # [N]
    moved: bool  # False where every slot is known to go on from itself, so that the state need not be reordered


@dataclass(frozen=True)
class Slots:
    """The hypotheses in hand.

    A slot is *live* (can be extended), *over* (finished by the end mark, or stopped) or *empty* (nothing possible was
    left to put there: its `total` is -inf).
    """

    tokens: Tensor  # [N, K, t]; past the length of a hypothesis that is over: end marks
    logprobs: Tensor  # [N, K, t]; past the length of a hypothesis that is over: zeros
    total: Tensor  # [N, K] sums of logprobs
    length: Tensor  # [N, K] generated tokens, the end mark counted
    live: Tensor  # [N, K] bool
    margin: Tensor  # [N] smallest decision margin so far

    @classmethod
    def start(cls, count: int, device: torch.device) -> Slots:
        """One live, empty-handed slot a sentence."""
        return cls(
            tokens=torch.zeros(count, 1, 0, dtype=torch.long, device=device),
            logprobs=torch.zeros(count, 1, 0, device=device),
            total=torch.zeros(count, 1, device=device),
            length=torch.zeros(count, 1, dtype=torch.long, device=device),
            live=torch.ones(count, 1, dtype=torch.bool, device=device),
            margin=torch.full((count,), math.inf, device=device),
        )

    @property
    def over(self) -> Tensor:
        """[N, K] True where a hypothesis is complete."""
        return ~self.live & (self.total > -math.inf)

    @property
    def finished(self) -> Tensor:
        """[N, K] True where a hypothesis is complete because its last token is the end mark."""
        last = self.tokens.gather(-1, (self.length - 1).clamp(min=0)[..., None]).squeeze(-1)
        return self.over & (last == END)

    def stop(self, where: Tensor) -> Slots:
        """These [N, K] are to be extended no further."""
        return replace(self, live=self.live & ~where)

    def only_end_where_over(self, logp: Tensor) -> Tensor:
        """[N, K, V] with one candidate for a slot that is not live: the end mark, once more, for nothing.

        So a hypothesis that is over is one candidate with its final score among all the others. Changes `logp`.
        """
        idle = (~self.live).flatten().nonzero().squeeze(1)
        if len(idle):
            rows = logp.view(-1, logp.shape[-1])
            rows.index_fill_(0, idle, -math.inf)
            rows[:, END].index_fill_(0, idle, 0.0)
        return logp

    def advance(self, choice: Choice) -> Slots:
        """The slots after a choice; their number may change."""
        parents, tokens, steps = choice.parents, choice.tokens, choice.steps
        past = parents[..., None].expand(-1, -1, self.tokens.shape[-1])
        total = self.total.gather(1, parents) + steps
        extended = self.live.gather(1, parents)
        return Slots(
            tokens=torch.cat([self.tokens.gather(1, past), tokens[..., None]], -1),
            logprobs=torch.cat([self.logprobs.gather(1, past), steps[..., None]], -1),
            total=total,
            length=self.length.gather(1, parents) + extended,
            live=extended & (tokens != END) & (total > -math.inf),
            margin=torch.minimum(self.margin, choice.margin),
        )

    def keep(self, sentences: Tensor) -> Slots:
        """Only these sentences, [M] indices into the present N."""
        return Slots(**{name: value[sentences] for name, value in vars(self).items()})

    def on_host(self) -> Slots:
        """Where what is in them can be read off one by one."""
        return Slots(**{name: value.cpu() for name, value in vars(self).items()})

    def hypotheses(self, penalty: Tensor, most: int | None = None) -> list[list[Hypothesis]]:
        """Per sentence, best first, those that are not empty, `most` at most. `penalty` [n]: that of n tokens."""
        if bool(self.total.isnan().any()):
            raise UserError("the model's output is not a number: its weights are broken (did training diverge?)")
        scores, finished = (self.total / penalty[self.length]).tolist(), self.finished.tolist()
        tokens, logprobs, length = self.tokens.tolist(), self.logprobs.tolist(), self.length.tolist()

        def read(n: int, k: int) -> Hypothesis:
            size = length[n][k]
            words = tokens[n][k][: size - finished[n][k]]
            return Hypothesis(tuple(words), tuple(logprobs[n][k][:size]), scores[n][k], finished[n][k])

        found = []
        for n, row in enumerate(zip(scores, finished, strict=True)):
            # of equal scores a finished one first: early stopping may leave with an equal one still live
            there = ((-score, not done, k) for k, (score, done) in enumerate(zip(*row, strict=True)))
            ranked = sorted(key for key in there if key[0] < math.inf)
            found.append([read(n, k) for *_, k in ranked[:most]])
        return found


def ranking_margin(ranked: list[Hypothesis], wanted: int) -> float:
    """Smallest difference of scores that put the first `wanted` in their order, before the rest."""
    near = pairwise(ranked[: wanted + 1])
    return min((a.score - b.score for a, b in near if a.tokens != b.tokens), default=math.inf)
