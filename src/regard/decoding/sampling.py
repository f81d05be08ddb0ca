"""Random sampling of tokens, with draws that depend only on the seed and the line.

A sequential random generator would give a sentence other numbers in another batch. Here each number is a hash of the
seed, the line, the sample and the step. Shapes: N sentences, K samples each, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.decoding.topk import selects, stable_topk
from regard.recipes.schema import DecodingSettings

Words = NDArray[np.uint64]
MASK = (1 << 64) - 1
TOP_P_TOKENS = 1024  # tokens that usually hold `top_p` of the probability


def splitmix64(words: Words) -> Words:
    """Hash 64-bit words elementwise (Steele, Lea and Flood 2014): flipping one bit flips about half of the output."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def fold(*parts: int) -> int:
    """Hash several integers to one of 64 bits; their order matters."""
    word = np.zeros(1, dtype=np.uint64)
    for part in parts:
        word = splitmix64(word ^ np.array([part & MASK], dtype=np.uint64))
    return int(word[0])


def keys(seed: int | Sequence[int], lines: Sequence[int], samples: int) -> Words:
    """[N, K] the keys of the draws of each sample of each line; the seed is that of all lines, or of each."""
    seeds = np.array([number & MASK for number in ([seed] if isinstance(seed, int) else seed)], dtype=np.uint64)
    line = np.array([number & MASK for number in lines], dtype=np.uint64)[:, None]
    sample = np.arange(samples, dtype=np.uint64)[None, :]
    return splitmix64(splitmix64(splitmix64(seeds)[:, None] ^ line) ^ sample)


def uniforms(key: Words, step: int | Words) -> Tensor:
    """[N, K] a number in [0, 1) for each key at this step: 24 bits of a hash, which float32 represents exactly.

    Keys [N, K, 1] and steps [T] give the numbers of all steps at once, [N, K, T].
    """
    bits = splitmix64(key ^ np.uint64(step)) >> np.uint64(40)
    return torch.from_numpy(bits.astype(np.float32)) * 2.0**-24


def filter_tokens(logp: Tensor, settings: DecodingSettings) -> tuple[Tensor, Tensor]:
    """Apply temperature, then `top_k`, then `top_p`: (probabilities, ids), [N, K, at most V] each, in descending order.

    `top_p` keeps the smallest set of the most probable tokens that reaches this share. Tokens that are left out have
    probability 0 or are missing; the rest need not sum to 1.
    """
    value = logp / settings.temperature
    if settings.top_k:
        order = stable_topk(value, settings.top_k)
        share = value.gather(-1, order).softmax(-1)
    else:
        whole = value.softmax(-1)
        order = _top_p_order(settings.top_p, value, whole)
        share = whole.gather(-1, order)
    if settings.top_p < 1:  # a token stays if those before it do not reach top_p; so the first always stays
        share = share * (share.cumsum(-1) - share < settings.top_p)
    return share, order


def _top_p_order(top_p: float, value: Tensor, share: Tensor) -> Tensor:
    """Ids of the most probable tokens in descending order: some if they hold `top_p` of the probability, else all."""
    if top_p < 1 and selects(value, TOP_P_TOKENS):
        order = stable_topk(value, TOP_P_TOKENS)
        if bool((share.gather(-1, order).cumsum(-1)[..., -1] >= top_p).all()):
            return order
    return stable_topk(value, value.shape[-1])


def draw(logp: Tensor, uniform: Tensor, settings: DecodingSettings) -> tuple[Tensor, Tensor]:
    """Draw one token per sample by inverting the cumulative distribution: `logp` [N, K or 1, V], `uniform` [N, K].

    Return tokens and their log-probabilities, [N, K] each.
    """
    share, order = filter_tokens(logp, settings)
    share, order = (x.expand(-1, uniform.shape[1], -1).contiguous() for x in (share, order))
    edges = share.cumsum(-1)  # token i has the interval [edges[i - 1], edges[i])
    target = (uniform * edges[..., -1])[..., None]  # [N, K, 1]
    last = (share > 0).sum(-1, keepdim=True) - 1
    index = torch.searchsorted(edges, target, right=True).minimum(last).clamp(min=0)
    token = order.gather(-1, index)
    logprob = logp.expand(-1, uniform.shape[1], -1).gather(-1, token)
    return token.squeeze(-1), logprob.squeeze(-1)
