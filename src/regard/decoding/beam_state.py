"""The state of a search, one step of it, and the hypotheses it hands back.

Live hypotheses can still be extended; finished ones are kept apart, so that no live one can displace them, though they
count when the K best of both are found and the others dropped. A step changes tensors in place, with no branch on their
values where they are on a GPU, so that it can be captured as a CUDA graph.

Shapes: N sentences, K beams (or samples) each, F finished hypotheses, T tokens of capacity, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.decoding.constraints import NONE, Constraints, length_penalties, length_penalty, select
from regard.decoding.sampling import Words, draw, keys, uniforms
from regard.decoding.topk import log_softmax, log_sum, topk
from regard.errors import UserError
from regard.recipes.schema import DecodingSettings
from regard.text import EOS


@dataclass(frozen=True)
class Hypothesis:
    """One output for one sentence."""

    tokens: tuple[int, ...]  # generated tokens, without BOS and EOS
    logprobs: tuple[float, ...]  # log-probability of each generated token, that of EOS last when it was generated
    score: float  # what ranks it: sum of logprobs / length penalty
    finished: bool  # ended by EOS (False: cut at the maximum length, or stopped by a watcher)

    @classmethod
    def of(cls, tokens: Sequence[int], logprobs: Sequence[float], alpha: float, finished: bool) -> Hypothesis:
        """With its score under GNMT's length penalty."""
        score = sum(logprobs) / length_penalty(alpha, len(logprobs))
        return cls(tuple(tokens), tuple(logprobs), score, finished)


@dataclass
class Report:
    """How close the decisions of a search were, sentence by sentence in the order searched.

    `margins[n]` is the smallest difference that decided about sentence n. Beam search: of penalised scores, between
    the last candidate kept and the first rejected at any step, and between neighbours in the final ranking. Sampling:
    of probability, between a draw and the nearer edge of the interval of the token it fell on. Below the rounding error
    of the model, another batch or another kernel may decide otherwise. One report may serve many searches: each adds
    its sentences.
    """

    margins: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Beams:
    """What a watcher sees after a step."""

    tokens: Tensor  # [N, K, t] tokens of each beam so far
    alive: Tensor  # [N, K] whether a beam can still be extended


@dataclass(frozen=True)
class StepKey:
    """What distinguishes one step from another besides its tensors."""

    settings: tuple[tuple[str, object], ...]
    nbest: int
    tracked: bool

    @classmethod
    def of(cls, settings: DecodingSettings, nbest: int, tracked: bool) -> StepKey:
        outside = {"max_ratio", "max_extra", "batch_tokens"}  # they decide about limits and shapes, not about a step
        return cls(tuple(sorted(settings.model_dump(exclude=outside).items())), nbest, tracked)


