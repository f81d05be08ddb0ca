"""Hypotheses, and how they are read from the state of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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


def read_results(state: SearchState, sentences: Sequence[int]) -> list[list[Hypothesis]]:
    """Return up to `nbest` hypotheses, best first, for these sentences, which are done."""
    index = torch.tensor(list(sentences), device=state.done.device)

    def read(x: Tensor) -> Any:
        return x.index_select(0, index).tolist()

    longest = int(state.step[index].max())
    trails = zip(*(read(x[..., :longest]) for x in (state.tokens, state.parents, state.logprobs)), strict=True)
    finished = zip(read(state.finished_scores), read(state.ranking()), read(state.finished_ends), strict=True)
    results = []
    for (scores, ranking, ends), trail in zip(finished, trails, strict=True):
        if any(map(math.isnan, scores)):
            raise UserError("the model's output is not a number: its weights are broken (did training diverge?)")
        found = [k for k, score in enumerate(scores) if score > -math.inf]
        order = sorted(found, key=lambda k: (-ranking[k], not _is_finished(state, trail, ends[k])))
        results.append([_hypothesis(state, trail, ends[k], scores[k]) for k in order[: state.nbest]])
    return results


def _is_finished(state: SearchState, trail: tuple[list[list[Any]], ...], end: int) -> bool:
    """Whether the last token of a hypothesis is EOS: of equal scores, that of a finished one comes first."""
    length, beam = divmod(end, state.beams)
    return bool(trail[0][beam][length - 1] == EOS)


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
