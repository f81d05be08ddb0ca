"""GPU kernels against their definitions in PyTorch: values and gradients."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import kernels, models, sharding
from regard.accelerate import fused, parallel
from regard.accelerate.fused import FusedEncoderBlock, PendingResidual, add_and_norm, fuse, start_pending
from regard.accelerate.linear_relu import linear_relu
from regard.attention import Causal, MaskTable, Relative, ScaledDot, Score, StaticQK, attend, backends, use_backend
from regard.attention.backends import plain, repeat_heads
from regard.attention.static_layout import SegmentMask, StaticPackedLayout
from regard.dropout import hash_mask, new_seeds
from regard.interpret.recorder import Recorder
from regard.models.bert import BertSettings
from regard.models.gpt import GPTSettings
from regard.models.transformer_settings import TransformerSettings
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import BlockStack, DecoderBlock, EncoderBlock
from regard.nn.losses import cross_entropy
from regard.nn.norms import LayerNorm
from regard.packed import SeqBatch
from regard.recipes.schema import TrainingSettings

if os.environ.get("CI") != "true":
    pytest.importorskip("triton", reason="kernels for GPUs are written in Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]  # as the interpreter has it
MIXED = [5, 130, 1, 60, 0, 7]  # lengths within a tile and across tiles


def close(actual: object, expected: object, dtype: torch.dtype) -> None:
    exact = dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=2e-5 if exact else 4e-2, rtol=1e-4 if exact else 4e-2)


def static_layout(lengths: list[int], size: int, most: int) -> StaticPackedLayout:
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    ends = F.pad(ends, (0, most - len(lengths)), value=int(ends[-1]))
    return StaticPackedLayout(ends, size, max(lengths))


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def run_backend(name: str, call: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the output of a backend, and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with use_backend(name):
        out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [  # the number format changes neither tiles nor segments
        pytest.param(lengths, dtype, marks=pytest.mark.slow if dtype != DTYPES[0] and lengths != MIXED else ())
        for lengths in (MIXED, [70], [1] * 90, [64, 64, 44])
        for dtype in DTYPES
    ],
)
def test_varlen_attention(lengths: list[int], causal: bool, dtype: torch.dtype) -> None:
    """Sentences of all lengths, one of them empty, within a tile and across tiles, with padding at the end."""
    torch.manual_seed(0)
    query_lengths = [max(n, 1) for n in lengths]
    queries = static_layout(query_lengths, sum(query_lengths) + 5, 95)
    keys = queries if causal else static_layout([n * 7 % 50 for n in lengths], 220 if len(lengths) < 50 else 700, 95)
    layout = StaticQK(queries, keys, Causal() if causal else None)
    q, k, v = (drawn(r.size, 2, 24, dtype=dtype) for r in (queries, keys, keys))
    upstream = drawn(queries.size, 2, 24, dtype=dtype)
    upstream[sum(query_lengths) :] = 0  # padding has no gradient
    expected, actual = (
        run_backend(name, lambda *x: attend(*x, layout), [q, k, v], upstream) for name in ("plain", "varlen")
    )
    real = queries.is_token
    close(actual[0][real], expected[0][real], dtype)
    assert not actual[0][~real].any() and all(x.isfinite().all() for x in actual)
    close(actual[1:], expected[1:], dtype)


@pytest.mark.parametrize(("width", "score"), [(16, ScaledDot()), (12, ScaledDot()), (16, Relative(16, 2))])
def test_varlen_attention_with_other_widths_and_scores(width: int, score: Score) -> None:
    """Relative positions make queries and keys wider than values."""
    torch.manual_seed(0)
    score = score.to(DEVICE)
    layout = StaticQK(static_layout([5, 30, 1], 40, 5), static_layout([5, 30, 1], 40, 5), None)
    inputs = [drawn(40, 2, width) for _ in range(3)]
    upstream = drawn(40, 2, width)
    upstream[36:] = 0
    expected, actual = (
        run_backend(name, lambda *x: attend(*x, layout, score=score), inputs, upstream) for name in ("plain", "varlen")
    )
    close(actual[0][:36], expected[0][:36], torch.float32)
    close(actual[1:], expected[1:], torch.float32)


def test_operations_are_declared_correctly_to_the_compiler() -> None:
    """The fake implementations and gradients of our operations pass opcheck."""
    from regard.kernels.add_norm import add_norm
    from regard.kernels.cross_entropy import cross_entropy_with_grad
    from regard.kernels.decode_attention import decode_attention
    from regard.kernels.topk import logsumexp, topk
    from regard.kernels.varlen_attention import varlen_attention

    torch.manual_seed(0)
    sparse = StaticQK(*[static_layout([9, 20, 3], 32, 4)] * 2, Causal()).allowed.sparse
    assert isinstance(sparse, SegmentMask)
    q, k, v = (drawn(32, 2, 16).requires_grad_() for _ in range(3))
    torch.library.opcheck(varlen_attention, (q, k, v, *sparse.segments, True, 0.25))
    x, table, labels = drawn(5, 16), drawn(40, 16), torch.arange(5, device=DEVICE)
    torch.library.opcheck(cross_entropy_with_grad, (x, table, drawn(40), labels, labels > 1, 0.1, True))
    seeds = torch.tensor([3, -4], dtype=torch.int32, device=DEVICE)
    more = [drawn(*shape).requires_grad_() for shape in ((5, 16), (16,), (16,), (16,))]
    x.requires_grad_()
    torch.library.opcheck(add_norm, (x, *more, seeds, 0.2, 1e-5, True, torch.float32))
    torch.library.opcheck(add_norm, (x, *more, None, 0.0, 1e-5, True, torch.float32))
    torch.library.opcheck(logsumexp, (drawn(5, 300),))
    torch.library.opcheck(topk, (drawn(5, 300), 3))
    torch.library.opcheck(
        decode_attention, (drawn(2, 2, 3, 16), drawn(2, 2, 9, 16), drawn(2, 2, 9, 16), drawn(2, 1, 1, 9), 0.25)
    )


def test_output_shapes_do_not_depend_on_module_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compile cache keeps output shapes and does not notice a changed module constant."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from regard.kernels import add_norm

    def shapes() -> list[torch.Size]:
        with FakeTensorMode():
            x, statistics, gain = torch.empty(700, 16), torch.empty(700), torch.empty(16)
            actual = add_norm.add_norm_backward(
                x, x, x, statistics, statistics, gain, None, 0.1, True, [True] * 3, x.dtype, 4, 1
            )
        return [t.shape for t in actual]

    before, changed = shapes(), 0
    for name, value in [*vars(add_norm).items()]:
        if name.isupper() and isinstance(value, int | tuple):
            monkeypatch.setattr(add_norm, name, 2 * value)
            changed += 1
    assert changed == 3 and shapes() == before


def test_a_compiled_block_is_traced_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all sentence lengths, values and gradients equal those of the uncompiled block."""
    from torch._dynamo.testing import CompileCounterWithBackend

    monkeypatch.setattr(backends, "_select_backend", lambda *arguments: "varlen")
    monkeypatch.setattr(SegmentMask, "prepare", lambda self: self.segments and None)
    counted = CompileCounterWithBackend("aot_eager")

    def called(block: nn.Module, *arguments: object) -> Tensor:
        actual: Tensor = block(*arguments)
        return actual

    traced = torch.compile(called, backend=counted, fullgraph=True, dynamic=False)
    torch.manual_seed(0)
    block = DecoderBlock(BlockConfig(width=32, heads=2, ffn_width=64, activation="gelu")).to(DEVICE).train()
    x, source, upstream = drawn(24, 32), drawn(30, 32), drawn(32, 24).T
    for lengths in ([5, 9, 3], [1] * 7, [17]):
        queries, keys = static_layout(lengths, 24, 8), static_layout([n + 1 for n in lengths], 30, 8)
        layouts = StaticQK(queries, queries, Causal()), StaticQK(queries, keys)
        actual = []
        for call in (called, traced):
            leaves = [x.clone().requires_grad_(), source.clone().requires_grad_()]
            out = call(block, leaves[0], *layouts, leaves[1], queries.is_token)
            actual.append([out.detach(), *torch.autograd.grad(out, [*leaves, *block.parameters()], upstream)])
        close(actual[1], actual[0], torch.float32)
    assert counted.frame_count == 1


