"""Label-smoothed cross-entropy of a packed batch, directly from the input of the output projection.

Shapes: T positions, D features, V vocabulary, C positions of a chunk. With smoothing e and the logits z of a position,

    loss = (1 - e) · -log p(label) + e · mean over the vocabulary of -log p = lse(z) - (1 - e) · z[label] - e · mean(z)

and its gradient with respect to z is softmax(z) - (1 - e) · [label] - e / V.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from regard import kernels
from regard.nn.r_drop import r_drop_grad
from regard.precision import matrix_dtype

CHUNK_BYTES = 2**30  # bytes of logits held at once
CHUNK_STEP = 256  # chunks are multiples of this many positions, for efficient matmuls
CACHED_ROWS = 64  # rows of logits that a CPU processes at a time


def linear_cross_entropy(
    x: Tensor,
    table: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    loss_mask: Tensor,
    smoothing: float = 0.0,
    r_drop: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """`cross_entropy(x @ table^T + bias, ...)` of x [T, D] and table [V, D], holding one chunk of logits at a time.

    For two forward passes x [2, T, D] it is `r_drop_loss` with the weight `r_drop`. Gradients are computed in the
    forward pass, chunk by chunk, while the logits are available, so that logits are neither stored nor recomputed.
    """
    x = x if x.dim() == 3 else x[None]
    passes, positions, _ = x.shape
    each = matrix_dtype(x).itemsize if passes == 1 else 16  # bytes; two passes are compared in float32
    chunk = chunk or even_chunk(positions, len(table) * each)
    with_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, table, bias))
    loss: Tensor = _LinearCrossEntropy.apply(x, table, bias, labels, loss_mask, smoothing, r_drop, chunk, with_grad)
    return loss


def even_chunk(positions: int, size: int) -> int:
    """Positions per chunk if the logits of one take `size` bytes: as few chunks as possible, of nearly equal size.

    >>> even_chunk(32768, 74000), even_chunk(100, 16000)
    (11008, 256)
    """
    chunks = -(-positions * size // CHUNK_BYTES)
    return max(-(-positions // (max(chunks, 1) * CHUNK_STEP)), 1) * CHUNK_STEP


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        table: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss_mask: Tensor,
        smoothing: float,
        r_drop: float,
        chunk: int,
        with_grad: bool,
    ) -> Tensor:
        dtype = matrix_dtype(x)
        low_x, low_table = x.to(dtype), table.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x, grad_table = [], torch.zeros_like(table, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for at in range(0, x.shape[1], chunk):
            label, counts = labels[at : at + chunk], loss_mask[at : at + chunk]
            chunk_x = low_x[:, at : at + chunk].flatten(0, 1)
            if len(x) == 1:
                losses, grad = _losses_and_grad(chunk_x, low_table, bias, label, counts, smoothing, with_grad)
            else:
                losses, grad = r_drop_grad(_logits(chunk_x, low_table, bias), label, counts, smoothing, r_drop)
            total = total + losses.sum()
            if with_grad:
                if grad_bias is not None:
                    grad_bias = grad_bias + grad.sum(0, dtype=torch.float32)
                grad = grad.to(dtype)
                grad_x.append((grad @ low_table).unflatten(0, (len(x), -1)))
                grad_table = grad_table + grad.T @ chunk_x
        if with_grad:
            ctx.save_for_backward(torch.cat(grad_x, dim=1), grad_table, *([] if grad_bias is None else [grad_bias]))
            ctx.dtypes = x.dtype, table.dtype  # type: ignore[attr-defined]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_table, *grad_bias = ctx.saved_tensors  # type: ignore[attr-defined]
        x_dtype, table_dtype = ctx.dtypes  # type: ignore[attr-defined]
        bias = (grad_bias[0] * upstream).to(table_dtype) if grad_bias else None
        return (grad_x * upstream).to(x_dtype), (grad_table * upstream).to(table_dtype), bias, *[None] * 6


def _losses_and_grad(
    x: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, loss_mask: Tensor, smoothing: float, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """x [C, D] -> losses [C], and, if with_grad, their gradient with respect to the logits, [C, V]."""
    if kernels.supports(x):
        from regard.kernels.cross_entropy import cross_entropy_with_grad

        return cross_entropy_with_grad(x, table, bias, labels, loss_mask, smoothing, with_grad)
    logits = _logits(x, table, bias)
    parts = zip(_row_chunks(logits), _row_chunks(labels), _row_chunks(loss_mask), strict=True)
    return torch.cat([_grad_in_place(*part, smoothing) for part in parts]), logits


def _logits(x: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
    logits = (x @ table.T).float()
    return logits if bias is None else logits + bias.float()


def _grad_in_place(logits: Tensor, labels: Tensor, loss_mask: Tensor, smoothing: float) -> Tensor:
    """Return the losses [C] of logits [C, V], and overwrite the logits with the gradient of their sum."""
    index, is_counted = labels[:, None], loss_mask[:, None].to(logits.dtype)
    label_logit = logits.gather(1, index)
    mean_logit = logits.mean(-1, keepdim=True) if smoothing else 0.0
    max_logit = logits.amax(-1, keepdim=True)
    total = logits.sub_(max_logit).exp_().sum(-1, keepdim=True)
    losses = max_logit + total.log() - (1 - smoothing) * label_logit - smoothing * mean_logit
    logits.mul_(is_counted / total).scatter_add_(1, index, is_counted * (smoothing - 1))
    if smoothing:
        logits.sub_(is_counted * (smoothing / logits.shape[-1]))
    return losses.squeeze(1).where(loss_mask, 0.0)


def _row_chunks(rows: Tensor) -> tuple[Tensor, ...]:
    """Split rows, on a CPU, into chunks whose intermediate results stay in the cache."""
    return rows.split(CACHED_ROWS) if rows.device.type == "cpu" else (rows,)