@dataclass(eq=False)
class SearchState:
    """Beam search or sampling for N sentences, in tensors of fixed capacity that a step changes in place.

    Histories are backpointers: at step t, beam k continued beam `parents[n, k, t]` with `tokens[n, k, t]`. A finished
    hypothesis is a score and where it ended, `step * K + beam`. Column T takes the writes of sentences that are done.
    """

    settings: DecodingSettings
    nbest: int
    constraints: Constraints
    tokens: Tensor  # [N, K, T + 1]; NONE where nothing is written
    parents: Tensor  # [N, K, T + 1]
    logprobs: Tensor  # [N, K, T + 1]
    total: Tensor  # [N, K] log-probability of each live hypothesis; -inf: none
    last: Tensor  # [N, K] token that each beam is fed next
    step: Tensor  # [N] tokens generated so far
    done: Tensor  # [N] bool: nothing changes any more
    margin: Tensor  # [N] smallest decision margin so far
    best: Tensor  # [N, F] scores of the finished hypotheses, best first; -inf: none
    ends: Tensor  # [N, F] where they ended
    penalty: Tensor  # [T + 2] length penalty of n tokens
    max_penalty: Tensor  # [N] that of the maximum length
    keys: Words | None  # [N, K] what random draws are keyed by, on the host
    uniform: Tensor  # [N, K, T] random numbers of every step; T is 0 for beam search
    history: Tensor | None  # [N, K, T + 1] tokens of each beam, where they are read and are not `tokens` itself
    static: bool  # whether shapes are fixed and the host does not know where the search stands
    fed: int = 0  # steps taken, where the host knows
    moved: bool = True  # whether the last step changed which beam continues which

    @classmethod
    def create(
        cls,
        settings: DecodingSettings,
        nbest: int,
        constraints: Constraints,
        capacity: int,
        *,
        watched: bool = False,
        static: bool = False,
    ) -> SearchState:
        """For the sentences of `constraints`; to be started by `restart`."""
        device, count = constraints.limit.device, len(constraints.limit)
        beams = settings.beam if settings.method == "beam" else nbest
        finished = max(beams, nbest + 1)  # one more than is wanted, for the margin of the ranking
        tracked = settings.method == "beam" and beams > 1 and (watched or constraints.read_history)

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(count, *shape, dtype=dtype, device=device)

        return cls(
            settings=settings,
            nbest=nbest,
            constraints=constraints,
            tokens=new(beams, capacity + 1, dtype=torch.long),
            parents=new(beams, capacity + 1, dtype=torch.long),
            logprobs=new(beams, capacity + 1),
            total=new(beams),
            last=new(beams, dtype=torch.long),
            step=new(dtype=torch.long),
            done=new(dtype=torch.bool),
            margin=new(),
            best=new(finished),
            ends=new(finished, dtype=torch.long),
            penalty=length_penalties(settings.length_penalty, capacity + 1).to(device),
            max_penalty=new(),
            keys=None,
            uniform=new(beams, 0 if settings.method == "beam" else capacity),
            history=new(beams, capacity + 1, dtype=torch.long) if tracked else None,
            static=static,
        )

    def restart(self, constraints: Constraints, begin: Tensor, lines: Sequence[int], seed: int) -> None:
        """Before the first step, for which each sentence is fed `begin` [N]. `lines` and `seed` key random draws."""
        for own, new in zip(self.constraints.tensors(), constraints.tensors(), strict=True):
            own.copy_(new)
        penalty = length_penalties(self.settings.length_penalty, constraints.longest).to(begin.device)
        self.max_penalty.copy_(penalty[constraints.limit])
        if self.settings.method == "sample":
            self.keys = keys(seed, lines, self.nbest)
            self.uniform.copy_(_draws(self.keys, self.uniform.shape[-1]))
        self.reset(begin)

    def reset(self, begin: Tensor) -> None:
        """The part of `restart` that takes place on the device. Beam search begins with one beam, the others empty."""
        for history in (self.tokens, self.history):
            if history is not None:
                history.fill_(NONE)
        self.total.fill_(-math.inf)[:, : 1 if self.settings.method == "beam" else self.beams] = 0
        self.last.copy_(begin[:, None].expand_as(self.last))
        self.margin.fill_(math.inf)
        self.best.fill_(-math.inf)
        for zeros in (self.parents, self.logprobs, self.step, self.done, self.ends):
            zeros.zero_()
        self.fed = 0

    def __post_init__(self) -> None:
        device = self.done.device
        self._beam = torch.arange(self.beams, device=device)  # [K]
        self._first = torch.arange(self.beams + 1, device=device) == 0  # [K + 1]

    @property
    def beams(self) -> int:
        return self.last.shape[1]

    @property
    def capacity(self) -> int:
        return self.tokens.shape[-1] - 1

    # -- its tensors ---------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """All that it consists of, in a fixed order."""
        yield from (self.tokens, self.parents, self.logprobs, self.total, self.last, self.step, self.done, self.margin)
        yield from (self.best, self.ends, self.penalty, self.max_penalty, self.uniform)
        yield from () if self.history is None else (self.history,)
        yield from self.constraints.tensors()

    @property
    def key(self) -> StepKey:
        return StepKey.of(self.settings, self.nbest, self.history is not None)

    def keep(self, sentences: Tensor) -> SearchState:
        """A new state with these sentences only, [M] indices into the present N."""
        names = ("tokens", "parents", "logprobs", "total", "last", "step", "done", "margin", "best", "ends")
        rows: dict[str, Any] = {name: select(getattr(self, name), sentences) for name in names}
        return replace(
            self,
            constraints=self.constraints.keep(sentences),
            max_penalty=select(self.max_penalty, sentences),
            keys=None if self.keys is None else self.keys[sentences.cpu().numpy()],
            uniform=select(self.uniform, sentences),
            history=None if self.history is None else select(self.history, sentences),
            **rows,
        )

    def grown(self, capacity: int) -> SearchState:
        """A new state with capacity for so many tokens."""
        more = capacity - self.capacity

        def wider(history: Tensor, value: int) -> Tensor:
            return F.pad(history[..., :-1], (0, more + 1), value=value)

        device = self.penalty.device
        return replace(
            self,
            tokens=wider(self.tokens, NONE),
            parents=wider(self.parents, 0),
            logprobs=wider(self.logprobs, 0),
            history=None if self.history is None else wider(self.history, NONE),
            penalty=length_penalties(self.settings.length_penalty, capacity + 1).to(device),
            uniform=self.uniform if self.keys is None else _draws(self.keys, capacity).to(device),
        )

    # -- one step ------------------------------------------------------------------------------------------------------

    def advance(self, logits: Tensor) -> Tensor:
        """One step, from logits [N, K, V] for the tokens `last`; return which beam each beam continues, [N, K].

        The logits are written over. They may be [N, 1, V] at the first step, of the one beam there is.
        """
        history = self._read_history(logits.shape[1])
        exact = not self.static or self.constraints.repetition != 1  # else only the best are converted
        logits = self.constraints.penalize_repetition(logits.float() if exact else logits, history)
        choose = self._best_candidates if self.settings.method == "beam" else self._draw
        parents, tokens, logprobs, total, margin = choose(logits, history)
        self._commit(parents, tokens, logprobs, total, margin)
        self._update_done()
        return parents

    def _read_history(self, beams: int) -> Tensor:
        """[N, K, t] the tokens of so many beams; NONE past what is written."""
        history = self.tokens if self.history is None else self.history
        return history[:, :beams, : self.capacity if self.static else self.fed]

    def _best_candidates(self, logits: Tensor, history: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The best of all K * V candidates: parents, tokens, log-probabilities and totals [N, K], margins [N].

        A candidate is kept if it is among the K best of candidates and finished hypotheses together, by the score it
        would have if it ended here; the total of others is -inf. All candidates of a sentence have the same length, so
        the length penalty does not change their order. The K + 1 best of all are among the K + 1 best of every beam;
        log-probabilities are the logits less an offset.
        """
        offset: Tensor | float = 0.0
        if self.static:
            offset = log_sum(logits)
        else:
            logits = log_softmax(logits)
        forced = self.constraints.forced(logits, offset, self.step)
        end = self.constraints.mask(logits, offset, self.step, history)
        value, token = topk(logits, self.beams + 1)  # [N, K, C]
        if self.static:
            value = value - offset[..., None]  # type: ignore[index]
        single = self._single_candidates(value[..., 0], forced, end)
        if single is not None:
            only, chosen, logp = single
            first = torch.where(self._first[: value.shape[-1]], logp[..., None], -math.inf)
            value = torch.where(only[..., None], first, value)
            token = torch.where(only[..., None], chosen[..., None], token)
        each, count = value.shape[-1], value.shape[1] * value.shape[-1]
        total = (self.total[:, : value.shape[1], None] + value).flatten(1)
        if count <= self.beams:  # a vocabulary smaller than the beam
            total = F.pad(total, (0, self.beams + 1 - count), value=-math.inf)
        self.moved = self.beams > 1
        if not self.moved:  # greedy: candidates are in order, and a sentence with a finished hypothesis is done
            score = total / self._penalty(1)
            margin = (score[:, 0] - score[:, 1]).masked_fill(score[:, 1] == -math.inf, math.inf)
            return torch.zeros_like(self.last), token[:, 0, :1], value[:, 0, :1], total[:, :1], margin
        top = total.topk(self.beams + 1)
        score = top.values / self._penalty(1)
        ranked = torch.cat([self.best[:, : self.beams], score], 1).topk(self.beams + 1).values
        kept, rejected = ranked[:, -2:-1], ranked[:, -1]
        margin = (kept[:, 0] - rejected).masked_fill(rejected == -math.inf, math.inf)
        total = top.values.masked_fill(score < kept, -math.inf)[:, :-1]
        index = top.indices[:, :-1].clamp(max=count - 1)
        token, value = (x.flatten(1).gather(1, index) for x in (token, value))
        return index // each, token, value, total, margin

    def _draw(self, logits: Tensor, history: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A random token for every beam, as `_best_candidates` returns the best."""
        logp = log_softmax(logits) if not self.static else F.log_softmax(logits, -1, dtype=torch.float32)
        forced = self.constraints.forced(logp, 0.0, self.step)
        end = self.constraints.mask(logp, 0.0, self.step, history)
        single = self._single_candidates(logp.amax(-1), forced, end)
        if single is not None:
            only, chosen, value = single
            nothing = torch.full_like(logp, -math.inf)
            point = nothing.scatter_(-1, chosen[..., None], value[..., None])
            logp = torch.where(only[..., None], point, logp)
        uniform = self.uniform.gather(-1, self._column().clamp(max=self.capacity - 1)).squeeze(-1)
        choice = draw(logp, uniform, self.settings)
        self.moved = choice.moved
        margin = choice.margin.masked_fill(self.total == -math.inf, math.inf).amin(-1)
        return choice.parents, choice.tokens, choice.logprobs, self.total + choice.logprobs, margin

    def _single_candidates(
        self, best: Tensor, forced: tuple[Tensor, Tensor, Tensor] | None, end: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Beams with one candidate: [N, K] which they are, its token, and its log-probability; None: there are none.

        Where even the `best` is impossible the hypothesis ends; inside a prefix, the prefix's token is forced.
        """
        only = best == -math.inf
        if forced is None:
            if only.is_cpu and not bool(only.any()):
                return None
            return only, torch.full_like(only, EOS, dtype=torch.long), end
        inside, token, logp = forced
        return only | inside, torch.where(inside, token, EOS), torch.where(inside, logp, end)

    def _penalty(self, ahead: int = 0) -> Tensor:
        """The length penalty after so many more steps, [N, 1], or one for all."""
        return self.penalty[self.step + ahead][:, None] if self.static else self.penalty[self.fed + ahead]

    def _column(self) -> Tensor:
        """[N, K, 1] where each sentence writes: at its step, or out of the way where it is done."""
        column = torch.where(self.done, self.capacity, self.step) if self.static else self.step
        return column[:, None, None].expand(-1, self.beams, 1)

    def _commit(self, parents: Tensor, tokens: Tensor, logprobs: Tensor, total: Tensor, margin: Tensor) -> None:
        """Write down a choice. Sentences that are done, which an eager search has none of, keep what they have."""
        ended = tokens == EOS
        written = ((self.tokens, tokens), (self.parents, parents), (self.logprobs, logprobs))
        if self.history is not None:
            own = self.history.gather(1, parents[..., None].expand_as(self.history))
            self.history.copy_(own.scatter_(2, self._column(), tokens[..., None]))
        if self.static:
            going, column = ~self.done, self._column()
            for trail, new in written:
                trail.scatter_(2, column, new[..., None])
            self.last.copy_(tokens)
            self.total.copy_(torch.where(going[:, None], total, self.total))
            torch.minimum(self.margin, margin.masked_fill(self.done, math.inf), out=self.margin)
            self.step.add_(going)
            ended = ended & going[:, None]
        else:
            for trail, new in written:
                trail[..., self.fed] = new
            self.last, self.total, self.margin = tokens, total, torch.minimum(self.margin, margin)
            self.step.add_(1)
        self.fed += 1
        self._finish(ended)

    def _finish(self, which: Tensor) -> None:
        """Put the live hypotheses `which` [N, K] with the finished ones, of which the F best are kept."""
        if which.is_cpu and not bool(which.any()):
            return
        score = (self.total / self._penalty()).masked_fill(~which, -math.inf)
        end = (self.step[:, None] - 1) * self.beams + self._beam
        top = torch.cat([self.best, score], 1).topk(self.best.shape[1])
        self.best.copy_(top.values)
        self.ends.copy_(torch.cat([self.ends, end], 1).gather(1, top.indices))
        self.total = (
            self.total.masked_fill_(which, -math.inf) if self.static else self.total.masked_fill(which, -math.inf)
        )

    def _update_done(self) -> None:
        """Sentences are done at the maximum length, without live hypotheses, or when no live one can still win.

        Log-probabilities are at most 0, so the total of a hypothesis only falls; divided by the greatest penalty, that
        of the maximum length, it is a bound on what the hypothesis can ever score. Where the bound of the best live one
        is no better than the worst of the `nbest` best finished ones, going on would change nothing.
        """
        if self.settings.method == "beam" and self.settings.early_stopping:
            over = self.best[:, self.nbest - 1] >= self.total.amax(1) / self.max_penalty
        else:
            over = ~(self.total > -math.inf).any(1)
        self.done.logical_or_(over | (self.constraints.limit <= self.step))

    # -- watching ------------------------------------------------------------------------------------------------------

    def view(self, sentences: list[int] | None = None) -> Beams:
        """The beams of these sentences, none of which is done (None: of all); a copy, on the host."""
        history = self.tokens if self.history is None else self.history
        chosen = slice(None) if sentences is None else torch.tensor(sentences, device=history.device)
        step = int(self.step[chosen].max())
        return Beams(history[chosen][..., :step].cpu(), (self.total[chosen] > -math.inf).cpu())

    def stop(self, where: Tensor, sentences: list[int] | None = None) -> None:
        """The live hypotheses `where` [M, K] of these sentences (None: all) are complete as they are."""
        which = torch.zeros_like(self.total, dtype=torch.bool)
        chosen = slice(None) if sentences is None else torch.tensor(sentences, device=which.device)
        which[chosen] = where.to(which.device)
        self._finish(which & (self.total > -math.inf))
        self._update_done()

    # -- results -------------------------------------------------------------------------------------------------------

    def results(self, sentences: Sequence[int]) -> list[tuple[list[Hypothesis], float]]:
        """Of these sentences, which are done: hypotheses, best first, `nbest` at most, and the margin of the search."""
        index = torch.tensor(list(sentences), device=self.done.device)

        def read(x: Tensor) -> Tensor:
            return x.index_select(0, index).cpu()

        total, step, limit = read(self.total), read(self.step), read(self.constraints.limit)
        if bool(total.isnan().any()):
            raise UserError("the model's output is not a number: its weights are broken (did training diverge?)")
        longest, scores, ends = int(step.max()), read(self.best), read(self.ends)
        cut = step >= limit
        if bool(cut.any()):  # what is cut competes; of equals finished ones come first
            live = (total / self.penalty.cpu()[step][:, None]).masked_fill(~cut[:, None], -math.inf)
            scores = torch.cat([scores, live], 1)
            ends = torch.cat([ends, (step[:, None] - 1) * self.beams + torch.arange(self.beams)], 1)
        trails = zip(
            *(read(x[..., :longest]).tolist() for x in (self.tokens, self.parents, self.logprobs)), strict=True
        )
        found = []
        for each in zip(scores.tolist(), ends.tolist(), trails, read(self.margin).tolist(), strict=True):
            score, end, trail, margin = each
            order = sorted((k for k, value in enumerate(score) if value > -math.inf), key=lambda k: -score[k])
            ranked = [self._hypothesis(trail, end[k], score[k]) for k in order[: self.nbest + 1]]
            found.append((ranked[: self.nbest], min(margin, _margin(ranked))))
        return found

    def _hypothesis(self, trail: tuple[list[list[Any]], ...], end: int, score: float) -> Hypothesis:
        """The hypothesis that ended at `end`, from a sentence's tokens, parents and log-probabilities [K][t]."""
        tokens, parents, logprobs = trail
        last, beam = divmod(end, self.beams)
        if self.beams == 1 or self.settings.method == "sample":
            path, values = tokens[beam][: last + 1], logprobs[beam][: last + 1]
        else:
            path, values = [0] * (last + 1), [0.0] * (last + 1)
            for step in range(last, -1, -1):
                path[step], values[step] = tokens[beam][step], logprobs[beam][step]
                beam = parents[beam][step]
        finished = path[-1] == EOS
        return Hypothesis(tuple(path[:-1] if finished else path), tuple(values), score, finished)


def _margin(ranked: list[Hypothesis]) -> float:
    """Smallest difference of neighbouring scores that decided a ranking."""
    return min((a.score - b.score for a, b in pairwise(ranked) if a.tokens != b.tokens), default=math.inf)


def _draws(keyed: Words, steps: int) -> Tensor:
    """[N, K, T] the random numbers of T steps."""
    return uniforms(keyed[..., None], np.arange(steps, dtype=np.uint64))
