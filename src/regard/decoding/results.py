"""Hypotheses, and how they are read from the state of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.decoding.beam_state import SearchState
from regard.decoding.constraints import length_penalty
from regard.errors import UserError
from regard.text import EOS


@dataclass(frozen=True)
class Hypothesis:
    """One output for one sentence."""

    tokens: tuple[int, ...]  # generated tokens, without BOS and EOS
    logprobs: tuple[float, ...]  # log-probability of each generated token, that of EOS last when it was generated
    score: float  # sum of logprobs / length penalty; ranks the hypotheses
    finished: bool  # ended by EOS (False: cut at the maximum length, or stopped by a watcher)

    @classmethod
    def of(cls, tokens: Sequence[int], logprobs: Sequence[float], alpha: float, finished: bool) -> Hypothesis:
        """Compute the score, with GNMT's length penalty."""
        score = sum(logprobs) / length_penalty(alpha, len(logprobs))
        return cls(tuple(tokens), tuple(logprobs), score, finished)


@dataclass
class Report:
    """The margins of the decisions of a search, per sentence in the order searched.

    `margins[n]` is the smallest difference that decided about sentence n. In beam search: between the scores of the
    last candidate kept and the first rejected at any step, and of neighbours in the final ranking. In sampling: between
    a draw and the nearer edge of the interval of the token it fell on. If it is below the rounding error of the model,
    another batch or another kernel may decide otherwise. Several searches may append to one report.
    """

    margins: list[float] = field(default_factory=list)


def read_results(state: SearchState, sentences: Sequence[int]) -> list[tuple[list[Hypothesis], float]]:
    """Return up to `nbest` hypotheses, best first, and the smallest margin, for these sentences, which are done."""
    index = torch.tensor(list(sentences), device=state.done.device)

    def read(x: Tensor) -> Any:
        return x.index_select(0, index).tolist()

    longest = int(state.step[index].max())
    trails = zip(*(read(x[..., :longest]) for x in (state.tokens, state.parents, state.logprobs)), strict=True)
    margins = [math.inf] * len(index) if state.margin is None else read(state.margin)
    finished = zip(read(state.finished_scores), read(state.ranking()), read(state.finished_ends), strict=True)
    results = []
    for (scores, ranking, ends), trail, margin in zip(finished, trails, margins, strict=True):
        if any(map(math.isnan, scores)):
            raise UserError("the model's output is not a number: its weights are broken (did training diverge?)")
        order = sorted((k for k, score in enumerate(scores) if score > -math.inf), key=lambda k: -ranking[k])
        ranked = [_hypothesis(state, trail, ends[k], scores[k]) for k in order[: state.nbest + 1]]
        results.append((ranked[: state.nbest], min(margin, _ranking_margin(ranked))))
    return results


def _hypothesis(state: SearchState, trail: tuple[list[list[Any]], ...], end: int, score: float) -> Hypothesis:
    """Follow the backpointers from `end` through a sentence's tokens, parents and log-probabilities [K][t]."""
    tokens, parents, logprobs = trail
    length, beam = divmod(end, state.beams)
    path, values = tokens[beam][:length], logprobs[beam][:length]
    for step in range(length - 1, -1, -1) if state.reorders else ():
        path[step], values[step] = tokens[beam][step], logprobs[beam][step]
        beam = parents[beam][step]
    finished = path[-1] == EOS
    return Hypothesis(tuple(path[:-1] if finished else path), tuple(values), score, finished)


def _ranking_margin(ranked: list[Hypothesis]) -> float:
    """The smallest difference of neighbouring scores that decided a ranking."""
    return min((a.score - b.score for a, b in pairwise(ranked) if a.tokens != b.tokens), default=math.inf)
