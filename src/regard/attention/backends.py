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
from regard.attention.layouts import AttentionLayout, MaskTable
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
    q, k, scale = score.as_dot(query, key)
    return fused_dot(q, k, value, scale, allowed)


def fused_dot(q: Tensor, k: Tensor, value: Tensor, scale: float, allowed: MaskTable) -> Tensor:
    """`fused` for the score scale * q @ k^T."""
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


def small(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """Batched matmuls for all heads at once: faster than the fused kernel for small inputs.

    That is the case in a decoding step, with one query per beam, and for short sentences on a CPU. On a GPU it is one
    Triton kernel; for the steps of very few sentences on a CPU, PyTorch's kernel is faster again.
    """
    q, k, scale = score.as_dot(query, key)
    if not allowed.no_empty_rows:
        return fused_dot(q, repeat_heads(k, num_heads(q)), repeat_heads(value, num_heads(q)), scale, allowed)
    if _can_use_decode_kernel(q, value, allowed):
        from regard.kernels import decode_attention as ours

        assert allowed.bias is not None
        return ours.decode_attention(q.to(value.dtype), k.to(value.dtype), value, allowed.bias, scale)
    bias = allowed.bias
    if bias is None:
        bias = MaskTable.with_bias(allowed.to_dense(q.shape[-2], k.shape[-2], q.device), q.dtype).bias
    if _is_few(q, k, value):  # one operator instead of ten, which matters where there is little arithmetic
        return F.scaled_dot_product_attention(q, k, value, attn_mask=bias, scale=scale)
    queries = q.shape[-2]
    scores = _per_query(_per_key(q * scale, k) @ k.transpose(-2, -1), queries)
    weights = _softmax(scores if bias is None else scores + bias)
    return _per_query(_per_key(weights, value) @ value, queries)


def _is_few(q: Tensor, k: Tensor, value: Tensor) -> bool:
    """Return whether these are so few queries on a CPU that PyTorch's fused kernel is faster than batched matmuls."""
    if not q.is_cpu or torch.is_grad_enabled() or q.dim() != 4 or q.shape[-2] > MAX_DECODING_QUERIES:
        return False
    return q.shape[0] * q.shape[1] <= MAX_FEW_HEADS and q.shape[1] == k.shape[1] and q.shape[-1] == value.shape[-1]


def _per_key(x: Tensor, key: Tensor) -> Tensor:
    """[..., H, Q, D] -> [..., G, H/G * Q, D]: the queries that share a head of the keys, side by side."""
    groups = key.shape[-3]
    return x if x.shape[-3] == groups else x.unflatten(-3, (groups, -1)).flatten(-3, -2)


def _per_query(x: Tensor, queries: int) -> Tensor:
    """The inverse of `_per_key`."""
    return x if x.shape[-2] == queries else x.unflatten(-2, (-1, queries)).flatten(-4, -3)


def num_heads(query: Tensor) -> int:
    """The heads of queries [..., H, Q, D]; [Q, D] is one head."""
    return query.shape[-3] if query.dim() > 2 else 1


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values [..., G, K, D] of groups of queries -> [..., heads, K, D], one for each query."""
    return x if x.dim() < 3 or x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


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
    if allowed.bias is None or torch.is_grad_enabled() or not kernels.supports(query):
        return False
    return max(query.shape[-1], value.shape[-1]) * value.element_size() <= MAX_HEAD_BYTES


MAX_HEAD_BYTES = 256  # with more, a tile of keys and one of values exceed the shared memory of some GPUs
LANES = 16  # float32 elements of the widest CPU vectors
MAX_FEW_HEADS = 16  # heads of all sentences of a step, up to which the fused kernel is faster on a CPU
MAX_DECODING_QUERIES = 8  # up to which `small` is used without gradients
MAX_SHORT_LENGTH = 64  # up to which `small` is used on a CPU


def _select_backend(allowed: MaskTable, query: Tensor, keys: int) -> str:
    """Return the name of the fastest backend that supports these inputs."""
    sparse, length = allowed.sparse, query.shape[-2]
    if sparse is not None and sparse.any_score:
        return sparse.backend(query)
    decoding = length <= MAX_DECODING_QUERIES and not torch.is_grad_enabled()
    if decoding and (query.is_cpu or allowed.bias is not None):
        return "small"
    if query.is_cpu and sparse is None and max(length, keys) <= MAX_SHORT_LENGTH:
        return "small"
    return "fused" if sparse is None else sparse.backend(query)


BACKENDS: dict[str, Backend] = {"plain": plain, "fused": fused, "small": small}  # more in `sparse_backends`
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

    Queries [T, H, D], keys [S, G, D] and values [S, G, E] -> [T, H, E]; keys and values are None if the layout caches
    them. Usually G = H; else each key serves H / G queries (grouped-query attention, Ainslie et al. 2023). The layout
    defines how tensors are stored and which pairs are allowed. `owner` is the module whose tap offers the weights; if a
    listener replaces them, the result is `weights @ values`.
    """
    if key is not None:
        key = score.project_keys(key)
        if layout.positions is not None:
            query, key, score = score.encode_positions(query, key, layout.positions)
    q, k, v, allowed = layout.to_kernel(query, key, value)
    if owner is not None and taps.has_listeners():
        shared = repeat_heads(k, num_heads(q)), repeat_heads(v, num_heads(q))
        replaced = taps.offer(owner, "weights", AttentionWeights(q, *shared, allowed, score, layout))
        if replaced is not None:
            return layout.from_kernel(replaced.to(v.dtype) @ shared[1])
    return layout.from_kernel(attend_in_kernel_layout(q, k, v, allowed, score))


def attend_in_kernel_layout(q: Tensor, k: Tensor, v: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """`attend` for tensors from `to_kernel`: queries [..., H, Q, D], keys and values [..., G, K, D]."""
    name, heads = requested_backend(), num_heads(q)
    if not score.is_dot and name != "plain":
        sparse = allowed.sparse
        name = sparse.backend(q) if sparse is not None and sparse.any_score else "plain"
    elif name == "auto":
        name = _select_backend(allowed, q, k.shape[-2])
    if name != "small":  # "small" reads each key once for all queries that share it
        k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    return BACKENDS[name](q, k, v, allowed, score)