@pytest.mark.parametrize("norm_first", [True, False])
def test_blocks_with_fused_residual_norms_are_traced_once(norm_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including the first; values and gradients equal those of uncompiled blocks, with dropout."""
    from torch._dynamo.testing import CompileCounterWithBackend

    monkeypatch.setattr(kernels, "supports", lambda x: True)
    monkeypatch.setattr(backends, "_select_backend", lambda *arguments: "fused")
    counted = CompileCounterWithBackend("aot_eager")

    def called(block: nn.Module, *arguments: object) -> fused.ResidualStream:
        actual: fused.ResidualStream = block(*arguments)
        return actual

    traced = torch.compile(called, backend=counted, fullgraph=True, dynamic=False)
    torch.manual_seed(0)
    settings = BlockConfig(width=32, heads=2, ffn_width=64, dropout=0.1, norm_first=norm_first)
    stack = BlockStack.of(settings, EncoderBlock, 3).to(DEVICE).train()
    fuse(stack)
    queries = static_layout([5, 9, 3], 24, 8)
    x, upstream, layout = drawn(24, 32).requires_grad_(), drawn(24, 32), StaticQK(queries, queries)
    actual = []
    for call in (called, traced):
        torch.manual_seed(5)
        stream: fused.ResidualStream = start_pending(1 * x, stack[0]) if norm_first else 1 * x
        for block in stack:
            stream = call(block, stream, layout, queries.is_token)
        out = (
            add_and_norm(stack[0].self_attn_residual.norm, stream)[1] if isinstance(stream, PendingResidual) else stream
        )
        assert isinstance(stream, PendingResidual) == norm_first
        actual.append([out.detach(), *torch.autograd.grad(out, [x, *stack[1].parameters()], upstream)])
    close(actual[1], actual[0], torch.float32)
    assert counted.frame_count == 1


def test_varlen_attention_reads_views_of_one_projection() -> None:
    """Queries, keys and values are strided views, which are not copied."""
    torch.manual_seed(0)
    layout = StaticQK(*[static_layout([9, 20, 3], 32, 4)] * 2, Causal())
    upstream = drawn(32, 2, 16)
    actual = []
    for name in ("plain", "varlen"):
        torch.manual_seed(1)
        whole = drawn(32, 3, 2, 16).requires_grad_()
        with use_backend(name):
            out = attend(*whole.unbind(1), layout)
        actual.append([out.detach(), *torch.autograd.grad(out, whole, upstream)])
    close(actual[1], actual[0], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("beams", "length", "group"), [(1, 5, 1), (4, 150, 1), (12, 70, 1), (1, 70, 4), (3, 9, 6)])
def test_decode_attention(beams: int, length: int, group: int, shared: bool, dtype: torch.dtype) -> None:
    """Beams have different masks over the cached keys, or share one (cross-attention); one may attend to nothing.

    A head of keys serves a group of query heads.
    """
    from regard.kernels.decode_attention import decode_attention

    torch.manual_seed(0)
    q, k, v = (drawn(3, heads, n, 24, dtype=dtype) for heads, n in ((2 * group, beams), (2, length), (2, length)))
    table = torch.rand(3, 1, 1 if shared else beams, length, device=DEVICE) < 0.4
    table[0, 0, 0] = False
    expected = plain(q, *(repeat_heads(x, 2 * group) for x in (k, v)), MaskTable(table), ScaledDot())
    bias = torch.zeros(table.shape, dtype=dtype, device=DEVICE).masked_fill(~table, -torch.inf)
    close(decode_attention(q, k, v, bias, 24**-0.5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("size", [9001, 4096, 1000])
def test_cross_entropy_and_its_gradient(size: int, biased: bool, smoothing: float, dtype: torch.dtype) -> None:
    """More logits than a tile holds, equally many, and fewer; and masked tokens."""
    from regard.kernels.cross_entropy import cross_entropy_with_grad

    torch.manual_seed(0)
    x, table = drawn(7, 16, dtype=dtype), drawn(size, 16, dtype=dtype)
    bias = drawn(size) if biased else None
    labels = torch.randint(0, size, (7,), device=DEVICE)
    loss_mask = torch.tensor([True, False, True, True, False, True, True], device=DEVICE)
    logits = (x @ table.T).float().requires_grad_()
    loss = cross_entropy(logits if bias is None else logits + bias, labels, loss_mask, smoothing)
    loss.backward()
    actual, grad = cross_entropy_with_grad(x, table, bias, labels, loss_mask, smoothing, True)
    close(actual.sum(), loss.detach(), torch.float32)
    assert not actual[~loss_mask].any()
    torch.testing.assert_close(grad.float(), logits.grad, atol=1e-6, rtol=1e-4 if dtype == torch.float32 else 1e-2)
    alone, same = cross_entropy_with_grad(x, table, bias, labels, loss_mask, smoothing, False)
    close(alone, actual, torch.float32)
    close(same.float(), logits.detach(), dtype)


@pytest.mark.parametrize("used", [0, 1])
def test_add_norm_with_one_used_output(used: int) -> None:
    torch.manual_seed(0)
    norm, upstream = nn.LayerNorm(16).to(DEVICE), drawn(7, 16)
    leaves = [drawn(7, 16).requires_grad_() for _ in range(2)]
    total = leaves[0] + leaves[1]
    actual = add_and_norm(LayerNorm(16).to(DEVICE), PendingResidual(*leaves, None))
    grads = [torch.autograd.grad(out[used], leaves, upstream) for out in (actual, (total, norm(total)))]
    close(grads[0], grads[1], torch.float32)


def test_the_backward_pass_allocates_no_zeros() -> None:
    """Saved statistics (logsumexp, mean, inverse deviation) have no gradients."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from regard.kernels.varlen_attention import varlen_attention

    class RecordOperations(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), named: Any = None) -> Any:
            operations.append(str(operation))
            return operation(*inputs, **(named or {}))

    operations: list[str] = []
    sparse = StaticQK(*[static_layout([9, 20, 3], 32, 4)] * 2, Causal()).allowed.sparse
    assert isinstance(sparse, SegmentMask)
    x = drawn(32, 32).requires_grad_()
    means, _ = varlen_attention(*[x.view(32, 2, 16)] * 3, *sparse.segments, True, 0.25)
    last = add_and_norm(LayerNorm(32).to(DEVICE), PendingResidual(x, means.flatten(1), None))[1]
    with RecordOperations():
        last.backward(torch.ones_like(last))
    assert {"regard.add_norm_backward.default", "regard.varlen_attention_backward.default"} <= {*operations}
    assert not [name for name in operations if "zero" in name or "fill" in name]


