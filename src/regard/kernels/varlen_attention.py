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
    place = x + head * head_stride + at.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(place, mask=_inside(there, WIDE, WIDTH), other=0.0)


@triton.jit
def _write(x, value, at, head, stride, head_stride, there, WIDE: tl.constexpr, WIDTH: tl.constexpr):
    place = x + head * head_stride + at.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(place, value.to(x.dtype.element_ty), mask=_inside(there, WIDE, WIDTH))


@triton.jit
def _span(of, begins, tile, TILE: tl.constexpr, size, sentences):
    """The range of positions, in the other batch, of the sentences of this tile."""
    first = tl.load(of + tile * TILE)
    last = tl.load(of + tl.minimum(tile * TILE + TILE, size) - 1)
    return tl.load(begins + first), tl.load(begins + tl.minimum(last + 1, sentences))


@triton.jit
def _allowed(query, key, own, their, sentences, CAUSAL: tl.constexpr):
    """The mask of a tile, from positions and sentences that broadcast to it; missing positions count as padding."""
    seen = (own == their) & (own < sentences)
    if CAUSAL:
        seen = seen & (key <= query)
    return seen


@triton.jit
def _forward(
    q, k, v, out, lse, of_queries, of_keys, begins,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head,
    queries, sentences, scale, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    query = tile * M + tl.arange(0, M)
    real = query < queries
    low, high = _span(of_queries, begins, tile, M, queries, sentences)
    if CAUSAL:
        high = tl.minimum(high, tile * M + M)
    own = tl.load(of_queries + query, mask=real, other=sentences)
    rows = _rows(q, query, head, q_stride, q_head, real, d, D)
    most = tl.full([M], MIN_TILE, tl.float32)
    total = tl.zeros([M], tl.float32)
    mean = tl.zeros([M, E], tl.float32)
    for at in range(low, high, N):
        key = at + tl.arange(0, N)
        there = key < high
        their = tl.load(of_keys + key, mask=there, other=sentences)
        keys = _rows(k, key, head, k_stride, k_head, there, d, D)
        scores = tl.dot(rows, tl.trans(keys), input_precision=EXACT) * (scale * LOG2E)
        seen = _allowed(query[:, None], key[None, :], own[:, None], their[None, :], sentences, CAUSAL)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(most - higher)
        values = _rows(v, key, head, v_stride, v_head, there, e, E)
        mean = mean * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=EXACT)
        total = total * fade + tl.sum(weights, 1)
        most = higher
    total = tl.where(total > 0, total, 1.0)
    _write(out, mean / total[:, None], query, head, out_stride, out_head, real, e, E)
    tl.store(lse + head * queries + query, most + tl.log2(total), mask=real)


