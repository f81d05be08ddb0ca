"""The loss of a row of tokens: label-smoothed cross-entropy, from logits, or straight from what the logits come from.

T places in the row, D features, V the vocabulary; C places a chunk. With smoothing e and z the logits of a place,

    loss = (1 - e) · -log p(label) + e · mean over the vocabulary of -log p = lse(z) - (1 - e) · z[label] - e · mean(z)

and its gradient in z is softmax(z) - (1 - e) · [label] - e / V.

R-Drop (Liang et al. 2021) reads a batch twice, dropped out differently, and asks both readings to agree. With p and q
what they say and a the difference of their logits, they disagree by KL(p, q) + KL(q, p) = sum of (p - q) · a, whose
gradient in the logits of p is p - q + p · (a - sum of p · a).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from regard import kernels
from regard.devices import matrix_dtype

CHUNK_BYTES = 2**30  # of logits held at once
CHUNK_STEP = 256  # chunks are multiples of this many places, which matrix kernels like
CACHED_ROWS = 64  # rows of logits that a CPU goes through at a time


def cross_entropy(logits: Tensor, labels: Tensor, counted: Tensor, smoothing: float = 0.0) -> Tensor:
    """Of logits [T, V], summed over the places that count, in float32 whatever the logits are in."""
    losses = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="none")
    return losses.where(counted, 0.0).sum()


def r_drop_loss(one: Tensor, other: Tensor, labels: Tensor, counted: Tensor, smoothing: float, weight: float) -> Tensor:
    """R-Drop of two readings' logits [T, V], halved: the mean of their losses + weight / 4 times how they disagree."""
    loss = (cross_entropy(one, labels, counted, smoothing) + cross_entropy(other, labels, counted, smoothing)) / 2
    p, q = (F.log_softmax(logits.float(), -1) for logits in (one, other))
    apart = F.kl_div(q, p, reduction="none", log_target=True) + F.kl_div(p, q, reduction="none", log_target=True)
    return loss + weight / 4 * apart.sum(-1).where(counted, 0.0).sum()


def linear_cross_entropy(
    x: Tensor,
    table: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    smoothing: float = 0.0,
    r_drop: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """`cross_entropy(x @ table^T + bias, ...)` of x [T, D] and table [V, D], with never more than a chunk of logits.

    For two forward passes x [2, T, D] it is `r_drop_loss` with the weight `r_drop`. Gradients are computed in the
    forward pass, chunk by chunk, while the logits are available, so that logits are neither stored nor recomputed.
    """
    x = x if x.dim() == 3 else x[None]
    readings, places, _ = x.shape
    each = matrix_dtype(x).itemsize if readings == 1 else 16  # bytes; two readings are compared in float32
    chunk = chunk or even_chunk(places, len(table) * each)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, table, bias))
    found: Tensor = _LinearCrossEntropy.apply(x, table, bias, labels, counted, smoothing, r_drop, chunk, wanted)
    return found