def add_norm_cases() -> Iterator[Any]:
    """Yield all combinations; every day, the half of them that has every pair of values."""
    norms, sizes = [("layer", True), ("layer", False), ("rms", True)], [(37, 48), (7, 600), (5, 1500)]
    for places in itertools.product(range(3), range(3), range(2), range(2), range(2)):
        norm, size, rate, low, dtype = places
        values = (*norms[norm], *sizes[size], (0.0, 0.3)[rate], bool(low), DTYPES[dtype])
        yield pytest.param(*values, marks=pytest.mark.slow if sum(places) % 2 else ())


@pytest.mark.parametrize(("kind", "biased", "rows", "width", "rate", "low", "dtype"), add_norm_cases())
def test_add_norm(
    kind: Literal["layer", "rms"],
    biased: bool,
    rows: int,
    width: int,
    rate: float,
    low: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The residual stream is in float32 or in the dtype of the matmuls; values and gradients."""
    for which, stages in (
        ("DEFAULT_LAUNCH", 1),
        ("MEDIUM_LAUNCH", 3),
    ):  # so that a program processes several rows, and the last one fewer
        monkeypatch.setattr(f"regard.kernels.add_norm.{which}", (8 if rows > 8 else 2, stages))
    torch.manual_seed(0)
    norm = BlockConfig(width=width, heads=1, ffn_width=1, norm=kind).make_norm().to(DEVICE)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    stream = dtype if low else torch.float32
    x, added, bias = (3 + drawn(rows, width)).to(stream), drawn(rows, width, dtype=dtype), drawn(width, dtype=dtype)
    upstream = [drawn(rows, width, dtype=stream), drawn(rows, width, dtype=dtype)]
    actual = []
    for ours in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, added, *[bias] * biased)]
        torch.manual_seed(1)
        if ours:
            with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
                total, out = add_and_norm(norm, PendingResidual(*leaves[:2], leaves[2] if biased else None, rate))
        else:
            kept = hash_mask(x.shape, rate, new_seeds(x.device)) if rate else torch.ones_like(x)
            more = leaves[1].float() + (leaves[2].float() if biased else 0.0)
            total = (leaves[0] + more * kept / (1 - rate)).to(stream)
            out = norm(total.float()).to(dtype)
        assert out.dtype == dtype and total.dtype == stream
        grads = torch.autograd.grad([total, out], [*leaves, *norm.parameters()], upstream)
        assert grads[1].dtype == dtype
        actual.append([total.detach(), out.detach().float(), *(grad.float() for grad in grads)])
    close(actual[0][0], actual[1][0], stream)
    for one, other in zip(actual[0][1:], actual[1][1:], strict=True):
        close(one / other.abs().max(), other / other.abs().max(), dtype)


@pytest.mark.parametrize("tokens", [7, 128], ids=["one sum", "partial sums"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_relu_equals_a_linear_layer_and_a_relu(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    inputs = [drawn(tokens, 16).to(dtype), drawn(24, 16).to(dtype), drawn(24).to(dtype)]
    upstream = drawn(tokens, 24).to(dtype)
    actual = []
    for call in (linear_relu, lambda *given: F.relu(F.linear(*given))):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = call(*leaves)
        actual.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    close(actual[0], actual[1], dtype)


def test_the_residual_stream_has_the_dtype_of_matmuls_in_training_only() -> None:
    stack = BlockStack.of(BlockConfig(width=32, heads=2, ffn_width=64), EncoderBlock, 1).to(DEVICE)
    fuse(stack)
    assert type(stack[0]) is FusedEncoderBlock
    for low, training in ((True, True), (True, False), (False, True)):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=low):
            pending = start_pending(drawn(5, 32), stack[0].train(training))
        assert pending.added.dtype == (torch.bfloat16 if low else torch.float32)
        assert pending.x.dtype == (pending.added.dtype if training else torch.float32)


@pytest.mark.parametrize("kind", ["transformer", "gpt", "bert", "post-norm", "squeeze"])
def test_a_model_with_fused_residual_norms(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients and decoding steps equal those of plain blocks."""
    from regard.kernels import add_norm

    torch.manual_seed(0)
    small = {"width": 32, "heads": 2, "ffn_width": 64, "dropout": 0.0}
    if kind == "gpt":
        settings: Any = GPTSettings.model_validate({**small, "size": "nano", "layers": 2})
    elif kind == "bert":
        settings = BertSettings.model_validate({**small, "size": "tiny", "layers": 2, "norm_first": True})
    else:
        deep = {"size": "tiny", "encoder_layers": 2, "decoder_layers": 2, "norm_first": kind != "post-norm"}
        deep["se_dim"] = 8 if kind == "squeeze" else 0
        settings = TransformerSettings.model_validate({**small, **deep})
    model = models.build(settings, 20, 20, True).to(DEVICE).train()
    with torch.no_grad():  # biases of zero would hide a missing one
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    sources = [[5, 6, 2], [7, 8, 9, 10, 2]]
    batch = SeqBatch.from_lists(sources, sources, bos=1, source_size=10, target_size=9).to(DEVICE)
    if kind == "bert":
        batch = SeqBatch(batch.source, batch.source, batch.source.ids, batch.source.layout.is_token)
    actual, used = [], []
    added_norm = add_norm.add_norm
    monkeypatch.setattr(add_norm, "add_norm", lambda *inputs: (used.append(True), added_norm(*inputs))[1])
    monkeypatch.setattr(fused.kernels, "supports", lambda x: True)
    monkeypatch.setattr(backends, "_select_backend", lambda *arguments: "plain")
    names = list(model.state_dict())
    for ours in (False, True):
        if ours:
            fuse(model)
        used.clear()
        loss = model.train()(batch)
        grads = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        actual.append([loss.detach(), *(grad for grad in grads if grad is not None)])
        if kind != "bert":
            with torch.no_grad():
                first, state = model.eval().step(
                    model.start(batch.source), torch.ones_like(batch.source.layout.length)[:, None]
                )
                second, _ = model.step(state, first.argmax(-1))
            actual[-1] += [first, second]
        assert bool(used) == ours
    close(actual[1], actual[0], torch.float32)
    assert list(model.state_dict()) == names
    used.clear()
    with torch.no_grad(), Recorder(model) as seen:  # what is recorded is the plain definition
        recorded = model.train()(batch)
    assert not used and torch.equal(recorded, actual[0][0])
    assert any(name.endswith("self_attn_residual.stream") for name in seen.values)


@pytest.mark.parametrize("kind", ["transformer", "gpt"])
def test_fused_blocks_of_a_sharded_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients equal those of plain blocks, though a block's weights are gone when the next one is computed."""
    torch.manual_seed(0)
    small = {"width": 32, "heads": 2, "ffn_width": 64, "dropout": 0.0}
    depth = {"size": "nano", "layers": 2} if kind == "gpt" else {"size": "tiny", "encoder_layers": 2}
    family = {"gpt": GPTSettings, "transformer": TransformerSettings}[kind]
    model = models.build(family.model_validate({**small, **depth}), 20, 20, True).to(DEVICE).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    sources = [[5, 6, 2], [7, 8, 9, 10, 2]]
    batch = SeqBatch.from_lists(sources, sources, bos=1, source_size=10, target_size=9).to(DEVICE)
    monkeypatch.setattr(backends, "_select_backend", lambda *arguments: "plain")
    model(batch).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(fused.kernels, "supports", lambda x: True)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        fuse(model, sharded=True)
        parallel.shard(model, TrainingSettings(precision="fp32"), torch.device(DEVICE))
        model(batch).backward()
        actual = {name: sharding.whole(parameter.grad) for name, parameter in model.named_parameters()}
    finally:
        torch.distributed.destroy_process_group()
    close(actual, expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "count"), [(9001, 5), (4096, 13), (700, 1), (130, 3)])
