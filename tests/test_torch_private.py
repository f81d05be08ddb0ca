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
    """The expression as it is written, if it is names joined by dots."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private(source: str) -> list[str]:
    """What a file uses of PyTorch that begins with an underscore."""
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


def test_they_are_in_one_module() -> None:
    found = private("torch._foreach_add_(a, b); torch.ops.mkldnn._linear(x); w._version; torch.__version__")
    assert sorted(found) == ["torch._foreach_add_", "torch.ops.mkldnn._linear", "w._version"]
    used = {str(file.relative_to(SOURCES)): private(file.read_text()) for file in SOURCES.rglob("*.py")}
    assert {file for file, names in used.items() if names} == {"torch_private.py"}


CASES: dict[str, tuple[str, Callable[[list[Tensor], list[Tensor]], object]]] = {
    "copy": ("_foreach_copy_", torch_private.foreach_copy_),
    "lerp": ("_foreach_lerp_", lambda x, y: torch_private.foreach_lerp_(x, y, 0.25)),
    "mul": ("_foreach_mul_", lambda x, y: torch_private.foreach_mul_(x, torch.tensor(0.5))),
    "add": ("_foreach_add_", torch_private.foreach_add_),
    "log_softmax": ("_log_softmax", lambda x, y: torch_private.log_softmax_(x[0])),
}


@pytest.mark.parametrize("name", CASES)
def test_each_is_its_fallback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, call = CASES[name]
    torch.manual_seed(0)
    before, other = [torch.randn(3, 4), torch.randn(5)], [torch.randn(3, 4), torch.randn(5)]
    found = []
    for _ in range(2):
        given = [x.clone() for x in before]
        call(given, other)
        found.append(given)
        monkeypatch.delattr(torch, hidden, raising=False)
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0][0], before[0])


def test_a_prepacked_linear_layer_is_a_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    with torch.no_grad():
        packed = torch_private.prepacked_linear(x, torch_private.prepack(weight), bias)
        monkeypatch.setattr(torch_private, "can_prepack", lambda: False)
        plain = torch_private.prepacked_linear(x, torch_private.prepack(weight), bias)
    torch.testing.assert_close(packed, plain)


def test_what_is_not_known_is_the_slower_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(2)
    before = torch_private.version(weight)
    weight += 1
    assert before is not None and torch_private.version(weight) != before
    monkeypatch.delattr(torch.cpu, "_is_vnni_supported", raising=False)
    assert torch_private.has_vnni() is False
