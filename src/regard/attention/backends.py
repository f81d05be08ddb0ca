"""`attend`, the one attention function of all models, and its backends.

`plain` is the definition of attention; tests compare every other backend with it, values and gradients. Shapes: Q
queries, K keys, H heads, D features of a head; leading dimensions (sentences, heads) are written "...".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import kernels, taps
from regard.attention.layouts import AttentionLayout
from regard.attention.mask_tables import BlockSparseMask, MaskTable, SegmentMask
from regard.attention.scores import ScaledDot, Score

Backend = Callable[[Tensor, Tensor, Tensor, MaskTable, Score], Tensor]

_SCALED_DOT = ScaledDot()


def plain_weights(query: Tensor, key: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """softmax(score(q, k)) over the allowed keys, [..., Q, K]; zeros for a query without allowed keys."""
    scores = score.compare(query, key)
    table = allowed.to_dense(scores.shape[-2], scores.shape[-1], scores.device)
    if table is None:
        return scores.softmax(-1)
    lowest = torch.finfo(scores.dtype).min  # finite, so that a row without allowed keys has no NaN in its gradient
    return scores.masked_fill(~table, lowest).softmax(-1).masked_fill(~table, 0.0)


def plain(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """softmax(score(q, k)) @ v: queries [..., Q, D], keys [..., K, D] and values [..., K, E] -> [..., Q, E]."""
    return plain_weights(query, key, allowed, score) @ value


def fused(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """PyTorch's `scaled_dot_product_attention`, for scores that are dot products."""
    return _fused(*score.as_dot(query, key), value, allowed)


def _fused(q: Tensor, k: Tensor, scale: float, value: Tensor, allowed: MaskTable) -> Tensor:
    without_table = allowed.table is None and allowed.sparse is None
    if without_table and not (allowed.causal and q.shape[-2] != k.shape[-2]):
        return F.scaled_dot_product_attention(q, k, value, is_causal=allowed.causal, scale=scale)
    table = allowed.to_dense(q.shape[-2], k.shape[-2], q.device)
    assert table is not None
    if allowed.no_empty_rows:
        mask = table if allowed.bias is None else allowed.bias
        return F.scaled_dot_product_attention(q, k, value, attn_mask=mask, scale=scale)
    has_keys = table.any(-1, keepdim=True)  # a query without allowed keys attends to all, then its result is zeroed
    out = F.scaled_dot_product_attention(q, k, value, attn_mask=table | ~has_keys, scale=scale)
    return torch.where(has_keys, out, 0.0)


