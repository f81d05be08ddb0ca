"""Private functions of PyTorch: all in one module, each equal to its public fallback."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard import torch_private

SOURCES = Path(regard.__file__).parent
ATTRIBUTES = {"_version"}  # private ones that are not reached through torch


def dotted(node: ast.expr) -> str:
    """Return a dotted name as it is written; else an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private(source: str) -> list[str]:
    """List the private names of PyTorch that a file uses."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            hidden = name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")[1:])
            if (hidden and not name.endswith("__")) or node.attr in ATTRIBUTES:
                found.append(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._"):
            found.append(node.module or "")
    return found


def test_private_functions_are_used_in_one_module_only() -> None:
    found = private("torch._foreach_add_(a, b); torch.ops.mkldnn._linear(x); w._version; torch.__version__")
    assert sorted(found) == ["torch._foreach_add_", "torch.ops.mkldnn._linear", "w._version"]
    used = {str(file.relative_to(SOURCES)): private(file.read_text()) for file in SOURCES.rglob("*.py")}
    assert {file for file, names in used.items() if names} == {"torch_private.py"}


CASES: dict[str, tuple[str, Callable[[list[Tensor], list[Tensor]], object]]] = {
    "copy": ("_foreach_copy_", torch_private.foreach_copy_),
    "lerp": ("_foreach_lerp_", lambda x, y: torch_private.foreach_lerp_(x, y, 0.25)),
    "mul": ("_foreach_mul_", lambda x, y: torch_private.foreach_mul_(x, torch.tensor(0.5))),
    "add": ("_foreach_add_", torch_private.foreach_add_),
    "addmm": ("_addmm_activation", lambda x, y: x[0].copy_(torch_private.addmm_relu(y[0][0], x[0], y[0].T @ y[0]))),
    "log_softmax": ("_log_softmax", lambda x, y: torch_private.log_softmax_(x[0])),
}


@pytest.mark.parametrize("name", CASES)
def test_each_private_function_equals_its_fallback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, call = CASES[name]
    torch.manual_seed(0)
    before, other = [torch.randn(3, 4), torch.randn(5)], [torch.randn(3, 4), torch.randn(5)]
    found = []
    for _ in range(2):
        tensors = [x.clone() for x in before]
        call(tensors, other)
        found.append(tensors)
        monkeypatch.delattr(torch, hidden, raising=False)
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0][0], before[0])


def test_an_optimizer_of_parts_updates_these_alone() -> None:
    kind = torch_private.optimizer_of_parts(torch.optim.AdamW, lambda tensor: tensor[:1] if tensor.dim() else tensor)
    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    for weight, each in zip(weights, (kind, torch.optim.AdamW), strict=True):
        weight.grad = torch.arange(6.0).view(2, 3)
        for _ in range(2):
            each([weight], lr=0.1, fused=True).step()
    assert torch.equal(weights[0][0], weights[1][0]) and not torch.equal(weights[0][0], torch.ones(3))
    assert torch.equal(weights[0][1], torch.ones(3))

    class WithoutGroups(torch.optim.Optimizer):
        """An optimizer whose private method has another name."""

    assert torch_private.optimizer_of_parts(WithoutGroups, torch.clone) is WithoutGroups


def test_a_prepacked_linear_layer_equals_a_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    with torch.no_grad():
        packed = torch_private.prepacked_linear(x, torch_private.prepack(weight), bias)
        monkeypatch.setattr(torch_private, "can_prepack", lambda: False)
        plain = torch_private.prepacked_linear(x, torch_private.prepack(weight), bias)
    torch.testing.assert_close(packed, plain)


def test_without_private_functions_the_slower_path_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(2)
    before = torch_private.version(weight)
    weight += 1
    assert before is not None and torch_private.version(weight) != before
    monkeypatch.delattr(torch.cpu, "_is_vnni_supported", raising=False)
    assert torch_private.has_vnni() is False
