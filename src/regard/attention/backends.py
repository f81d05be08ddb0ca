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
    scores = score(query, key)
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
    """The fused kernel on a few queries at a time, with only those keys that some of them may see.

    For sparse masks of long rows: work and memory follow what is allowed, not Q times K.
    """
    if not isinstance(allowed.sparse, BlockSparseMask):
        return fused(query, key, value, allowed, score)
    q, k, scale = score.as_dot(query, key)  # of the whole, for a score may count places
    parts = []
    for lot, may in allowed.sparse.blocks:
        parts.append(_fused(_pick(q, lot.queries), _pick(k, lot.keys), scale, _pick(value, lot.keys), may))
    back = allowed.sparse.pattern.inverse_order
    out = torch.cat(parts, dim=-2)
    return out if back is None else out.index_select(-2, back)


def _pick(x: Tensor, places: slice | Tensor) -> Tensor:
    """These places of [..., L, D]."""
    return x[..., places, :] if isinstance(places, slice) else x.index_select(-2, places)


def varlen(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """Our own kernel for sentences that lie end to end in static rows, on a GPU."""
    from regard.kernels import varlen_attention as ours

    assert isinstance(allowed.sparse, SegmentMask)
    q, k, scale = score.as_dot(query, key)
    q, k, v = (x.to(value.dtype).transpose(0, 1) for x in (q, k, value))  # [H, L, D] -> [L, H, D]
    out, _ = ours.varlen_attention(q, k, v, *allowed.sparse.places, allowed.sparse.causal, scale)
    return out.transpose(0, 1)


def small(query: Tensor, key: Tensor, value: Tensor, allowed: MaskTable, score: Score) -> Tensor:
    """Score, add the mask, weigh, sum, each for all heads at once: quicker than the fused kernel where there is little.

    That is so in a decoding step, with one query a beam, and for short sentences on a CPU. On a GPU all of it is one
    kernel of our own.
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
    """Over the last dimension. PyTorch takes rows shorter than a CPU's vectors number by number: up to 6 times slower.

    So they are filled up, however few they are, or a sentence would be rounded otherwise alone than among others; what
    is filled in has no weight, and no gradient.
    """
    lacking = LANES - scores.shape[-1]
    if lacking <= 0 or not scores.is_cpu:
        return scores.softmax(-1)
    return F.pad(scores, (0, lacking), value=-math.inf).softmax(-1)[..., :-lacking]


def _can_use_decode_kernel(query: Tensor, value: Tensor, allowed: MaskTable) -> bool:
    """Whether our kernel for GPUs can do it."""
    wide = max(query.shape[-1], value.shape[-1]) * value.element_size() > WIDEST
    return kernels.supports(query) and allowed.bias is not None and not wide and not torch.is_grad_enabled()


WIDEST = 256  # bytes of a head: more, and a tile of keys and one of values do not fit into every GPU's multiprocessors
LANES = 16  # float32 numbers in the longest vectors that a CPU calculates with
FEW = 8  # queries
SHORT = 64  # places of a sentence
LONG = 1024  # places from where on skipping pays for the cutting
SPARSE = 0.4  # of all pairs; a causal table is one half


def _select_backend(allowed: MaskTable, score: Score, query: Tensor, keys: int) -> str:
    """The quickest kernel that can do it."""
    if type(score).as_dot is Score.as_dot:
        return "plain"  # no dot product, no fused kernel
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
    """Compute attention with this kernel (one of `BACKENDS`, or "auto") while the context lasts."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"no kernel {name!r}; there are: auto, {', '.join(BACKENDS)}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def requested_backend() -> str:
    """Which kernel was asked for; "auto" if none, and inside a compiler, which knows best."""
    return "auto" if torch.compiler.is_compiling() else _chosen.get()


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of one attention, offered at a tap: computed on demand, from the kernel's own queries and keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    allowed: MaskTable
    score: Score
    layout: AttentionLayout
    override: Tensor | None = None  # what a listener put in their place

    def replaced(self, value: Tensor) -> AttentionWeights:
        return replace(self, override=value)

    def __call__(self) -> Tensor:
        """[..., Q, K]; for flat rows in the padded view, [N, H, Q, K]."""
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
    """Attention: each query takes the mean of the values it may see, weighted by softmax(score(query, key)).

    The layout says how the tensors lie and who may see whom; `owner` is the module whose tap shows the weights. A
    listener that writes other weights [..., Q, K] at the tap replaces the kernel's work by `weights @ values`.
    """
    positions = layout.positions(query)
    if positions is not None and key is not None:
        query, key, score = score.at(query, key, positions)
    q, k, v, allowed = layout.open(query, key, value)
    if owner is not None and taps.has_listeners():
        written = taps.offer(owner, "weights", AttentionWeights(q, k, v, allowed, score, layout))
        if written is not None:
            return layout.close(written.to(v.dtype) @ v)
    name = requested_backend()
    if name == "auto":
        name = _select_backend(allowed, score, q, k.shape[-2])
    return layout.close(BACKENDS[name](q, k, v, allowed, score))
