"""Losses of a packed batch from logits: cross-entropy and squared error. T positions, V vocabulary, C numbers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, loss_mask: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of logits [T, V] and labels [T], summed where `loss_mask` [T] is True, in float32.

    Labels may also be probabilities [T, V].
    """
    losses = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="none")
    return losses.where(loss_mask, 0.0).sum()


def squared_error(numbers: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
    """(number - label)^2, the mean over the C numbers of an example [T, C], summed where `loss_mask` [T] is True."""
    return (numbers.float() - labels.float()).square().mean(-1).where(loss_mask, 0.0).sum()
