"""The entry point and its kernels.

`plain` is the definition of attention; every other kernel is held equal to it, values and gradients, by the tests.
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
    """softmax over the allowed scores, [..., Q, K]: exactly zero where not allowed, and a row with nothing is zeros."""
    scores = score.compare(query, key)
    table = allowed.to_dense(scores.shape[-2], scores.shape[-1], scores.device)
    if table is None:
        return scores.softmax(-1)
    lowest = torch.finfo(scores.dtype).min  # finite, so that an empty row has no NaN even in its gradient
    return scores.masked_fill(~table, lowest).softmax(-1).masked_fill(~table, 0.0)


def plain(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """Score, mask, weigh, sum: softmax(score(q, k)) @ v."""
    return plain_weights(query, key, allowed, score) @ value


def fused(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """PyTorch's fused dense kernel, for scores that come down to a dot product."""
    return _fused(*score.as_dot(query, key), value, allowed)


def _fused(q: Tensor, k: Tensor, scale: float, value: Tensor, allowed: MaskTable) -> Tensor:
    anything = allowed.table is None and allowed.sparse is None
    if anything and not (allowed.causal and q.shape[-2] != k.shape[-2]):
        return F.scaled_dot_product_attention(q, k, value, is_causal=allowed.causal, scale=scale)
    table = allowed.to_dense(q.shape[-2], k.shape[-2], q.device)
    assert table is not None
    if allowed.no_empty_rows:
        mask = table if allowed.bias is None else allowed.bias
        return F.scaled_dot_product_attention(q, k, value, attn_mask=mask, scale=scale)
    something = table.any(-1, keepdim=True)  # an empty row looks everywhere, then its result is put to zero
    out = F.scaled_dot_product_attention(q, k, value, attn_mask=table | ~something, scale=scale)
    return torch.where(something, out, 0.0)


def block_sparse(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """The fused kernel on one block of queries at a time, with only the keys that some of them may attend to.

    For sparse masks over long sequences: work and memory grow with the allowed pairs, not with Q times K.
    """
    if not isinstance(allowed.sparse, BlockSparseMask):
        return fused(query, key, value, allowed, score)
    q, k, scale = score.as_dot(query, key)  # for the whole sequence: a score may depend on positions
    parts = []
    for lot, may in allowed.sparse.blocks:
        parts.append(_fused(_pick(q, lot.queries), _pick(k, lot.keys), scale, _pick(value, lot.keys), may))
    back = allowed.sparse.pattern.inverse_order
    out = torch.cat(parts, dim=-2)
    return out if back is None else out.index_select(-2, back)


def _pick(x: Tensor, places: slice | Tensor) -> Tensor:
    """Select these positions of [..., L, D]."""
    return x[..., places, :] if isinstance(places, slice) else x.index_select(-2, places)


def varlen(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """The Triton kernel for packed sequences with a static layout, on a GPU."""
    from regard.kernels import varlen_attention as ours

    assert isinstance(allowed.sparse, SegmentMask)
    q, k, scale = score.as_dot(query, key)
    q, k, v = (x.to(value.dtype).transpose(0, 1) for x in (q, k, value))  # [H, L, D] -> [L, H, D]
    out, _ = ours.varlen_attention(q, k, v, *allowed.sparse.places, allowed.sparse.causal, scale)
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
    lacking = LANES - scores.shape[-1]
    if lacking <= 0 or not scores.is_cpu:
        return scores.softmax(-1)
    return F.pad(scores, (0, lacking), value=-math.inf).softmax(-1)[..., :-lacking]


def _can_use_decode_kernel(query: Tensor, value: Tensor, allowed: MaskTable) -> bool:
    """Return whether the Triton decode kernel supports these inputs."""
    wide = max(query.shape[-1], value.shape[-1]) * value.element_size() > WIDEST
    return kernels.supports(query) and allowed.bias is not None and not wide and not torch.is_grad_enabled()


WIDEST = 256  # bytes per head: with more, a tile of keys and one of values exceed the shared memory of some GPUs
LANES = 16  # float32 elements of the widest CPU vectors
FEW = 8  # queries
SHORT = 64  # tokens of a sentence
LONG = 1024  # tokens from which on skipping blocks is worth the splitting
SPARSE = 0.4  # of all pairs; a causal table is one half


def _select_backend(allowed: MaskTable, score: Score, query: Tensor, keys: int) -> str:
    """Return the name of the fastest backend that supports these inputs."""
    sparse, length = allowed.sparse, query.shape[-2]
    if length <= FEW and not torch.is_grad_enabled() and (query.is_cpu or allowed.bias is not None):
        return "small"
    if query.is_cpu and sparse is None and max(length, keys) <= SHORT:
        return "small"
    if isinstance(sparse, SegmentMask):
        return "varlen" if kernels.supports(query) else "fused"
    return "block_sparse" if sparse is not None and length >= LONG and sparse.pattern.share < SPARSE else "fused"


BACKENDS: dict[str, Backend] = {
    "plain": plain,
    "fused": fused,
    "small": small,
    "block_sparse": block_sparse,
    "varlen": varlen,
}
_chosen: ContextVar[str] = ContextVar("regard_kernel", default="auto")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute attention with this backend (one of `BACKENDS`, or "auto") while the context lasts."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"no kernel {name!r}; there are: auto, {', '.join(BACKENDS)}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def requested_backend() -> str:
    """Return the requested backend; "auto" if none was requested, and in compiled code."""
    return "auto" if torch.compiler.is_compiling() else _chosen.get()


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
        return (
            self.override
            if self.override is not None
            else plain_weights(self.query, self.key, self.allowed, self.score)
        )


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

    The layout defines how tensors are stored and which pairs are allowed; `owner` is the module whose tap offers the
    weights. If a listener replaces the weights [..., Q, K], the result is `weights @ values`.
    """
    positions = layout.positions(query)
    if key is not None:
        key = score.project_keys(key)
        if positions is not None:
            query, key, score = score.at(query, key, positions)
    q, k, v, allowed = layout.open(query, key, value)
    if owner is not None and taps.has_listeners():
        written = taps.offer(owner, "weights", AttentionWeights(q, k, v, allowed, score, layout))
        if written is not None:
            return layout.close(written.to(v.dtype) @ v)
    name = requested_backend() if score.is_dot else "plain"
    if name == "auto":
        name = _select_backend(allowed, score, q, k.shape[-2])
    return layout.close(BACKENDS[name](q, k, v, allowed, score))