def even_chunk(places: int, size: int) -> int:
    """How many places to take at a time, whose logits take `size` bytes each: as few chunks as there must be.

    All but the last are of one size.

    >>> even_chunk(32768, 74000), even_chunk(100, 16000)
    (11008, 256)
    """
    chunks = -(-places * size // CHUNK_BYTES)
    return max(-(-places // (max(chunks, 1) * CHUNK_STEP)), 1) * CHUNK_STEP


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        table: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        counted: Tensor,
        smoothing: float,
        r_drop: float,
        chunk: int,
        wanted: bool,
    ) -> Tensor:
        dtype = matrix_dtype(x)
        low_x, low_table = x.to(dtype), table.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for_x, for_table = [], torch.zeros_like(table, dtype=torch.float32)
        for_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for at in range(0, x.shape[1], chunk):
            label, counts = labels[at : at + chunk], counted[at : at + chunk]
            piece = low_x[:, at : at + chunk].flatten(0, 1)
            if len(x) == 1:
                losses, slope = _losses_and_grad(piece, low_table, bias, label, counts, smoothing, wanted)
            else:
                losses, slope = _r_drop_grad(_logits(piece, low_table, bias), label, counts, smoothing, r_drop)
            total = total + losses.sum()
            if wanted:
                if for_bias is not None:
                    for_bias = for_bias + slope.sum(0, dtype=torch.float32)
                slope = slope.to(dtype)
                for_x.append((slope @ low_table).unflatten(0, (len(x), -1)))
                for_table = for_table + slope.T @ piece
        if wanted:
            ctx.save_for_backward(torch.cat(for_x, dim=1), for_table, *([] if for_bias is None else [for_bias]))
            ctx.dtypes = x.dtype, table.dtype  # type: ignore[attr-defined]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        for_x, for_table, *for_bias = ctx.saved_tensors  # type: ignore[attr-defined]
        x_dtype, table_dtype = ctx.dtypes  # type: ignore[attr-defined]
        bias = (for_bias[0] * upstream).to(table_dtype) if for_bias else None
        return (for_x * upstream).to(x_dtype), (for_table * upstream).to(table_dtype), bias, *[None] * 6


def _losses_and_grad(
    x: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, counted: Tensor, smoothing: float, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Of x [C, D]: the losses [C], and, sure to be there only if wanted, their gradient in the logits [C, V]."""
    if kernels.supports(x):
        from regard.kernels.cross_entropy import cross_entropy_with_grad

        return cross_entropy_with_grad(x, table, bias, labels, counted, smoothing, wanted)
    logits = _logits(x, table, bias)
    parts = zip(_row_chunks(logits), _row_chunks(labels), _row_chunks(counted), strict=True)
    return torch.cat([_grad_in_place(*few, smoothing) for few in parts]), logits


def _logits(x: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
    logits = (x @ table.T).float()
    return logits if bias is None else logits + bias.float()


def _r_drop_grad(
    logits: Tensor, labels: Tensor, counted: Tensor, smoothing: float, weight: float
) -> tuple[Tensor, Tensor]:
    """R-Drop of logits [2 * C, V], the first reading and then the second: losses [C], and their gradient [2 * C, V]."""
    log = F.log_softmax(logits.unflatten(0, (2, -1)), -1)
    right = log.gather(-1, labels.expand(2, -1)[..., None]).squeeze(-1)
    losses = -((1 - smoothing) * right + smoothing * log.mean(-1)).mean(0)
    said, apart = log.exp(), log[0] - log[1]
    differ = said[0] - said[1]
    losses = losses + weight / 4 * (differ * apart).sum(-1)
    pull = said * (apart - (said * apart).sum(-1, keepdim=True)) + differ
    here = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    slope = (said - smoothing / logits.shape[-1] - torch.where(here, 1 - smoothing, 0.0)) / 2
    slope = slope + weight / 4 * torch.stack([pull[0], -pull[1]])
    return losses.where(counted, 0.0), slope.where(counted[:, None], 0.0).flatten(0, 1)


def _grad_in_place(logits: Tensor, labels: Tensor, counted: Tensor, smoothing: float) -> Tensor:
    """The losses [C] of logits [C, V], which become the gradient of their sum, in their own memory."""
    here, counts = labels[:, None], counted[:, None].to(logits.dtype)
    right = logits.gather(1, here)
    even = logits.mean(-1, keepdim=True) if smoothing else 0.0
    most = logits.amax(-1, keepdim=True)
    total = logits.sub_(most).exp_().sum(-1, keepdim=True)
    losses = most + total.log() - (1 - smoothing) * right - smoothing * even
    logits.mul_(counts / total).scatter_add_(1, here, counts * (smoothing - 1))
    if smoothing:
        logits.sub_(counts * (smoothing / logits.shape[-1]))
    return losses.squeeze(1).where(counted, 0.0)


def _row_chunks(rows: Tensor) -> tuple[Tensor, ...]:
    """A few rows at a time on a CPU, so that what is made of them on the way stays in its cache; else all at once."""
    return rows.split(CACHED_ROWS) if rows.device.type == "cpu" else (rows,)
