"""Guided alignment (Chen et al. 2016; Garg et al. 2019): a head of cross-attention learns links between words.

With the attention weights a of the head and the links of a target token, normalised to sum to one, its loss is their
cross-entropy: - sum over its links of weight · log a[link]. N sentences, T target tokens, S source tokens, Q and K the
longest target and source, E features of a head, M links.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.attention.scores import Score
from regard.packed import LinkTargets, PackedLayout


def alignment_loss(
    query: Tensor, key: Tensor, score: Score, targets: PackedLayout, sources: PackedLayout, links: LinkTargets
) -> Tensor:
    """The cross-entropy of links and of the attention of queries [T, E] to keys [S, E], summed over all target tokens.

    Shapes depend on the layouts' sizes and bounds alone, so that it can be captured for static batches.
    """
    rows, _ = _padded(targets)
    columns, is_source = _padded(sources)
    with torch.autocast(query.device.type, enabled=False):
        q, k, scale = score.as_dot(query.float()[rows], score.project_keys(key.float())[columns])
        scores = (scale * q @ k.mT).masked_fill(~is_source[:, None], torch.finfo(torch.float32).min)
        log_attention = scores.log_softmax(-1)  # [N, Q, K]
    cells = (links.sentence * rows.shape[1] + links.row) * columns.shape[1] + links.column
    return -(links.weight * log_attention.flatten()[cells]).sum()


def _padded(layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """[N, L] the packed index of each cell of the padded view, any for padding; and where there is a token."""
    index = layout.offsets[:-1, None] + torch.arange(layout.max_len, device=layout.device)
    is_token = index < layout.offsets[1:, None]
    return torch.where(is_token, index, 0), is_token
