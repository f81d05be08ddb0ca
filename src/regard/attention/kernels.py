"""The entry point and its kernels.

`plain` is the definition of attention; every other kernel is held equal to it, values and gradients, by the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.attention.layouts import Allowed, Layout
from regard.attention.scores import ScaledDot, Score

Kernel = Callable[[Tensor, Tensor, Tensor, Allowed, Score], Tensor]

_SCALED_DOT = ScaledDot()


def plain_weights(query: Tensor, key: Tensor, allowed: Allowed, score: Score) -> Tensor:
    """softmax over the allowed scores, [..., Q, K]: exactly zero where not allowed, and a row with nothing is zeros."""
    scores = score(query, key)
    table = allowed.dense(scores.shape[-2], scores.shape[-1], scores.device)
    if table is None:
        return scores.softmax(-1)
    lowest = torch.finfo(scores.dtype).min  # finite, so that an empty row has no NaN even in its gradient
    return scores.masked_fill(~table, lowest).softmax(-1).masked_fill(~table, 0.0)


def plain(query: Tensor, key: Tensor, value: Tensor, allowed: Allowed, score: Score) -> Tensor:
    """Score, mask, weigh, sum: softmax(score(q, k)) @ v."""
    return plain_weights(query, key, allowed, score) @ value


def fused(query: Tensor, key: Tensor, value: Tensor, allowed: Allowed, score: Score) -> Tensor:
    """PyTorch's fused dense kernel, for scores that come down to a dot product."""
    dot = score.as_dot(query, key)
    if dot is None:
        raise TypeError(f"the fused kernel cannot compute {type(score).__name__}")
    q, k, scale = dot
    if allowed.table is None and not (allowed.causal and q.shape[-2] != k.shape[-2]):
        return F.scaled_dot_product_attention(q, k, value, is_causal=allowed.causal, scale=scale)
    table = allowed.dense(q.shape[-2], k.shape[-2], q.device)
    assert table is not None
    if allowed.full:
        return F.scaled_dot_product_attention(q, k, value, attn_mask=table, scale=scale)
    something = table.any(-1, keepdim=True)  # an empty row looks everywhere, then its result is put to zero
    out = F.scaled_dot_product_attention(q, k, value, attn_mask=table | ~something, scale=scale)
    return torch.where(something, out, 0.0)


KERNELS: dict[str, Kernel] = {"plain": plain, "fused": fused}
_chosen: ContextVar[str] = ContextVar("regard_kernel", default="auto")


@contextmanager
def kernel(name: str) -> Iterator[None]:
    """Compute attention with this kernel ("plain", "fused", or "auto") while the context lasts."""
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"no kernel {name!r}; there are: auto, {', '.join(KERNELS)}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


@dataclass(frozen=True)
class Weights:
    """The weights of one attention, offered at a tap: computed on demand, from the kernel's own queries and keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    allowed: Allowed
    score: Score
    layout: Layout
    written: Tensor | None = None  # what a listener put in their place

    def replaced(self, value: Tensor) -> Weights:
        return replace(self, written=value)

    def __call__(self) -> Tensor:
        """[..., Q, K]; for flat rows in the padded view, [N, H, Q, K]."""
        return (
            self.written if self.written is not None else plain_weights(self.query, self.key, self.allowed, self.score)
        )


def attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    layout: Layout,
    *,
    score: Score = _SCALED_DOT,
    owner: nn.Module | None = None,
) -> Tensor:
    """Attention: each query takes the mean of the values it may see, weighted by softmax(score(query, key)).

    The layout says how the tensors lie and who may see whom; `owner` is the module whose tap shows the weights. A
    listener that writes other weights [..., Q, K] at the tap replaces the kernel's work by `weights @ values`.
    """
    q, k, v, allowed = layout.open(query, key, value)
    if owner is not None and taps.listening():
        written = taps.offer(owner, "weights", Weights(q, k, v, allowed, score, layout))
        if written is not None:
            return layout.close(written.to(v.dtype) @ v)
    name = _chosen.get()
    if name == "auto":
        name = "plain" if type(score).as_dot is Score.as_dot else "fused"  # no dot product, no fused kernel
    return layout.close(KERNELS[name](q, k, v, allowed, score))
