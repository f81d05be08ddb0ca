"""Our kernels for GPUs against their definitions in PyTorch, values and gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Allowed, Causal, Flat, Relative, ScaledDot, Score, attend, kernel, kernels
from regard.attention.allowed import Ranges
from regard.attention.kernels import plain
from regard.blocks import BlockSettings, DecoderBlock
from regard.losses import cross_entropy
from regard.rows import StaticRows

if os.environ.get("CI") != "true":
    pytest.importorskip("triton", reason="kernels for GPUs are written in Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]  # as the interpreter has it


def close(found: object, expected: object, dtype: torch.dtype) -> None:
    exact = dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=2e-5 if exact else 4e-2, rtol=1e-4 if exact else 4e-2)


def rows(lengths: list[int], size: int, most: int) -> StaticRows:
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    ends = F.pad(ends, (0, most - len(lengths)), value=int(ends[-1]))
    return StaticRows(ends, size, max(lengths))


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def by(name: str, call: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """What comes out with this kernel, and the gradients in the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with kernel(name):
        out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[5, 130, 1, 60, 0, 7], [70], [1] * 90, [64, 64, 44]])
def test_sentences_end_to_end(lengths: list[int], causal: bool, dtype: torch.dtype) -> None:
    """Sentences of all lengths, an empty source among them, across tiles and in one, with fill at the end."""
    torch.manual_seed(0)
    own = [max(n, 1) for n in lengths]
    queries = rows(own, sum(own) + 5, 95)
    keys = queries if causal else rows([n * 7 % 50 for n in lengths], 220 if len(lengths) < 50 else 700, 95)
    layout = Flat(queries, keys, Causal() if causal else None)
    q, k, v = (drawn(r.size, 2, 24, dtype=dtype) for r in (queries, keys, keys))
    upstream = drawn(queries.size, 2, 24, dtype=dtype)
    upstream[sum(own) :] = 0  # nothing comes back from the fill
    expected, found = (by(name, lambda *x: attend(*x, layout), [q, k, v], upstream) for name in ("plain", "ragged"))
    real = queries.real
    close(found[0][real], expected[0][real], dtype)
    assert not found[0][~real].any() and all(x.isfinite().all() for x in found)
    close(found[1:], expected[1:], dtype)


@pytest.mark.parametrize(("width", "score"), [(16, ScaledDot()), (12, ScaledDot()), (16, Relative(16, 2))])
def test_sentences_end_to_end_with_other_widths_and_scores(width: int, score: Score) -> None:
    """Relative positions make queries and keys wider than values."""
    torch.manual_seed(0)
    score = score.to(DEVICE)
    layout = Flat(rows([5, 30, 1], 40, 5), rows([5, 30, 1], 40, 5), None)
    inputs = [drawn(40, 2, width) for _ in range(3)]
    upstream = drawn(40, 2, width)
    upstream[36:] = 0
    expected, found = (
        by(name, lambda *x: attend(*x, layout, score=score), inputs, upstream) for name in ("plain", "ragged")
    )
    close(found[0][:36], expected[0][:36], torch.float32)
    close(found[1:], expected[1:], torch.float32)


def test_a_compiler_is_told_the_truth_about_them() -> None:
    """What PyTorch is told of the shapes and gradients of our operations is so."""
    from regard.gpu.few import few
    from regard.gpu.ragged import ragged
    from regard.gpu.relu import linear_relu
    from regard.gpu.slope import sloped

    torch.manual_seed(0)
    sparse = Flat(*[rows([9, 20, 3], 32, 4)] * 2, Causal()).allowed.sparse
    assert isinstance(sparse, Ranges)
    q, k, v = (drawn(32, 2, 16).requires_grad_() for _ in range(3))
    torch.library.opcheck(ragged, (q, k, v, *sparse.places, True, 0.25))
    x, table, labels = drawn(5, 16), drawn(40, 16), torch.arange(5, device=DEVICE)
    torch.library.opcheck(sloped, (x, table, drawn(40), labels, labels > 1, 0.1, True))
    torch.library.opcheck(linear_relu, (x.requires_grad_(), table.requires_grad_(), drawn(40).requires_grad_()))
    torch.library.opcheck(few, (drawn(2, 2, 3, 16), drawn(2, 2, 9, 16), drawn(2, 2, 9, 16), drawn(2, 1, 1, 9), 0.25))


