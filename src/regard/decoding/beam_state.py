"""The state of a search, and one step of it: greedy search and beam search.

A step extends each live hypothesis by one token and keeps the K best. Hypotheses that end are kept apart as finished
ones, so that a live one never displaces them, but both count when the K best are selected. A step changes tensors in
place, and with `static` no branch depends on their values, so that it can be captured as a CUDA graph.

Sampling (`sample_search`) and required terms (`term_search`) are subclasses that choose the next tokens differently.
`results` reads the hypotheses of a state, `watching` shows and stops them on the way.

Shapes: N sentences, K beams (or samples) and as many finished hypotheses each, T tokens of capacity, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.decoding.constraints import NO_TOKEN, Constraints, SingleCandidate, length_penalties, select_rows
from regard.decoding.topk import log_softmax, log_sum, topk
from regard.recipes.schema import DecodingSettings
from regard.text import EOS


class Choice(NamedTuple):
    """The next token of each beam: beam k continues beam `parents[n, k]` with `tokens[n, k]`."""

    parents: Tensor  # [N, K]
    tokens: Tensor  # [N, K]
    logprobs: Tensor  # [N, K] of these tokens
    total: Tensor  # [N, K] log-probability of the extended hypotheses; -inf: there is none


@dataclass(eq=False)
class SearchState:
    """Greedy search (K = 1) or beam search for N sentences, in tensors of fixed capacity that a step changes in place.

    Histories are backpointers: at step t, beam k continued beam `parents[n, k, t]` with `tokens[n, k, t]`. A finished
    hypothesis is a score and where it ended: `t * K + k` for beam k after t tokens. A sentence is done when it has no
    live hypothesis; further steps of its batch do not change what it has finished. With `static`, sentences may be at
    different steps.
    """

    SENTENCE_TENSORS: ClassVar[tuple[str, ...]] = (  # the fields with a row for each sentence
        *("tokens", "parents", "logprobs", "total", "last", "step", "done"),
        *("finished_scores", "finished_ends", "max_penalty", "history"),
    )

    settings: DecodingSettings
    nbest: int
    constraints: Constraints
    tokens: Tensor  # [N, K, T]; NO_TOKEN where nothing is written
    parents: Tensor  # [N, K, T], written only if beams are reordered
    logprobs: Tensor  # [N, K, T]
    total: Tensor  # [N, K] log-probability of each live hypothesis; -inf: none
    last: Tensor  # [N, K] token that each beam is fed next
    step: Tensor  # [N] tokens generated so far; it does not count after a sentence is done
    done: Tensor  # [N] whether the sentence has no live hypothesis
    finished_scores: Tensor  # [N, K] scores of the finished hypotheses, in beam search the best first; -inf: none
    finished_ends: Tensor  # [N, K] where they ended
    penalty: Tensor  # [T + 1] length penalty of n tokens
    max_penalty: Tensor  # [N] that of the maximum length
    history: Tensor | None  # [N, K, T] tokens of each beam, if they are read and beams are reordered
    static: bool  # whether shapes are fixed, and the host does not know how many steps were taken
    softmax_last: bool  # whether to normalise only the selected logits, which is faster on a GPU
    steps_taken: int = 0  # steps taken, unless static

    # -- creating and resizing -----------------------------------------------------------------------------------------

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
        softmax_last: bool = False,
        **fields: Any,
    ) -> Self:
        """Allocate the state for the sentences of `constraints`; `restart` initialises it. `fields`: of a subclass."""
        device, count = constraints.limit.device, len(constraints.limit)
        width = capacity + static  # a static search goes on writing for sentences that are done: after their end
        beams = num_beams(settings, nbest)
        reorders = cls.reorders_beams(beams)

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(count, *shape, dtype=dtype, device=device)

        return cls(
            settings=settings,
            nbest=nbest,
            constraints=constraints,
            tokens=new(beams, width, dtype=torch.long),
            parents=new(beams, width, dtype=torch.long),
            logprobs=new(beams, width),
            total=new(beams),
            last=new(beams, dtype=torch.long),
            step=new(dtype=torch.long),
            done=new(dtype=torch.bool),
            finished_scores=new(beams),
            finished_ends=new(beams, dtype=torch.long),
            penalty=length_penalties(settings.length_penalty, width).to(device),
            max_penalty=new(),
            history=new(beams, width, dtype=torch.long) if reorders and (watched or constraints.read_history) else None,
            static=static,
            softmax_last=softmax_last,
            **fields,
        )

    def __post_init__(self) -> None:
        self.reorders = self.reorders_beams(self.beams)
        self._beam_index = torch.arange(self.beams, device=self.done.device)  # [K], the parents if no beam is reordered

    @classmethod
    def reorders_beams(cls, beams: int) -> bool:
        """Whether a beam may continue another one: not with one beam only."""
        return beams > 1

    def restart(self, constraints: Constraints, begin: Tensor, lines: Sequence[int], seed: int | Sequence[int]) -> None:
        """Initialise for a first step that feeds each sentence `begin` [N].

        Line numbers and the seed (of all sentences, or of each) are those of random draws.
        """
        for old, new in zip(self.constraints.tensors(), constraints.tensors(), strict=True):
            old.copy_(new)
        penalty = length_penalties(self.settings.length_penalty, constraints.longest).to(begin.device)
        self.max_penalty.copy_(penalty[constraints.limit])
        self.reset(begin)

    def reset(self, begin: Tensor) -> None:
        """The part of `restart` that runs on the device. Each sentence begins with one beam; its others are empty."""
        for tensor in (self.tokens, self.history):
            if tensor is not None:
                tensor.fill_(NO_TOKEN)
        self.total.fill_(-math.inf)[:, :1] = 0
        self.last.copy_(begin[:, None].expand_as(self.last))
        self.finished_scores.fill_(-math.inf)
        for zeros in (self.parents, self.logprobs, self.step, self.done, self.finished_ends):
            zeros.zero_()
        self.steps_taken = 0

    @property
    def beams(self) -> int:
        return self.last.shape[1]

    @property
    def capacity(self) -> int:
        return self.tokens.shape[-1] - self.static

    def select(self, sentences: Tensor) -> Self:
        """Return a new state with these sentences only, [M] indices into the present N."""
        tensors = {name: getattr(self, name) for name in self.SENTENCE_TENSORS}
        rows: dict[str, Any] = {name: None if x is None else select_rows(x, sentences) for name, x in tensors.items()}
        return replace(self, constraints=self.constraints.select(sentences), **rows)

    def grown(self, capacity: int, prefix: int = 0, prompt: int = 0) -> Self:
        """Return a new state with capacity for this many tokens, and for prefixes and prompts of these lengths."""

        def wider(x: Tensor, value: int) -> Tensor:
            return F.pad(x, (0, capacity - self.capacity), value=value)

        return replace(
            self,
            constraints=self.constraints.widened(prefix, prompt),
            tokens=wider(self.tokens, NO_TOKEN),
            parents=wider(self.parents, 0),
            logprobs=wider(self.logprobs, 0),
            history=None if self.history is None else wider(self.history, NO_TOKEN),
            penalty=length_penalties(self.settings.length_penalty, capacity + self.static).to(self.penalty.device),
        )

    def drop(self, sentences: list[int] | slice) -> None:
        """Make these sentences done, without hypotheses."""
        self.total[sentences] = -math.inf
        self.done[sentences] = True

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the state, in a fixed order."""
        yield from (x for name, x in vars(self).items() if isinstance(x, Tensor) and not name.startswith("_"))
        yield from self.constraints.tensors()

    def sentence_tensors(self) -> Iterator[Tensor]:
        """The tensors that have a row for each sentence, in a fixed order."""
        yield from (x for x in (getattr(self, name) for name in self.SENTENCE_TENSORS) if x is not None)
        yield from self.constraints.sentence_tensors()

    # -- one step ------------------------------------------------------------------------------------------------------

    def advance(self, logits: Tensor) -> Tensor:
        """Take one step from logits [N, K, V] for the tokens `last`; return which beam each beam continues, [N, K].

        The logits are overwritten. At the first step they may be [N, 1, V], for the one beam there is.
        """
        written = (self.tokens if self.history is None else self.history)[:, : logits.shape[1]]
        history = written if self.static else written[..., : self.steps_taken]
        if not self.softmax_last or self.constraints.repetition != 1 or logits.dtype == torch.float64:
            logits = self.constraints.penalize_repetition(logits.float(), history)
        penalty = self.length_penalty(1)
        choice = self._choose(logits, history, penalty)
        self._write(choice)
        at_limit = self.constraints.limit <= self.step
        self.finish((choice.tokens == EOS) | at_limit[:, None], penalty)
        self.update_done(at_limit)
        return choice.parents

    def length_penalty(self, ahead: int = 0) -> Tensor:
        """The length penalty `ahead` steps from now, [N, 1]; [1] if all sentences are at the same step."""
        if not self.static:
            return self.penalty[self.steps_taken + ahead, None]
        return self.penalty[ahead:].index_select(0, self.step)[:, None]

    def _choose(self, logits: Tensor, history: Tensor, penalty: Tensor) -> Choice:
        """Select the best of all K * V candidates.

        A candidate is kept if it is among the K best of candidates and finished hypotheses together, by the score it
        would have if it ended here; `penalty` is the same for all candidates of a sentence. The K best of all are among
        the K best of each beam.
        """
        value, token, _ = self._top_candidates(*self._normalise(logits), history, self.beams)
        total = (self.total[:, : value.shape[1], None] + value).flatten(1)  # [N, K * C]
        if not self.reorders:  # greedy: a sentence with a finished hypothesis is done
            return Choice(self._beam_index.expand_as(self.last), token[:, 0], value[:, 0], total)
        count = total.shape[1]
        finished = self.finished_scores * penalty  # the totals that would have these scores now
        total, index = torch.cat([total, finished], 1).topk(self.beams)
        total = total.masked_fill(index >= count, -math.inf)
        index = index.clamp(max=count - 1)
        logprobs, tokens = (x.flatten(1).gather(1, index) for x in (value, token))
        return Choice(index // value.shape[-1], tokens, logprobs, total)

    def _normalise(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities; or, with `softmax_last`, the logits and what to subtract from the selected ones."""
        return (logits, log_sum(logits)) if self.softmax_last else (log_softmax(logits), None)

    def _top_candidates(
        self, logits: Tensor, offset: Tensor | None, history: Tensor, count: int
    ) -> tuple[Tensor, Tensor, SingleCandidate | None]:
        """Apply the constraints to logits [N, K, V], in place.

        Return the log-probabilities and the tokens [N, K, C] of the `count` best candidates of each beam (C is smaller
        if the vocabulary is), and the candidate of beams that are left with only one.
        """
        single = self._mask(logits, offset, history)
        value, token = topk(logits, count)
        value = value if offset is None else value - offset[..., None]
        only = self._is_single(value[..., :1], single)
        if only is not None and single is not None:
            first = torch.arange(value.shape[-1], device=value.device) == 0
            value = torch.where(only, torch.where(first, single.logprob, -math.inf), value)
            token = torch.where(only, single.token, token)
        return value, token, single

    def _mask(self, logits: Tensor, offset: Tensor | None, history: Tensor) -> SingleCandidate | None:
        """Apply the constraints to logits in place; return the candidate of beams that are left with only one.

        A static search cannot check whether there are such beams; None if they are impossible with finite logits.
        """
        possible = not self.static or self.constraints.can_exclude_all(logits.shape[-1])
        single = self.constraints.single_candidate(logits, offset, self.step) if possible else None
        self.constraints.mask(logits, self.step, history)
        return single

    def _is_single(self, best: Tensor, single: SingleCandidate | None) -> Tensor | None:
        """Return which beams have a single candidate, [N, K, 1], given the best log-probability of each; None: none."""
        if single is None:
            return None
        only = best == -math.inf
        if single.forced is not None:
            return only | single.forced
        return only if self.static or bool(only.any()) else None

    def _write(self, choice: Choice) -> None:
        """Append the chosen tokens."""
        written = [(self.tokens, choice.tokens), (self.logprobs, choice.logprobs)]
        if self.reorders:
            written.append((self.parents, choice.parents))
        if self.history is not None:
            self.history.copy_(self.history.gather(1, choice.parents[..., None].expand_as(self.history)))
            written.append((self.history, choice.tokens))
        here = self._next_index()
        for trail, new in written:
            trail.scatter_(2, here, new[..., None])
        self.last.copy_(choice.tokens)
        self.total.copy_(choice.total)
        self.step.add_(~self.done)
        self.steps_taken += 1

    def _next_index(self) -> Tensor:
        """[N, K, 1] where the next token of each beam is written."""
        return self.step[:, None, None].expand(-1, self.beams, 1)

    # -- finished hypotheses -------------------------------------------------------------------------------------------

    def finish(self, which: Tensor, penalty: Tensor) -> None:
        """Move the live hypotheses `which` [N, K] to the finished ones, of which the K best are kept.

        Unless beams are reordered, finished hypothesis k is that of beam k.
        """
        if (which.is_cpu or not self.static) and not bool(which.any()):
            return
        score = torch.where(which, self.total / penalty, -math.inf)
        end = torch.add(self._beam_index, self.step[:, None], alpha=self.beams)  # [N, K]: step * K + k
        if self.reorders:
            scores = torch.cat([self.finished_scores, score], 1)
            top = self._best_finished(scores)
            torch.gather(scores, 1, top, out=self.finished_scores)
            torch.gather(torch.cat([self.finished_ends, end], 1), 1, top, out=self.finished_ends)
        else:
            torch.where(score > -math.inf, end, self.finished_ends, out=self.finished_ends)
            torch.maximum(self.finished_scores, score, out=self.finished_scores)
        self.total.masked_fill_(which, -math.inf)

    def _best_finished(self, scores: Tensor) -> Tensor:
        """[N, K] the indices of the best of the finished hypotheses and those that have just ended, [N, 2 K]."""
        return scores.topk(self.beams).indices

    def ranking(self) -> Tensor:
        """[N, K] what ranks the finished hypotheses: their scores."""
        return self.finished_scores

    def update_done(self, at_limit: Tensor) -> None:
        """Drop the live hypotheses of sentences that are at their limit, or for which continuing changes nothing."""
        over = self._is_over(self.total.amax(1))
        torch.logical_or(over, at_limit | self.done, out=self.done)  # done stays done, also if scores are NaN
        self.total.masked_fill_(self.done[:, None], -math.inf)

    def _is_over(self, live: Tensor) -> Tensor:
        """[N] whether no live hypothesis can still win, given the greatest total of the live ones, [N].

        Log-probabilities are at most 0, so the total of a hypothesis only falls; divided by the greatest penalty, that
        of the maximum length, it bounds what the hypothesis can ever score. If the bound of the best live one is no
        better than the worst of the `nbest` best finished ones, no live one can still win.
        """
        if not self.settings.early_stopping:
            return live == -math.inf
        return self.ranking()[:, self.nbest - 1] >= live / self.max_penalty


def num_beams(settings: DecodingSettings, nbest: int) -> int:
    """The number of hypotheses of a sentence that a search extends at once; in sampling, each is a sample."""
    return settings.beam if settings.method == "beam" else nbest
