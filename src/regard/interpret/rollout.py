"""Attention rollout (Abnar and Zuidema 2020): attention through all layers, residual connections included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.interpret.recorder import RecordedAttention


def rollout(layers: Sequence[RecordedAttention], rows: Sequence[int] | None = None) -> Tensor:
    """The share of each position's vector that arrives at each position, [Q, K]: the product of (A + I) / 2.

    A [N, N] are the weights of a layer, averaged over its heads. `rows` are the positions on both axes; None: all. It
    is computed row by row from the last layer down, so that a graph needs no table of all its nodes.
    """
    count = layers[0].offered.query.shape[-2]
    chosen = list(range(count)) if rows is None else list(rows)
    product = torch.zeros(len(chosen), count, device=layers[0].offered.query.device)
    product[torch.arange(len(chosen)), chosen] = 1.0
    for layer in reversed(layers):
        product = (product + _times(product, layer)) / 2
    return product[:, chosen]


def _times(product: Tensor, layer: RecordedAttention) -> Tensor:
    """product [Q, N] @ weights [N, N] of a layer."""
    mask = layer.edge_mask
    if mask is None:
        return product @ layer.sentence(0).float().mean(0)
    weights = layer.edge_weights().float().mean(1)  # [E]
    return torch.zeros_like(product).index_add(1, mask.senders, product[:, mask.receivers] * weights)