def test_topk_and_logsumexp(size: int, count: int, dtype: torch.dtype) -> None:
    """The largest logits, as in a stable sort; ties, frequent in half precision, go to the first."""
    from regard.kernels.topk import logsumexp, topk

    torch.manual_seed(0)
    logits = 4 * drawn(2, 3, size, dtype=dtype)
    logits[0, 0, 17:] = -torch.inf  # there may be fewer finite logits than requested
    logits[0, 1] = -torch.inf
    logits[1, 1] = 2.5  # all are equal
    torch.testing.assert_close(logsumexp(logits), logits.float().logsumexp(-1), atol=1e-5, rtol=1e-5)
    best, where = topk(logits, count)
    order = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(best, order.values[..., :count])
    assert torch.equal(where, order.indices[..., :count])
    broken = torch.full((1, size), torch.nan, dtype=dtype, device=DEVICE)
    assert ((topk(broken, count)[1] >= 0) & (topk(broken, count)[1] < size)).all()


@pytest.mark.slow
def test_kernels_compile_without_a_gpu() -> None:
    """The interpreter accepts code that the compiler rejects."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compiled_elsewhere.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ["_forward", "_backward_queries", "_backward_keys", "_decode_attention_kernel", "_cross_entropy_kernel"]
    names += ["_add_norm_kernel", "_add_norm_backward_kernel", "_logsumexp_kernel"]
    names += ["_group_maxima_kernel", "_select_kernel"]
    assert all(f"'{name}'" in done.stdout for name in names)