@triton.jit
def _backward_queries(
    q, k, v, out, slope, lse, lost, for_q, of_queries, of_keys, begins,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, o_stride, o_head, s_stride, s_head, g_stride, g_head,
    queries, sentences, scale, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    query = tile * M + tl.arange(0, M)
    real = query < queries
    low, high = _span(of_queries, begins, tile, M, queries, sentences)
    if CAUSAL:
        high = tl.minimum(high, tile * M + M)
    own = tl.load(of_queries + query, mask=real, other=sentences)
    rows = _rows(q, query, head, q_stride, q_head, real, d, D)
    slopes = _rows(slope, query, head, s_stride, s_head, real, e, E)
    means = _rows(out, query, head, o_stride, o_head, real, e, E)
    sums = tl.load(lse + head * queries + query, mask=real, other=0.0)
    shared = tl.sum(means.to(tl.float32) * slopes.to(tl.float32), 1)  # the softmax term that all weights of a row share
    tl.store(lost + head * queries + query, shared, mask=real)
    found = tl.zeros([M, D], tl.float32)
    for at in range(low, high, N):
        key = at + tl.arange(0, N)
        there = key < high
        their = tl.load(of_keys + key, mask=there, other=sentences)
        keys = _rows(k, key, head, k_stride, k_head, there, d, D)
        values = _rows(v, key, head, v_stride, v_head, there, e, E)
        scores = tl.dot(rows, tl.trans(keys), input_precision=EXACT) * (scale * LOG2E)
        seen = _allowed(query[:, None], key[None, :], own[:, None], their[None, :], sentences, CAUSAL)
        weights = tl.exp2(tl.where(seen, scores - sums[:, None], float("-inf")))
        change = weights * (tl.dot(slopes, tl.trans(values), input_precision=EXACT) - shared[:, None])
        found += tl.dot(change.to(keys.dtype), keys, input_precision=EXACT)
    _write(for_q, found * scale, query, head, g_stride, g_head, real, d, D)


@triton.jit
def _backward_keys(
    q, k, v, slope, lse, lost, for_k, for_v, of_queries, of_keys, begins,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, s_stride, s_head, gk_stride, gk_head, gv_stride, gv_head,
    queries, size, sentences, scale, d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    key = tile * N + tl.arange(0, N)
    there = key < size
    low, high = _span(of_keys, begins, tile, N, size, sentences)
    if CAUSAL:
        low = tl.maximum(low, tile * N)
    their = tl.load(of_keys + key, mask=there, other=sentences)
    keys = _rows(k, key, head, k_stride, k_head, there, d, D)
    values = _rows(v, key, head, v_stride, v_head, there, e, E)
    for_keys = tl.zeros([N, D], tl.float32)
    for_values = tl.zeros([N, E], tl.float32)
    for at in range(low, high, M):
        query = at + tl.arange(0, M)
        real = query < high
        own = tl.load(of_queries + query, mask=real, other=sentences)
        rows = _rows(q, query, head, q_stride, q_head, real, d, D)
        slopes = _rows(slope, query, head, s_stride, s_head, real, e, E)
        sums = tl.load(lse + head * queries + query, mask=real, other=0.0)
        shared = tl.load(lost + head * queries + query, mask=real, other=0.0)
        scores = tl.dot(keys, tl.trans(rows), input_precision=EXACT) * (scale * LOG2E)
        seen = _allowed(query[None, :], key[:, None], own[None, :], their[:, None], sentences, CAUSAL)
        weights = tl.exp2(tl.where(seen, scores - sums[None, :], float("-inf")))
        for_values += tl.dot(weights.to(slopes.dtype), slopes, input_precision=EXACT)
        change = weights * (tl.dot(values, tl.trans(slopes), input_precision=EXACT) - shared[None, :])
        for_keys += tl.dot(change.to(rows.dtype), rows, input_precision=EXACT)
    _write(for_k, for_keys * scale, key, head, gk_stride, gk_head, there, d, D)
    _write(for_v, for_values, key, head, gv_stride, gv_head, there, e, E)


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
    q: Tensor, k: Tensor, v: Tensor, of_queries: Tensor, of_keys: Tensor, query_begins: Tensor, key_begins: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, H, D], k [S, H, D], v [S, H, E] -> output [T, H, E], and logsumexp [H, T] for the backward pass."""
    queries, heads, _ = q.shape
    out = q.new_empty(queries, heads, v.shape[-1])
    lse = torch.empty(heads, queries, dtype=torch.float32, device=q.device)
    options = _options("forward", q, v, causal)
    with device_of(q):
        _forward[triton.cdiv(queries, options["M"]), heads](
            q, k, v, out, lse, of_queries, of_keys, key_begins, *_strides(q, k, v, out),
            queries, len(key_begins) - 1, scale, **options,
        )  # fmt: skip
    return out, lse


@varlen_attention.register_fake
def _(q, k, v, of_queries, of_keys, query_begins, key_begins, causal, scale):
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("regard::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    of_queries: Tensor, of_keys: Tensor, query_begins: Tensor, key_begins: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (queries, heads, _), size, sentences = q.shape, len(k), len(key_begins) - 1
    for_q, for_k, for_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    lost = torch.empty_like(lse)
    options = _options("queries", q, v, causal)
    with device_of(q):
        _backward_queries[triton.cdiv(queries, options["M"]), heads](
            q, k, v, out, slope, lse, lost, for_q, of_queries, of_keys, key_begins,
            *_strides(q, k, v, out, slope, for_q),
            queries, sentences, scale, **options,
        )  # fmt: skip
    options = _options("keys", q, v, causal)
    with device_of(q):
        _backward_keys[triton.cdiv(size, options["N"]), heads](
            q, k, v, slope, lse, lost, for_k, for_v, of_queries, of_keys, query_begins,
            *_strides(q, k, v, slope, for_k, for_v), queries, size, sentences, scale, **options,
        )  # fmt: skip
    return for_q, for_k, for_v


@varlen_attention_backward.register_fake
def _(slope, q, k, v, out, lse, of_queries, of_keys, query_begins, key_begins, causal, scale):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _save_for_backward(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # no zero tensor for the logsumexp
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, slope, _):
    q, k, v, *places, out, lse = ctx.saved_tensors
    slope = slope if slope.stride(-1) == 1 else slope.contiguous()
    found = varlen_attention_backward(slope, q, k, v, out, lse, *places, ctx.causal, ctx.scale)
    return *found, *[None] * 6


varlen_attention.register_autograd(_backward, setup_context=_save_for_backward)
