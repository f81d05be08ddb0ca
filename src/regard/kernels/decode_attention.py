"""Attention of one query per beam to a KV cache, for a decoding step. Defined by `attention.backends.plain`.

One program processes all beams of a sentence, and all query heads that share a head of keys and values, in one pass
over the keys. Keys that no beam may attend to (their `bias` is -inf) are not read.

Shapes: N sentences, H heads, G heads of keys and values, K beams, L keys, D features of queries and keys, E of values.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.common import LOG2E, MIN_TILE, device_of, dot_precision, tile_size

KEYS, WARPS, STAGES = 64, 4, 2  # size and launch settings of a tile


@triton.jit
def _decode_attention_kernel(
    q, k, v, bias, out,
    qn, qh, qk, kn, kh, kl, vn, vh, vl, bn, bk, bl, on, oh, ok,
    beams, group, length, scale, d: tl.constexpr, e: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    sentence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, query, value = tl.arange(0, M), tl.arange(0, D), tl.arange(0, E)
    beam, query_head = row % beams, head * group + row // beams
    is_row, is_query_feature, is_value_feature = row < group * beams, query < d, value < e
    q += sentence * qn + query_head[:, None] * qh
    k += sentence * kn + head * kh
    v += sentence * vn + head * vh
    queries = tl.load(
        q + beam[:, None] * qk + query[None, :], mask=is_row[:, None] & is_query_feature[None, :], other=0.0
    )
    row_max = tl.full([M], MIN_TILE, tl.float32)
    total = tl.zeros([M], tl.float32)
    mean = tl.zeros([M, E], tl.float32)
    for at in range(0, length, N):
        key = at + tl.arange(0, N)
        inside = is_row[:, None] & (key < length)[None, :]
        biases = tl.load(
            bias + sentence * bn + beam[:, None] * bk + key[None, :] * bl, mask=inside, other=float("-inf")
        )
        biases = biases.to(tl.float32)
        is_allowed = tl.max(biases, 0) > float("-inf")
        keys = tl.load(
            k + key[:, None] * kl + query[None, :], mask=is_allowed[:, None] & is_query_feature[None, :], other=0.0
        )
        scores = (tl.dot(queries, tl.trans(keys), input_precision=EXACT) * scale + biases) * LOG2E
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        values = tl.load(
            v + key[:, None] * vl + value[None, :], mask=is_allowed[:, None] & is_value_feature[None, :], other=0.0
        )
        mean = mean * rescale[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=EXACT)
        total = total * rescale + tl.sum(weights, 1)
        row_max = new_max
    mean = mean / tl.where(total > 0, total, 1.0)[:, None]
    pointers = out + sentence * on + query_head[:, None] * oh + beam[:, None] * ok + value[None, :]
    tl.store(pointers, mean.to(out.dtype.element_ty), mask=is_row[:, None] & is_value_feature[None, :])


@torch.library.custom_op("regard::decode_attention", mutates_args=())
def decode_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """q [N, H, K, D], k [N, G, L, D], v [N, G, L, E], bias [N or 1, 1, K or 1, L] -> [N, H, K, E], heads innermost."""
    (sentences, heads, beams, d), (kv_heads, length, e) = q.shape, v.shape[-3:]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    out = v.new_empty(sentences, beams, heads, e).transpose(1, 2)
    bias = bias.expand(sentences, 1, beams, length)[:, 0]
    strides = [step for x in (q, k, v) for step in x.stride()[:3]] + [*bias.stride(), *out.stride()[:3]]
    with device_of(q):
        _decode_attention_kernel[sentences, kv_heads](
            q, k, v, bias, out, *strides, beams, heads // kv_heads, length, scale, d=d, e=e,
            D=tile_size(d), E=tile_size(e), M=tile_size(beams * heads // kv_heads), N=KEYS, EXACT=dot_precision(q),
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out


@decode_attention.register_fake
def _(q, k, v, bias, scale):
    sentences, heads, beams, _ = q.shape
    return v.new_empty(sentences, beams, heads, v.shape[-1]).transpose(1, 2)
