"""Attention backends for sparse masks of long sentences, packed batches of static shapes, and graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.attention.backends import BACKENDS, fused, fused_dot, plain
from regard.attention.block_sparse import BlockSparseMask
from regard.attention.edges import EdgeMask
from regard.attention.layouts import MaskTable
from regard.attention.scores import Score
from regard.attention.static_layout import SegmentMask


def block_sparse(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """The fused kernel on one block of queries at a time, with only the keys that some of them may attend to.

    For sparse masks over long sequences: work and memory grow with the allowed pairs, not with Q times K.
    """
    if not isinstance(allowed.sparse, BlockSparseMask):
        return fused(query, key, value, allowed, score)
    q, k, scale = score.as_dot(query, key)  # for the whole sequence: a score may depend on positions
    outputs = []
    for block in allowed.sparse.blocks:
        queries, keys, values = _select(q, block.queries), _select(k, block.keys), _select(value, block.keys)
        mask = MaskTable(block.table, no_empty_rows=block.no_empty_rows)
        outputs.append(fused_dot(queries, keys, values, scale, mask))
    inverse_order = allowed.sparse.pattern.inverse_order
    out = torch.cat(outputs, dim=-2)
    return out if inverse_order is None else out.index_select(-2, inverse_order)


def _select(x: Tensor, positions: slice | Tensor) -> Tensor:
    """Select these positions of [..., L, D]."""
    return x[..., positions, :] if isinstance(positions, slice) else x.index_select(-2, positions)


def varlen(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """The Triton kernel for packed sequences with a static layout, on a GPU."""
    from regard.kernels import varlen_attention as ours

    assert isinstance(allowed.sparse, SegmentMask)
    q, k, scale = score.as_dot(query, key)
    q, k, v = (x.to(value.dtype).transpose(0, 1) for x in (q, k, value))  # [H, L, D] -> [L, H, D]
    out, _ = ours.varlen_attention(q, k, v, *allowed.sparse.segments, allowed.sparse.causal, scale)
    return out.transpose(0, 1)


def edges(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """Only the pairs of nodes that an edge connects, for any score: [N, H, L, D] -> [N, H, L, D]."""
    mask = allowed.sparse
    if not isinstance(mask, EdgeMask):
        return fused(query, key, value, allowed, score) if score.is_dot else plain(query, key, value, allowed, score)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [N * L, H, D]
    senders, receivers = mask.cells
    weights = mask.softmax(score.on_edges(q, k, receivers, senders))
    return mask.weighted_sum(weights, v).unflatten(0, (len(query), -1)).transpose(1, 2)


BACKENDS.update(block_sparse=block_sparse, varlen=varlen, edges=edges)
