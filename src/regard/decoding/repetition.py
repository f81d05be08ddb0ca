"""Repetition in outputs: the repetition penalty, and n-grams that may not be repeated.

Shapes: N sentences, K beams each, t tokens so far, V the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.decoding.terms import NO_TOKEN


def penalized(logits: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Lower the logits l [N, K, V] of `tokens` [N, K, any]: l / penalty if l > 0, else l * penalty.

    As in Keskar et al. 2019, section 4.1, except for negative logits, which division would raise.
    """
    seen = among(tokens, logits.shape[-1])
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def completed_ngrams(history: Tensor, step: Tensor, size: int, vocabulary: int) -> Tensor:
    """[N, K, V] True where a token would complete an n-gram of this size that `history` [N, K, t >= size] contains.

    The first `step` [N] tokens of the history are written; the rest is NO_TOKEN, which is no token.
    """
    grams = history.unfold(-1, size, 1)  # [N, K, t - size + 1, size]
    step = step[:, None, None]
    last = (step + torch.arange(1 - size, 0, device=step.device)).clamp(0, history.shape[-1] - 1)  # [N, 1, size - 1]
    context = history.gather(-1, last.expand(-1, history.shape[1], -1))  # [N, K, size - 1]
    seen = (grams[..., :-1] == context[..., None, :]).all(-1) & (step >= size)
    return among(torch.where(seen, grams[..., -1], NO_TOKEN), vocabulary)


def among(tokens: Tensor, vocabulary: int) -> Tensor:
    """[N, K, V] True for the ids among `tokens` [N, K, any]."""
    column = torch.where(tokens == NO_TOKEN, vocabulary, tokens)  # NO_TOKEN goes to an extra column
    table = torch.zeros(*tokens.shape[:2], vocabulary + 1, dtype=torch.bool, device=tokens.device)
    return table.scatter_(-1, column, True)[..., :vocabulary]
