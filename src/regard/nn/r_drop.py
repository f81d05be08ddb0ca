"""R-Drop (Liang et al. 2021): two passes of a batch with different dropout masks, whose predictions should agree.

The divergence of both predictions p and q is added to the loss: KL(p, q) + KL(q, p) = sum of (p - q) · a, where a is
the difference of their logits. Its gradient with respect to the logits of p is p - q + p · (a - sum of p · a).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn.losses import cross_entropy


def r_drop_loss(
    one: Tensor, other: Tensor, labels: Tensor, loss_mask: Tensor, smoothing: float, weight: float
) -> Tensor:
    """R-Drop of the logits [T, V] of two passes, halved: the mean of their losses + weight / 4 · their divergence."""
    loss = (cross_entropy(one, labels, loss_mask, smoothing) + cross_entropy(other, labels, loss_mask, smoothing)) / 2
    p, q = (F.log_softmax(logits.float(), -1) for logits in (one, other))
    divergence = F.kl_div(q, p, reduction="none", log_target=True) + F.kl_div(p, q, reduction="none", log_target=True)
    return loss + weight / 4 * divergence.sum(-1).where(loss_mask, 0.0).sum()


def r_drop_grad(
    logits: Tensor, labels: Tensor, loss_mask: Tensor, smoothing: float, weight: float
) -> tuple[Tensor, Tensor]:
    """R-Drop of the logits [2 * C, V] of both passes: losses [C], and their gradient [2 * C, V]."""
    logp = F.log_softmax(logits.unflatten(0, (2, -1)), -1)
    label_logprob = logp.gather(-1, labels.expand(2, -1)[..., None]).squeeze(-1)
    losses = -((1 - smoothing) * label_logprob + smoothing * logp.mean(-1)).mean(0)
    probs, log_ratio = logp.exp(), logp[0] - logp[1]
    difference = probs[0] - probs[1]
    losses = losses + weight / 4 * (difference * log_ratio).sum(-1)
    grad_divergence = probs * (log_ratio - (probs * log_ratio).sum(-1, keepdim=True)) + difference
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    grad = (probs - smoothing / logits.shape[-1] - torch.where(is_label, 1 - smoothing, 0.0)) / 2
    grad = grad + weight / 4 * torch.stack([grad_divergence[0], -grad_divergence[1]])
    return losses.where(loss_mask, 0.0), grad.where(loss_mask[:, None], 0.0).flatten(0, 1)
