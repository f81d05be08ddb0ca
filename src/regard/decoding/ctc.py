"""Search in the output of connectionist temporal classification (CTC; Graves et al. 2006).

A CTC model gives every frame a distribution over the vocabulary and a blank. A sequence of one id per frame (a path)
stands for the text that is left when repeated ids are merged and blanks removed, and a text has the probability of all
its paths together. T frames, V ids, the blank among them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.special_tokens import PAD

BLANK = PAD  # never part of a text
MIN_LOG_PROB = math.log(1e-6)  # ids less likely than this in a frame are not tried
NEG_INF = -math.inf


@dataclass(frozen=True)
class Transcript:
    """The ids of a text, and its log-probability (in greedy search, that of its best path alone)."""

    tokens: tuple[int, ...]
    score: float


def greedy(log_probs: Tensor) -> Transcript:
    """The text of the most likely path: log_probs [T, V], normalised."""
    scores, ids = log_probs.max(-1)
    path = [BLANK, *ids.tolist()]
    tokens = tuple(token for before, token in pairwise(path) if token not in (BLANK, before))
    return Transcript(tokens, float(scores.sum()))


@dataclass
class _Prefix:
    """The paths so far that stand for one text: log-probabilities of those that end in a blank, and in its last id."""

    blank: float = NEG_INF
    last: float = NEG_INF

    @property
    def total(self) -> float:
        return _add(self.blank, self.last)


def prefix_beam_search(log_probs: Tensor, beam: int, nbest: int = 1) -> list[Transcript]:
    """The most likely texts, best first (Graves 2012; Hannun et al. 2014): log_probs [T, V], normalised.

    After each frame the `beam` most likely prefixes are kept. If none is dropped, the scores are exact.
    """
    prefixes: dict[tuple[int, ...], _Prefix] = {(): _Prefix(blank=0.0)}
    # The beam + 2 most likely ids of a frame are enough: without the blank and the prefix's last id, `beam` of them
    # extend a prefix. An extension by another id is less likely than all of these, unless it is a prefix already.
    top = log_probs.topk(min(beam + 2, log_probs.shape[-1])).indices.tolist()
    for row, ids in zip(log_probs.tolist(), top, strict=True):
        tried = {*ids, *(tokens[-1] for tokens in prefixes if tokens)} - {BLANK}
        likely = [(token, row[token]) for token in sorted(tried) if row[token] > MIN_LOG_PROB]
        new: dict[tuple[int, ...], _Prefix] = defaultdict(_Prefix)
        for tokens, prefix in prefixes.items():
            same = new[tokens]
            same.blank = _add(same.blank, prefix.total + row[BLANK])
            if tokens:  # the last id is repeated
                same.last = _add(same.last, prefix.last + row[tokens[-1]])
            for token, p in likely:
                # After the same id a new one begins only if a blank is between them.
                before = prefix.blank if tokens and token == tokens[-1] else prefix.total
                if before == NEG_INF:
                    continue
                longer = new[(*tokens, token)]
                longer.last = _add(longer.last, before + p)
        best = sorted(new.items(), key=lambda item: (-item[1].total, item[0]))
        prefixes = dict(best[:beam])
    return [Transcript(tokens, prefix.total) for tokens, prefix in list(prefixes.items())[:nbest]]


def _add(a: float, b: float) -> float:
    """log(e^a + e^b)."""
    if a < b:
        a, b = b, a
    return a if b == NEG_INF else a + math.log1p(math.exp(b - a))


def log_probability(log_probs: Tensor, texts: list[tuple[int, ...]]) -> list[float]:
    """The log-probability of each text, over all its paths: log_probs [T, V], normalised, on any device."""
    longest = max(map(len, texts), default=0)
    padded = [[*tokens, *[BLANK] * (longest - len(tokens))] for tokens in texts]
    targets = torch.tensor(padded, dtype=torch.long, device=log_probs.device).view(len(texts), longest)
    frames, lengths = torch.tensor([len(log_probs)] * len(texts)), torch.tensor([len(tokens) for tokens in texts])
    every = log_probs.float()[:, None].expand(-1, len(texts), -1)
    losses = F.ctc_loss(every, targets, frames, lengths, blank=BLANK, reduction="none")
    return [-loss for loss in losses.tolist()]


def align(log_probs: Tensor, tokens: Sequence[int]) -> list[int]:
    """The frame in which each id of a text begins on the most likely of its paths: log_probs [T, V].

    Viterbi's algorithm over the states blank, id 1, blank, id 2, ..., blank. A text of which there is no path (it has
    more ids than frames) is an error.
    """
    states = [BLANK, *(state for token in tokens for state in (token, BLANK))]
    scores = log_probs.tolist()
    best = [NEG_INF] * len(states)
    arrivals: list[list[int]] = []  # for each frame and state, the state of the frame before
    for t, row in enumerate(scores):
        came, new = [], []
        for s, state in enumerate(states):
            # From the same state, the one before it, and past a blank between two different ids.
            skips = s >= 2 and state not in (BLANK, states[s - 2])
            choices = [s, *([s - 1] if s else []), *([s - 2] if skips else [])] if t else []
            before = max(choices, key=best.__getitem__, default=s)
            came.append(before)
            new.append((best[before] if t else (0.0 if s < 2 else NEG_INF)) + row[state])
        best, arrivals = new, [*arrivals, came]
    state = max(range(max(len(states) - 2, 0), len(states)), key=best.__getitem__)
    if best[state] == NEG_INF or not scores:
        raise ValueError(f"{len(tokens)} ids have no path through {len(scores)} frames")
    path = []
    for came in reversed(arrivals):
        path.append(state)
        state = came[state]
    path.reverse()
    return [path.index(2 * number + 1) for number in range(len(tokens))]
