"""Flash attention within the sentences of packed batches, for training. Defined by `attention.backends.plain`.

A tile of queries reads the keys from the beginning of its first sentence to the end of its last one. Sentences are
short, so these are one or two tiles of keys. Scores are computed tile by tile and never stored; the backward pass
recomputes them from the logsumexp of each row (Dao 2023).

Shapes: T queries, S keys, H heads, D features of queries and keys, E of values. `begins` [M + 1] are the offsets of the
sentences, `of` [T] the sentence of each position, M for padding. The output for padding is zero.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.common import LOG2E, MIN_TILE, device_of, dot_precision, tile_size


@triton.jit
def _inside(there, WIDE: tl.constexpr, WIDTH: tl.constexpr):
    """[tile, WIDTH] mask of the features of a tile: of existing positions, the first `WIDE` features."""
    if WIDE == WIDTH:
        return there[:, None] & tl.full([1, WIDTH], True, tl.int1)
    return there[:, None] & (tl.arange(0, WIDTH) < WIDE)[None, :]


@triton.jit
def _rows(x, at, head, stride, head_stride, there, WIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Load [tile, WIDTH] of x [T, H, WIDE] at these positions; zeros elsewhere."""
    pointers = x + head * head_stride + at.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointers, mask=_inside(there, WIDE, WIDTH), other=0.0)


@triton.jit
def _write(x, value, at, head, stride, head_stride, there, WIDE: tl.constexpr, WIDTH: tl.constexpr):
    pointers = x + head * head_stride + at.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(pointers, value.to(x.dtype.element_ty), mask=_inside(there, WIDE, WIDTH))


@triton.jit
def _span(of, begins, tile, TILE: tl.constexpr, size, sentences):
    """The range of positions, in the other batch, of the sentences of this tile."""
    first = tl.load(of + tile * TILE)
    last = tl.load(of + tl.minimum(tile * TILE + TILE, size) - 1)
    return tl.load(begins + first), tl.load(begins + tl.minimum(last + 1, sentences))


@triton.jit
def _allowed(query, key, query_segment, key_segment, sentences, CAUSAL: tl.constexpr):
    """The mask of a tile, from positions and sentences that broadcast to it; missing positions count as padding."""
    allowed = (query_segment == key_segment) & (query_segment < sentences)
    if CAUSAL:
        allowed = allowed & (key <= query)
    return allowed


