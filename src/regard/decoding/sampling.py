"""Drawing tokens at random, so that a line's draws depend on nothing but the seed and the line.

A generator that hands out numbers in turn would give a sentence other numbers in another batch. Here a number is a hash
of what it is for: the seed, the line, which of its samples, and the step. Shapes: N sentences, K samples each, V the
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.decoding.topk import selects, stable_topk
from regard.recipes.schema import DecodingSettings

Words = NDArray[np.uint64]
MASK = (1 << 64) - 1
SOME = 1024  # tokens that usually hold `top_p` of the probability


@dataclass(frozen=True)
class Choice:
    """One token for each beam: beam k continues beam `parents[n, k]` with `tokens[n, k]`."""

    parents: Tensor  # [N, K]
    tokens: Tensor  # [N, K]
    logprobs: Tensor  # [N, K] of these tokens
    margin: Tensor  # [N, K]
    moved: bool  # False where every beam continues itself, so that the model's state need not be reordered


def splitmix64(words: Words) -> Words:
    """Scramble 64-bit words one by one (Steele, Lea and Flood 2014): one bit flipped flips about half of them."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def fold(*parts: int) -> int:
    """One 64-bit number for several: other parts, or the same in another order, give another (all but surely)."""
    word = np.zeros(1, dtype=np.uint64)
    for part in parts:
        word = splitmix64(word ^ np.array([part & MASK], dtype=np.uint64))
    return int(word[0])


def keys(seed: int, lines: Sequence[int], samples: int) -> Words:
    """[N, K] what the draws of each sample of each line are keyed by."""
    line = np.array([number & MASK for number in lines], dtype=np.uint64)[:, None]
    sample = np.arange(samples, dtype=np.uint64)[None, :]
    return splitmix64(splitmix64(splitmix64(np.array([seed & MASK], dtype=np.uint64)) ^ line) ^ sample)


def uniforms(key: Words, step: int | Words) -> Tensor:
    """[N, K] one number in [0, 1) for each key at this step: 24 bits of hash, which float32 holds exactly.

    Keys [N, K, 1] at steps [T] give those of all the steps at once, [N, K, T].
    """
    bits = splitmix64(key ^ np.uint64(step)) >> np.uint64(40)
    return torch.from_numpy(bits.astype(np.float32)) * 2.0**-24


def kept(logp: Tensor, settings: DecodingSettings) -> tuple[Tensor, Tensor]:
    """The tokens a draw may fall on, likeliest first, as (probabilities, ids), both [N, K, at most V].

    Temperature first; then the `top_k` likeliest; of these the smallest set that reaches `top_p` of their probability.
    What is left out has probability 0, or is not there; the rest need not sum to 1.
    """
    value = logp / settings.temperature
    if settings.top_k:
        order = stable_topk(value, settings.top_k)
        share = value.gather(-1, order).softmax(-1)
    else:
        whole = value.softmax(-1)
        order = _holding(settings.top_p, value, whole)
        share = whole.gather(-1, order)
    if settings.top_p < 1:  # a token stays if those before it fall short; nothing is before the first
        share = share * (share.cumsum(-1) - share < settings.top_p)
    return share, order


def _holding(least: float, value: Tensor, share: Tensor) -> Tensor:
    """The likeliest tokens' ids, as many as hold at least this share, or more: a few if they do, and else all."""
    if least < 1 and selects(value, SOME):
        order = stable_topk(value, SOME)
        if bool((share.gather(-1, order).cumsum(-1)[..., -1] >= least).all()):
            return order
    return stable_topk(value, value.shape[-1])


def draw(logp: Tensor, uniform: Tensor, settings: DecodingSettings) -> Choice:
    """One token a sample by the inverse of the cumulative distribution: `logp` [N, K or 1, V], `uniform` [N, K]."""
    grown = logp.shape[1] != uniform.shape[1]  # the first step: all samples continue the one beam
    share, order = kept(logp, settings)
    share, order = (x.expand(-1, uniform.shape[1], -1).contiguous() for x in (share, order))
    edges = share.cumsum(-1)  # token i owns [edges[i - 1], edges[i])
    target = (uniform * edges[..., -1])[..., None]  # [N, K, 1]
    last = (share > 0).sum(-1, keepdim=True) - 1
    place = torch.searchsorted(edges, target, right=True).minimum(last).clamp(min=0)
    upper = edges.gather(-1, place)
    below = torch.where(place > 0, target - upper + share.gather(-1, place), math.inf)
    above = torch.where(place < last, upper - target, math.inf)
    here = torch.zeros_like(uniform, dtype=torch.long) if grown else _own(uniform)
    margin = torch.minimum(below, above).squeeze(-1)
    token = order.gather(-1, place)
    logprobs = logp.expand(-1, uniform.shape[1], -1).gather(-1, token)
    return Choice(here, token.squeeze(-1), logprobs.squeeze(-1), margin, moved=grown)


def _own(like: Tensor) -> Tensor:
    """[N, K] every beam its own parent."""
    return torch.arange(like.shape[1], device=like.device).expand(like.shape)