def test_a_compiled_block_is_traced_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sentences are, values and gradients of a block are those of the block that is not compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    monkeypatch.setattr(kernels, "_best", lambda *arguments: "ragged")
    monkeypatch.setattr(Ranges, "prepare", lambda self: self.places and None)
    counted = CompileCounterWithBackend("aot_eager")

    def called(block: nn.Module, *arguments: object) -> Tensor:
        found: Tensor = block(*arguments)
        return found

    traced = torch.compile(called, backend=counted, fullgraph=True, dynamic=False)
    torch.manual_seed(0)
    block = DecoderBlock(BlockSettings(width=32, heads=2, inner=64, activation="gelu")).to(DEVICE).train()
    x, source, upstream = drawn(24, 32), drawn(30, 32), drawn(32, 24).T
    for lengths in ([5, 9, 3], [1] * 7, [17]):
        queries, keys = rows(lengths, 24, 8), rows([n + 1 for n in lengths], 30, 8)
        layouts = Flat(queries, queries, Causal()), Flat(queries, keys)
        found = []
        for call in (called, traced):
            leaves = [x.clone().requires_grad_(), source.clone().requires_grad_()]
            out = call(block, leaves[0], *layouts, leaves[1], queries.real)
            found.append([out.detach(), *torch.autograd.grad(out, [*leaves, *block.parameters()], upstream)])
        close(found[1], found[0], torch.float32)
    assert counted.frame_count == 1


def test_sentences_lie_in_views_of_one_projection() -> None:
    """Queries, keys and values are read where the projection wrote them."""
    torch.manual_seed(0)
    layout = Flat(*[rows([9, 20, 3], 32, 4)] * 2, Causal())
    upstream = drawn(32, 2, 16)
    found = []
    for name in ("plain", "ragged"):
        torch.manual_seed(1)
        whole = drawn(32, 3, 2, 16).requires_grad_()
        with kernel(name):
            out = attend(*whole.unbind(1), layout)
        found.append([out.detach(), *torch.autograd.grad(out, whole, upstream)])
    close(found[1], found[0], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("beams", "length"), [(1, 5), (4, 150), (12, 70)])
def test_a_few_queries(beams: int, length: int, shared: bool, dtype: torch.dtype) -> None:
    """Every beam sees others of the stored keys; or all the same, as of a source; one of them may see nothing."""
    from regard.gpu.few import few

    torch.manual_seed(0)
    q, k, v = (drawn(3, 2, n, 24, dtype=dtype) for n in (beams, length, length))
    table = torch.rand(3, 1, 1 if shared else beams, length, device=DEVICE) < 0.4
    table[0, 0, 0] = False
    expected = plain(q, k, v, Allowed(table), ScaledDot())
    bias = torch.zeros(table.shape, dtype=dtype, device=DEVICE).masked_fill(~table, -torch.inf)
    close(few(q, k, v, bias, 24**-0.5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("size", [9001, 4096, 1000])
def test_losses_and_their_slope(size: int, biased: bool, smoothing: float, dtype: torch.dtype) -> None:
    """More logits than are taken at a time, as many, and fewer; and places that do not count."""
    from regard.gpu.slope import sloped

    torch.manual_seed(0)
    x, table = drawn(7, 16, dtype=dtype), drawn(size, 16, dtype=dtype)
    bias = drawn(size) if biased else None
    labels = torch.randint(0, size, (7,), device=DEVICE)
    counted = torch.tensor([True, False, True, True, False, True, True], device=DEVICE)
    logits = (x @ table.T).float().requires_grad_()
    loss = cross_entropy(logits if bias is None else logits + bias, labels, counted, smoothing)
    loss.backward()
    found, slope = sloped(x, table, bias, labels, counted, smoothing, True)
    close(found.sum(), loss.detach(), torch.float32)
    assert not found[~counted].any()
    torch.testing.assert_close(slope.float(), logits.grad, atol=1e-6, rtol=1e-4 if dtype == torch.float32 else 1e-2)
    alone, same = sloped(x, table, bias, labels, counted, smoothing, False)
    close(alone, found, torch.float32)
    close(same.float(), logits.detach(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_of_a_product(dtype: torch.dtype) -> None:
    from regard.gpu.relu import linear_relu

    torch.manual_seed(0)
    x, weight, bias, upstream = (drawn(*shape, dtype=dtype) for shape in ((9, 16), (24, 16), (24,), (9, 24)))
    found = []
    for call in (linear_relu, lambda *inputs: F.relu(F.linear(*inputs))):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        out = call(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    close(found[0], found[1], dtype)


def test_they_compile_where_there_is_no_gpu() -> None:
    """As an interpreter is more patient than a compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compiled_elsewhere.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("_forward", "_backward_queries", "_backward_keys", "_few", "_slope"))