@triton.jit
def _forward(
    q, k, v, out, lse, query_segments, key_segments, begins,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head,
    queries, sentences, scale, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    query = tile * M + tl.arange(0, M)
    is_query = query < queries
    low, high = _span(query_segments, begins, tile, M, queries, sentences)
    if CAUSAL:
        high = tl.minimum(high, tile * M + M)
    query_segment = tl.load(query_segments + query, mask=is_query, other=sentences)
    rows = _rows(q, query, head, q_stride, q_head, is_query, d, D)
    row_max = tl.full([M], MIN_TILE, tl.float32)
    total = tl.zeros([M], tl.float32)
    mean = tl.zeros([M, E], tl.float32)
    for at in range(low, high, N):
        key = at + tl.arange(0, N)
        there = key < high
        key_segment = tl.load(key_segments + key, mask=there, other=sentences)
        keys = _rows(k, key, head, k_stride, k_head, there, d, D)
        scores = tl.dot(rows, tl.trans(keys), input_precision=EXACT) * (scale * LOG2E)
        allowed = _allowed(
            query[:, None], key[None, :], query_segment[:, None], key_segment[None, :], sentences, CAUSAL
        )
        scores = tl.where(allowed, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        values = _rows(v, key, head, v_stride, v_head, there, e, E)
        mean = mean * rescale[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=EXACT)
        total = total * rescale + tl.sum(weights, 1)
        row_max = new_max
    total = tl.where(total > 0, total, 1.0)
    _write(out, mean / total[:, None], query, head, out_stride, out_head, is_query, e, E)
    tl.store(lse + head * queries + query, row_max + tl.log2(total), mask=is_query)


@triton.jit
def _backward_queries(
    q, k, v, out, grad_out, lse, delta, grad_q, query_segments, key_segments, begins,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, o_stride, o_head, s_stride, s_head, g_stride, g_head,
    queries, sentences, scale, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    query = tile * M + tl.arange(0, M)
    is_query = query < queries
    low, high = _span(query_segments, begins, tile, M, queries, sentences)
    if CAUSAL:
        high = tl.minimum(high, tile * M + M)
    query_segment = tl.load(query_segments + query, mask=is_query, other=sentences)
    rows = _rows(q, query, head, q_stride, q_head, is_query, d, D)
    grad_outs = _rows(grad_out, query, head, s_stride, s_head, is_query, e, E)
    means = _rows(out, query, head, o_stride, o_head, is_query, e, E)
    sums = tl.load(lse + head * queries + query, mask=is_query, other=0.0)
    # The term of the softmax's gradient that all weights of a row share.
    deltas = tl.sum(means.to(tl.float32) * grad_outs.to(tl.float32), 1)
    tl.store(delta + head * queries + query, deltas, mask=is_query)
    grad_rows = tl.zeros([M, D], tl.float32)
    for at in range(low, high, N):
        key = at + tl.arange(0, N)
        there = key < high
        key_segment = tl.load(key_segments + key, mask=there, other=sentences)
        keys = _rows(k, key, head, k_stride, k_head, there, d, D)
        values = _rows(v, key, head, v_stride, v_head, there, e, E)
        scores = tl.dot(rows, tl.trans(keys), input_precision=EXACT) * (scale * LOG2E)
        allowed = _allowed(
            query[:, None], key[None, :], query_segment[:, None], key_segment[None, :], sentences, CAUSAL
        )
        weights = tl.exp2(tl.where(allowed, scores - sums[:, None], float("-inf")))
        grad_scores = weights * (tl.dot(grad_outs, tl.trans(values), input_precision=EXACT) - deltas[:, None])
        grad_rows += tl.dot(grad_scores.to(keys.dtype), keys, input_precision=EXACT)
    _write(grad_q, grad_rows * scale, query, head, g_stride, g_head, is_query, d, D)


@triton.jit
def _backward_keys(
    q, k, v, grad_out, lse, delta, grad_k, grad_v, query_segments, key_segments, begins,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, s_stride, s_head, gk_stride, gk_head, gv_stride, gv_head,
    queries, size, sentences, scale, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    key = tile * N + tl.arange(0, N)
    there = key < size
    low, high = _span(key_segments, begins, tile, N, size, sentences)
    if CAUSAL:
        low = tl.maximum(low, tile * N)
    key_segment = tl.load(key_segments + key, mask=there, other=sentences)
    keys = _rows(k, key, head, k_stride, k_head, there, d, D)
    values = _rows(v, key, head, v_stride, v_head, there, e, E)
    grad_keys = tl.zeros([N, D], tl.float32)
    grad_values = tl.zeros([N, E], tl.float32)
    for at in range(low, high, M):
        query = at + tl.arange(0, M)
        is_query = query < high
        query_segment = tl.load(query_segments + query, mask=is_query, other=sentences)
        rows = _rows(q, query, head, q_stride, q_head, is_query, d, D)
        grad_outs = _rows(grad_out, query, head, s_stride, s_head, is_query, e, E)
        sums = tl.load(lse + head * queries + query, mask=is_query, other=0.0)
        deltas = tl.load(delta + head * queries + query, mask=is_query, other=0.0)
        scores = tl.dot(keys, tl.trans(rows), input_precision=EXACT) * (scale * LOG2E)
        allowed = _allowed(
            query[None, :], key[:, None], query_segment[None, :], key_segment[:, None], sentences, CAUSAL
        )
        weights = tl.exp2(tl.where(allowed, scores - sums[None, :], float("-inf")))
        grad_values += tl.dot(weights.to(grad_outs.dtype), grad_outs, input_precision=EXACT)
        grad_scores = weights * (tl.dot(values, tl.trans(grad_outs), input_precision=EXACT) - deltas[None, :])
        grad_keys += tl.dot(grad_scores.to(rows.dtype), rows, input_precision=EXACT)
    _write(grad_k, grad_keys * scale, key, head, gk_stride, gk_head, there, d, D)
    _write(grad_v, grad_values, key, head, gv_stride, gv_head, there, e, E)


# Queries and keys of a tile, warps, stages: fastest for heads of 64 features on an H200.
TILES = {"forward": (64, 32, 4, 2), "queries": (64, 32, 4, 2), "keys": (32, 64, 4, 1)}
WIDE = (32, 32, 4, 1)  # for wider heads, so that a tile fits into shared memory


def _options(what: str, q: Tensor, v: Tensor, causal: bool) -> dict:
    wide = max(q.shape[-1], v.shape[-1]) * q.element_size() > 2 * 64
    m, n, warps, stages = WIDE if wide else TILES[what]
    d, e = q.shape[-1], v.shape[-1]
    widths = {"d": d, "e": e, "D": tile_size(d), "E": tile_size(e)}
    exact = dot_precision(q)
    return {"CAUSAL": causal, **widths, "M": m, "N": n, "EXACT": exact, "num_warps": warps, "num_stages": stages}


def _strides(*tensors: Tensor) -> list[int]:
    assert all(x.stride(-1) == 1 for x in tensors)
    return [step for x in tensors for step in x.stride()[:2]]


@torch.library.custom_op("regard::varlen_attention", mutates_args=())
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, query_segments: Tensor, key_segments: Tensor,
    query_begins: Tensor, key_begins: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, H, D], k [S, H, D], v [S, H, E] -> output [T, H, E], and logsumexp [H, T] for the backward pass."""
    queries, heads, _ = q.shape
    out = q.new_empty(queries, heads, v.shape[-1])
    lse = torch.empty(heads, queries, dtype=torch.float32, device=q.device)
    options = _options("forward", q, v, causal)
    with device_of(q):
        _forward[triton.cdiv(queries, options["M"]), heads](
            q, k, v, out, lse, query_segments, key_segments, key_begins, *_strides(q, k, v, out),
            queries, len(key_begins) - 1, scale, **options,
        )  # fmt: skip
    return out, lse


@varlen_attention.register_fake
def _(q, k, v, query_segments, key_segments, query_begins, key_begins, causal, scale):
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("regard::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    query_segments: Tensor, key_segments: Tensor, query_begins: Tensor, key_begins: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (queries, heads, _), size, sentences = q.shape, len(k), len(key_begins) - 1
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    options = _options("queries", q, v, causal)
    with device_of(q):
        _backward_queries[triton.cdiv(queries, options["M"]), heads](
            q, k, v, out, grad_out, lse, delta, grad_q, query_segments, key_segments, key_begins,
            *_strides(q, k, v, out, grad_out, grad_q),
            queries, sentences, scale, **options,
        )  # fmt: skip
    options = _options("keys", q, v, causal)
    with device_of(q):
        _backward_keys[triton.cdiv(size, options["N"]), heads](
            q, k, v, grad_out, lse, delta, grad_k, grad_v, query_segments, key_segments, query_begins,
            *_strides(q, k, v, grad_out, grad_k, grad_v), queries, size, sentences, scale, **options,
        )  # fmt: skip
    return grad_q, grad_k, grad_v


@varlen_attention_backward.register_fake
def _(grad_out, q, k, v, out, lse, query_segments, key_segments, query_begins, key_begins, causal, scale):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _save_for_backward(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # no zero tensor for the logsumexp
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_out, _):
    q, k, v, *layout, out, lse = ctx.saved_tensors
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    grads = varlen_attention_backward(grad_out, q, k, v, out, lse, *layout, ctx.causal, ctx.scale)
    return *grads, *[None] * 6


varlen_attention.register_autograd(_backward, setup_context=_save_for_backward)