def block_sparse(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """The fused kernel on one block of queries at a time, with only the keys that some of them may attend to.

    For sparse masks over long sequences: work and memory grow with the allowed pairs, not with Q times K.
    """
    if not isinstance(allowed.sparse, BlockSparseMask):
        return fused(query, key, value, allowed, score)
    q, k, scale = score.as_dot(query, key)  # for the whole sequence: a score may depend on positions
    outputs = []
    for block, mask in allowed.sparse.blocks:
        keys, values = _select(k, block.keys), _select(value, block.keys)
        outputs.append(_fused(_select(q, block.queries), keys, scale, values, mask))
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


def small(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """Batched matmuls for all heads at once: faster than the fused kernel for small inputs.

    That is the case in a decoding step, with one query per beam, and for short sentences on a CPU. On a GPU it is one
    Triton kernel.
    """
    q, k, scale = score.as_dot(query, key)
    if not allowed.no_empty_rows or (allowed.causal and allowed.bias is not None):
        return _fused(q, k, scale, value, allowed)
    if _can_use_decode_kernel(q, value, allowed):
        from regard.kernels import decode_attention as ours

        assert allowed.bias is not None
        return ours.decode_attention(q.to(value.dtype), k.to(value.dtype), value, allowed.bias, scale)
    scores, bias = (q * scale) @ k.transpose(-2, -1), allowed.bias
    if bias is None:
        bias = MaskTable.with_bias(allowed.to_dense(q.shape[-2], k.shape[-2], q.device), q.dtype).bias
    return _softmax(scores if bias is None else scores + bias) @ value


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, padded to a full CPU vector.

    PyTorch processes rows shorter than a vector element by element, up to 6 times slower. All short rows are padded, so
    that a sentence is rounded the same way alone and in a batch; padding has no weight and no gradient.
    """
    missing = LANES - scores.shape[-1]
    if missing <= 0 or not scores.is_cpu:
        return scores.softmax(-1)
    return F.pad(scores, (0, missing), value=-math.inf).softmax(-1)[..., :-missing]


def _can_use_decode_kernel(query: Tensor, value: Tensor, allowed: MaskTable) -> bool:
    """Return whether the Triton decode kernel supports these inputs."""
    too_wide = max(query.shape[-1], value.shape[-1]) * value.element_size() > MAX_HEAD_BYTES
    return kernels.supports(query) and allowed.bias is not None and not too_wide and not torch.is_grad_enabled()


MAX_HEAD_BYTES = 256  # with more, a tile of keys and one of values exceed the shared memory of some GPUs
LANES = 16  # float32 elements of the widest CPU vectors
MAX_DECODING_QUERIES = 8  # up to which `small` is used without gradients
MAX_SHORT_LENGTH = 64  # up to which `small` is used on a CPU
MIN_SPARSE_LENGTH = 1024  # from which `block_sparse` is worth its overhead ...
MAX_SPARSE_SHARE = 0.4  # ... if it computes at most this share of all pairs (a causal mask allows half of them)


def _select_backend(allowed: MaskTable, score: Score, query: Tensor, keys: int) -> str:
    """Return the name of the fastest backend that supports these inputs."""
    sparse, length = allowed.sparse, query.shape[-2]
    decoding = length <= MAX_DECODING_QUERIES and not torch.is_grad_enabled()
    if decoding and (query.is_cpu or allowed.bias is not None):
        return "small"
    if query.is_cpu and sparse is None and max(length, keys) <= MAX_SHORT_LENGTH:
        return "small"
    if isinstance(sparse, SegmentMask):
        return "varlen" if kernels.supports(query) else "fused"
    if sparse is not None and length >= MIN_SPARSE_LENGTH and sparse.pattern.share < MAX_SPARSE_SHARE:
        return "block_sparse"
    return "fused"


BACKENDS: dict[str, Backend] = {
    "plain": plain,
    "fused": fused,
    "small": small,
    "block_sparse": block_sparse,
    "varlen": varlen,
}
_requested: ContextVar[str] = ContextVar("regard_backend", default="auto")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute attention with this backend (one of `BACKENDS`, or "auto") while the context lasts."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}: must be auto, {', '.join(BACKENDS)}")
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


def requested_backend() -> str:
    """Return the requested backend; "auto" if none was requested, and in compiled code."""
    return "auto" if torch.compiler.is_compiling() else _requested.get()


@dataclass(frozen=True)
class AttentionWeights:
    """Attention weights offered at a tap: computed on demand from the queries and keys that the kernel used."""

    query: Tensor
    key: Tensor
    value: Tensor
    allowed: MaskTable
    score: Score
    layout: AttentionLayout
    override: Tensor | None = None  # replacement by a listener

    def replaced(self, value: Tensor) -> AttentionWeights:
        return replace(self, override=value)

    def __call__(self) -> Tensor:
        """[..., Q, K]; for packed batches in the padded view, [N, H, Q, K]."""
        if self.override is not None:
            return self.override
        return plain_weights(self.query, self.key, self.allowed, self.score)


def attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    layout: AttentionLayout,
    *,
    score: Score = _SCALED_DOT,
    owner: nn.Module | None = None,
) -> Tensor:
    """Attention: each query gets the mean of the values that it may attend to, weighted by softmax(score(query, key)).

    Queries [T, H, D], keys [S, H, D] and values [S, H, E] -> [T, H, E]; keys and values are None if the layout caches
    them. The layout defines how tensors are stored and which pairs are allowed. `owner` is the module whose tap offers
    the weights; if a listener replaces them, the result is `weights @ values`.
    """
    positions = layout.positions(query)
    if key is not None:
        key = score.project_keys(key)
        if positions is not None:
            query, key, score = score.at(query, key, positions)
    q, k, v, allowed = layout.open(query, key, value)
    if owner is not None and taps.has_listeners():
        replaced = taps.offer(owner, "weights", AttentionWeights(q, k, v, allowed, score, layout))
        if replaced is not None:
            return layout.close(replaced.to(v.dtype) @ v)
    name = requested_backend() if score.is_dot else "plain"
    if name == "auto":
        name = _select_backend(allowed, score, q, k.shape[-2])
    return layout.close(BACKENDS[name](q, k, v, allowed, score))
