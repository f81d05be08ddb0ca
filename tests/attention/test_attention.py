"""Attention: every backend, score, mask and layout against loops, PyTorch or values computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.attention import (
    Additive,
    Bilinear,
    Causal,
    DenseQK,
    Dot,
    Full,
    Mask,
    MaskTable,
    MultiHeadAttention,
    PackedQK,
    SameSegment,
    ScaledDot,
    Score,
    SegmentPositions,
    TableMask,
    Window,
    attend,
    plain_weights,
    use_backend,
)
from regard.attention.backends import fused, plain, small
from regard.interpret.recorder import Recorder, intervene
from regard.nn.positions import Sinusoidal
from regard.packed import PackedLayout

T, F = True, False


def segment_positions(*sentences: int) -> SegmentPositions:
    """Return the positions of packed sentences with these lengths."""
    return SegmentPositions.flat(PackedLayout(sentences))


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


# -- masks: True = may attend ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "table"),
    [
        (Full(), [[T, T, T], [T, T, T], [T, T, T]]),
        (Causal(), [[T, F, F], [T, T, F], [T, T, T]]),
        (~Causal(), [[F, T, T], [F, F, T], [F, F, F]]),
        (Window(1), [[T, F, F], [T, T, F], [F, T, T]]),
        (Window(0, 1), [[T, T, F], [F, T, T], [F, F, T]]),
        (Window(1, 1) & Causal(), [[T, F, F], [T, T, F], [F, T, T]]),
        (Window(0) | ~Causal(), [[T, T, T], [F, T, T], [F, F, T]]),
        (TableMask(torch.tensor([[F, T, F], [F, F, F], [T, T, F]])), [[F, T, F], [F, F, F], [T, T, F]]),
    ],
)
def test_masks_of_one_sentence_are_these_tables(mask: Mask, table: list[list[bool]]) -> None:
    assert mask.table(segment_positions(3), segment_positions(3)).tolist() == table


def test_packed_sentences_do_not_attend_to_each_other_or_to_padding() -> None:
    packed = SegmentPositions.flat(PackedLayout([2, 1], size=4))  # a a b _
    assert SameSegment().table(packed, packed).tolist() == [[T, T, F, F], [T, T, F, F], [F, F, T, F], [F, F, F, F]]
    assert (SameSegment() & Causal()).table(packed, packed).tolist() == [
        [T, F, F, F],
        [T, T, F, F],
        [F, F, T, F],
        [F, F, F, F],
    ]


def test_padding_is_masked_in_the_padded_view() -> None:
    table = SameSegment().table(
        SegmentPositions.padded(PackedLayout([1, 2])), SegmentPositions.padded(PackedLayout([2, 1]))
    )
    assert table.tolist() == [[[T, T], [F, F]], [[T, F], [T, F]]]


def test_a_packed_layout_allows_same_sentence_and_mask() -> None:
    """Queries attend exactly to what mask and sentence allow, whatever shortcut the layout uses."""
    queries, keys = PackedLayout([2, 3], size=6), PackedLayout([3, 1])
    for mask in (Full(), Causal(), Window(1, 1), TableMask(torch.rand(4, 4) < 0.5)):
        for key_layout in (keys, queries):
            allowed = PackedQK(queries, key_layout, mask).allowed
            table = allowed.to_dense(queries.max_len, key_layout.max_len, torch.device("cpu"))
            expected = (mask & SameSegment()).table(
                SegmentPositions.padded(queries), SegmentPositions.padded(key_layout)
            )
            table = torch.ones_like(expected[:, None]) if table is None else table
            table = table.expand(len(key_layout), 1, *expected.shape[1:])[:, 0]
            assert torch.equal(table[queries.padded_is_token], expected[queries.padded_is_token])


# -- the plain backend is the definition -------------------------------------------------------------------------------


def loops(scores: list[list[float]], value: list[list[float]], table: list[list[bool]]) -> list[list[float]]:
    """Compute softmax(scores) @ value one number at a time."""
    out = []
    for row, allowed in zip(scores, table, strict=True):
        seen = [k for k, ok in enumerate(allowed) if ok]
        total = sum(math.exp(row[k]) for k in seen)
        out.append([sum(math.exp(row[k]) / total * value[k][d] for k in seen) for d in range(len(value[0]))])
    return out


def test_plain_attention_equals_loops() -> None:
    torch.manual_seed(1)
    q, k, v = draw(3, 4), draw(5, 4), draw(5, 2)
    table = torch.rand(3, 5) < 0.6
    table[1] = False
    scores = [
        [sum(a * b for a, b in zip(x, y, strict=True)) / 2 for y in k.tolist()] for x in q.tolist()
    ]  # sqrt of width 4
    expected = torch.tensor(loops(scores, v.tolist(), table.tolist()), dtype=torch.float64)
    torch.testing.assert_close(plain(q, k, v, MaskTable(table), ScaledDot()), expected)
    assert expected[1].tolist() == [0, 0]


def test_scores_112_and_96_at_width_64_give_14_and_12_and_weights_of_88_and_12_percent() -> None:
    query = torch.ones(1, 64)
    keys = torch.stack([torch.full((64,), 112 / 64), torch.full((64,), 96 / 64)])  # q.k = 112 and 96
    assert Dot()(query, keys).tolist() == [[112, 96]]
    assert ScaledDot()(query, keys).tolist() == [[14, 12]]
    weights = plain_weights(query, keys, MaskTable(), ScaledDot())
    assert weights.mul(100).round().tolist() == [[88, 12]]
    assert weights[0, 0].item() == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-6)
    for name in ("plain", "fused"):
        with use_backend(name):  # with the unit vectors as values the output is the weights
            out = attend(query[None, None], keys[None, None], torch.eye(2, 64)[None, None], DenseQK())
        assert out[0, 0, 0, :2].mul(100).round().tolist() == [88, 12]
        assert not out[0, 0, 0, 2:].any()
    unscaled = plain_weights(query, keys, MaskTable(), Dot())
    assert unscaled[0, 1].item() == pytest.approx(math.exp(-16), rel=1e-3)  # which scaling by sqrt(64) avoids


def test_additive_scores_are_v_tanh_of_the_sum() -> None:
    torch.manual_seed(2)
    score = Additive(3, 4, hidden=5).double()
    q, k = draw(2, 3), draw(6, 4)
    w, u, b, v = (t.tolist() for t in (score.query.weight, score.key.weight, score.key.bias, score.out.weight[0]))
    expected = torch.empty(2, 6, dtype=torch.float64)
    for i, x in enumerate(q.tolist()):
        for j, y in enumerate(k.tolist()):
            hidden = (
                sum(w[h][d] * x[d] for d in range(3)) + sum(u[h][d] * y[d] for d in range(4)) + b[h] for h in range(5)
            )
            expected[i, j] = sum(v[h] * math.tanh(s) for h, s in enumerate(hidden))
    torch.testing.assert_close(score(q, k), expected)
    table = torch.tensor([[T, T, F, T, F, T], [F] * 6])
    out = attend(q[None, None], k[None, None], draw(1, 1, 6, 2).detach(), DenseQK(table), score=score)
    assert out.shape == (1, 1, 2, 2) and not out[0, 0, 1].any()


def test_additive_attention_through_attend_equals_loops() -> None:
    torch.manual_seed(3)
    score = Additive(3, 4, hidden=5).double()
    q, k, v = draw(1, 1, 2, 3), draw(1, 1, 6, 4), draw(1, 1, 6, 2)
    table = torch.rand(2, 6) < 0.7
    expected = loops(score(q, k)[0, 0].tolist(), v[0, 0].tolist(), table.tolist())
    torch.testing.assert_close(
        attend(q, k, v, DenseQK(table), score=score)[0, 0], torch.tensor(expected, dtype=torch.float64)
    )


def test_the_bilinear_score_is_q_w_k() -> None:
    score = Bilinear(3, 4).double()
    q, k = draw(2, 3), draw(5, 4)
    expected = [[(x @ score.weight @ y).item() for y in k] for x in q]
    torch.testing.assert_close(score(q, k), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["fused", "small", "block_sparse", "varlen"])
def test_a_score_that_is_not_a_dot_product_is_computed_by_the_plain_backend(backend: str) -> None:
    q, k, v = (draw(1, 1, 2, 4, dtype=torch.float32) for _ in range(3))
    score = Additive(4, 4)
    with use_backend(backend):
        assert torch.equal(attend(q, k, v, DenseQK(), score=score), score(q, k).softmax(-1) @ v)
    with pytest.raises(TypeError, match="Additive is not a dot product"):
        score.as_dot(q, k)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'fast'"), use_backend("fast"):
        pass


# -- fused equals plain ------------------------------------------------------------------------------------------------

QUERIES, KEYS, HEADS = PackedLayout([4, 1, 6]), PackedLayout([3, 5, 6]), 2
BOOLEANS = torch.rand(6, 6, generator=torch.Generator().manual_seed(4)) < 0.4
BOOLEANS[0] = False  # the first query of every sentence attends to nothing
MASKS: dict[str, Mask | None] = {
    "none": None,
    "everything": Full(),
    "causal": Causal(),
    "not causal": ~Causal(),
    "window": Window(2, 1),
    "same sentence": SameSegment(),
    "given": TableMask(BOOLEANS),
    "window and given": Window(1, 1) & TableMask(BOOLEANS),
    "causal and not window": Causal() & ~Window(1),
    "given or causal": TableMask(BOOLEANS) | Causal(),
    "nothing": ~Full(),
}
SCORES: dict[str, Callable[[], tuple[Score, int, int]]] = {  # score, query width, key width
    "dot": lambda: (Dot(), 8, 8),
    "scaled dot": lambda: (ScaledDot(), 8, 8),
    "bilinear": lambda: (Bilinear(6, 8), 6, 8),
}


def both_backends(
    query: Tensor, key: Tensor, value: Tensor, layout: Any, score: Score, grad_out: Tensor
) -> list[list[Tensor]]:
    """For each backend: the output, then the gradients of query, key, value and the score's parameters."""
    results = []
    leaves = [query, key, value, *score.parameters()]
    for name in ("plain", "fused"):
        with use_backend(name):
            out = attend(query, key, value, layout, score=score)
        gradients = torch.autograd.grad((out * grad_out).sum(), leaves, retain_graph=True)
        results.append([out, *gradients])
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("which", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_fused_equals_plain_on_packed_batches(mask: str, which: str, is_self: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    score, query_width, key_width = SCORES[which]()
    keys = QUERIES if is_self else KEYS
    query, key = draw(QUERIES.size, HEADS, query_width, dtype=dtype), draw(keys.size, HEADS, key_width, dtype=dtype)
    value = draw(keys.size, HEADS, 8, dtype=dtype)
    layout = PackedQK(QUERIES, keys, MASKS[mask])
    grad_out = torch.randn(QUERIES.size, HEADS, 8, dtype=dtype)
    slow, fast = both_backends(query, key, value, layout, score.to(dtype), grad_out)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for one, other in zip(slow, fast, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    table = (Full() if MASKS[mask] is None else MASKS[mask]) & SameSegment()  # type: ignore[operator]
    empty = ~table.table(SegmentPositions.flat(QUERIES), SegmentPositions.flat(keys)).any(-1)
    assert not slow[0][empty].any() and not fast[0][empty].any()  # exact zeros
    assert slow[0][~empty].abs().sum(-1).gt(0).all()


@pytest.mark.parametrize("which", SCORES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(5, 5), (3, 5), (5, 3)])
def test_fused_equals_plain_on_dense_tables(which: str, causal: bool, shape: tuple[int, int]) -> None:
    torch.manual_seed(6)
    score, query_width, key_width = SCORES[which]()
    queries, keys = shape
    query, key, value = draw(2, HEADS, queries, query_width), draw(2, HEADS, keys, key_width), draw(2, HEADS, keys, 8)
    grad_out = torch.randn(2, HEADS, queries, 8, dtype=torch.float64)
    for table in (None, torch.rand(2, 1, *shape) < 0.5, torch.rand(*shape) < 0.3):
        slow, fast = both_backends(query, key, value, DenseQK(table, causal), score.double(), grad_out)
        for one, other in zip(slow, fast, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("run", [plain, fused])
def test_a_query_with_nothing_to_attend_to_gives_exact_zeros_and_finite_gradients(run: Any) -> None:
    q, k, v = (draw(1, 1, 3, 4, dtype=torch.float32) for _ in range(3))
    table = torch.tensor([[T, F, T], [F, F, F], [F, T, F]])
    out = run(q, k, v, MaskTable(table), ScaledDot())
    assert out[0, 0, 1].tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(out[0, 0, 2], v[0, 0, 1])
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert gradient.isfinite().all()
    assert not plain_weights(q, k, MaskTable(table), ScaledDot())[0, 0, 1].any()


@pytest.mark.parametrize("keys", [1, 2, 7, 15, 16, 17])
@pytest.mark.parametrize("masked", [False, True])
def test_the_backend_for_few_keys_equals_the_plain_one(keys: int, masked: bool) -> None:
    """Fewer keys than a CPU vector holds are padded."""
    torch.manual_seed(keys)
    table = torch.rand(32, 1, 5, keys) < 0.6 if masked else None
    if table is not None:
        table[..., 0] = True
    allowed = MaskTable.with_bias(table, torch.float32)
    q, k, v = (draw(32, 4, length, 3, dtype=torch.float32) for length in (5, keys, keys))
    upstream = torch.randn(32, 4, 5, 3)
    results = [run(q, k, v, allowed, ScaledDot()) for run in (small, plain)]
    torch.testing.assert_close(results[0], results[1])
    gradients = [torch.autograd.grad(out, (q, k, v), upstream) for out in results]
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", ["plain", "fused"])
def test_a_sentence_without_keys_gives_zeros(name: str) -> None:
    for lengths in ([2, 0], [0, 0]):
        keys = PackedLayout(lengths)
        query = draw(3, 1, 4)
        with use_backend(name):
            out = attend(query, draw(keys.size, 1, 4), draw(keys.size, 1, 4), PackedQK(PackedLayout([1, 2]), keys))
        assert not out[1:].any()
        assert out[:1].any() == (lengths[0] > 0)


@pytest.mark.parametrize("name", ["plain", "fused"])
def test_very_large_scores_stay_finite(name: str) -> None:
    q, k, v = (draw(1, 1, 3, 4, dtype=torch.float32) for _ in range(3))
    with use_backend(name):
        out = attend(q * 1e4, k * 1e4, v, DenseQK(torch.tensor([[T, F, T]] * 3)))
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


# -- attention treats its keys as a set --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "fused"])
def test_shuffled_keys_give_the_same_output_until_positions_are_added(name: str) -> None:
    torch.manual_seed(7)
    query, tokens, order = draw(1, 1, 3, 8), draw(1, 1, 6, 8), torch.tensor([3, 0, 5, 1, 4, 2])
    encoding = Sinusoidal(8)(torch.arange(6), torch.tensor(6)).double()
    with use_backend(name):

        def output(keys: Tensor) -> Tensor:
            return attend(query, keys, keys, DenseQK())

        torch.testing.assert_close(output(tokens), output(tokens[:, :, order]))
        assert (output(tokens + encoding) - output(tokens[:, :, order] + encoding)).abs().max() > 0.01


# -- multi-head --------------------------------------------------------------------------------------------------------


def make_pair(
    width: int, heads: int, cross: bool, source_width: int | None = None
) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Return our attention and PyTorch's with the same weights; both stack q, k, v."""
    ours = MultiHeadAttention(width, heads, (source_width or width) if cross else None).double()
    theirs = nn.MultiheadAttention(
        width, heads, batch_first=True, kdim=source_width, vdim=source_width, dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.5)
        if not cross:
            weight, bias = ours.qkv_proj.weight, ours.qkv_proj.bias
        else:
            weight = None if source_width else torch.cat([ours.q_proj.weight, ours.kv_proj.weight])
            bias = torch.cat([ours.q_proj.bias, ours.kv_proj.bias])
        if weight is None:
            theirs.q_proj_weight.copy_(ours.q_proj.weight)
            theirs.k_proj_weight.copy_(ours.kv_proj.weight[:width])
            theirs.v_proj_weight.copy_(ours.kv_proj.weight[width:])
        else:
            theirs.in_proj_weight.copy_(weight)
        theirs.in_proj_bias.copy_(bias)
        theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    return ours, theirs


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_pytorch_s(causal: bool) -> None:
    torch.manual_seed(8)
    ours, theirs = make_pair(8, 2, cross=False)
    layout = PackedLayout([3, 5, 1], size=11)
    x = draw(11, 8)
    out = ours(x, PackedQK(layout, layout, Causal() if causal else None))
    padded = layout.pad(x)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    expected, weights = theirs(
        padded, padded, padded, key_padding_mask=~layout.padded_is_token, attn_mask=future, average_attn_weights=False
    )
    torch.testing.assert_close(layout.pad(out)[layout.padded_is_token], expected[layout.padded_is_token])
    with Recorder(ours) as seen:
        ours(x, PackedQK(layout, layout, Causal() if causal else None))
    for n, length in enumerate(layout.lengths):
        torch.testing.assert_close(seen.attention[""].sentence(n), weights[n, :, :length, :length])


@pytest.mark.parametrize("source_width", [None, 6])
def test_cross_attention_equals_pytorch_s_with_padding_on_both_sides(source_width: int | None) -> None:
    torch.manual_seed(9)
    ours, theirs = make_pair(8, 4, cross=True, source_width=source_width)
    queries, keys = PackedLayout([2, 4, 3]), PackedLayout([5, 1, 3], size=12)
    x, source = draw(9, 8), draw(12, source_width or 8)
    out = ours(x, PackedQK(queries, keys), source)
    memory = keys.pad(source)
    expected, _ = theirs(queries.pad(x), memory, memory, key_padding_mask=~keys.padded_is_token)
    torch.testing.assert_close(queries.pad(out)[queries.padded_is_token], expected[queries.padded_is_token])
    # the same attention in the layout of decoding, with each sentence's queries as beams
    alone = ours(x[:2], ours.source_kv(source[:5], PackedLayout([5])))
    torch.testing.assert_close(alone, out[:2])


def test_heads_must_share_the_width() -> None:
    with pytest.raises(ValueError, match="width 10 is not a multiple of heads 4"):
        MultiHeadAttention(10, 4)


def test_each_projection_is_initialised_separately() -> None:
    """Xavier's bound for one [64, 64] matrix is sqrt(6 / 128), however many are stacked."""
    bound = math.sqrt(6 / 128)
    for layer in (MultiHeadAttention(64, 4).qkv_proj, MultiHeadAttention(64, 4, 64).kv_proj):
        for matrix in layer.weight.split(64):
            assert 0.98 * bound < matrix.abs().max().item() <= bound
        assert not layer.bias.any()


# -- recording and changing --------------------------------------------------------------------------------------------


class TappedAttention(nn.Module):
    """Self-attention with dropout before and after, so that random numbers are drawn on both sides of the tap."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.dropout = MultiHeadAttention(8, 2), nn.Dropout(0.3)
        self.layout = PackedLayout([3, 5, 1], size=10)
        self.mask = Causal() & ~TableMask(
            torch.tensor([[F, F, F, F, F]] * 4 + [[T, T, T, T, T]])
        )  # the 5th attends to nothing

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.self_attn(self.dropout(x), PackedQK(self.layout, self.layout, self.mask)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["plain", "fused"])
def test_recording_changes_neither_output_nor_gradients_nor_random_numbers(training: bool, name: str) -> None:
    torch.manual_seed(10)
    model, x = TappedAttention().train(training), torch.randn(10, 8)
    results = []
    for record in (False, True):
        torch.manual_seed(11)
        with use_backend(name):
            if record:
                with Recorder(model) as seen:
                    out = model(x)
                    seen.attention["self_attn"].sentence(0)  # computed during the pass
            else:
                out = model(x)
        state = torch.random.get_rng_state()
        results.append([out, state, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for off, on in zip(*results, strict=True):
        assert torch.equal(off, on)


def test_recorded_weights_times_values_are_the_kernels_output() -> None:
    torch.manual_seed(12)
    model, x = TappedAttention().eval(), torch.randn(10, 8)
    with Recorder(model) as seen:
        model(x)
    offered = seen.attention["self_attn"].offered
    heads = offered.layout.from_kernel(offered() @ offered.value)
    torch.testing.assert_close(heads, seen.values["self_attn.heads"], atol=1e-6, rtol=1e-5)
    assert heads[:9].abs().sum() > 0
    for n, length in enumerate(model.layout.lengths):
        weights = seen.attention["self_attn"].sentence(n)
        assert weights.shape == (2, length, length)
        sums = torch.ones(2, length)
        sums[:, 4:] = 0  # the fifth token attends to nothing
        torch.testing.assert_close(weights.sum(-1), sums)
        assert not weights.triu(1).any()  # masked cells are exactly zero


def test_a_tap_reached_several_times_keeps_its_history() -> None:
    model = TappedAttention().eval()
    with Recorder(model) as seen:
        first = model(torch.randn(10, 8))
        model(torch.randn(10, 8))
    assert [len(seen.history[key]) for key in ("self_attn.weights", "self_attn.heads")] == [2, 2]
    assert seen.history["self_attn.heads"][-1] is seen.values["self_attn.heads"]
    model(torch.randn(10, 8))  # outside the context nothing is recorded
    assert len(seen.history["self_attn.heads"]) == 2 and first.shape == (10, 8)


def test_uniform_weights_written_at_the_tap_give_the_mean_of_the_values() -> None:
    torch.manual_seed(13)
    layer, layout, x = MultiHeadAttention(8, 2), PackedLayout([4]), torch.randn(4, 8)
    with intervene(layer, {"weights": lambda w: torch.full_like(w, 1 / 4)}):
        out = layer(x, PackedQK(layout, layout))
    value = layer.qkv_proj(x)[:, 16:]
    torch.testing.assert_close(out, layer.out_proj(value.mean(0)).expand(4, 8))
    untouched = layer(x, PackedQK(layout, layout))
    with intervene(layer, {"weights": lambda w: w}):
        torch.testing.assert_close(layer(x, PackedQK(layout, layout)), untouched)
    assert (untouched - out).abs().max() > 0.01


def test_one_head_can_be_ablated() -> None:
    torch.manual_seed(14)
    layer, layout, x = MultiHeadAttention(8, 2), PackedLayout([4]), torch.randn(4, 8)
    kept = torch.tensor([1.0, 0.0])[:, None]
    with intervene(layer, {"heads": lambda heads: heads * kept}), Recorder(layer) as seen:
        out = layer(x, PackedQK(layout, layout))
    with Recorder(layer) as before:
        layer(x, PackedQK(layout, layout))
    first = before.values["heads"][:, 0] @ layer.out_proj.weight[:, :4].T + layer.out_proj.bias
    torch.testing.assert_close(out, first)
    assert not seen.values["heads"][:, 1].any()  # a recorder after the change sees it


def test_a_tap_that_was_never_reached_is_an_error_that_names_those_that_were() -> None:
    layer, layout = MultiHeadAttention(8, 2), PackedLayout([4])
    message = r"no tap 'wieghts' was reached; there were: heads, weights"
    with pytest.raises(KeyError, match=message), intervene(layer, {"wieghts": lambda w: w}):
        layer(torch.randn(4, 8), PackedQK(layout, layout))
