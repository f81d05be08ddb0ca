"""All private PyTorch functions that the package uses, each with a fallback made of public ones.

They are used because no public function is as fast: operations on many tensors in one kernel, weights packed once for
oneDNN, an in-place log-softmax, a matmul that ends with a ReLU; or because there is no public one at all: tensors
without data, and the operators that run (`regard.planning`; `can_trace` says whether they work).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

Tensors = list[Tensor] | tuple[Tensor, ...]
OperatorWatcher = Callable[[Any, Any, Any], None]  # called with the operator, its arguments and its result


def foreach_copy_(into: Tensors, sources: Tensors) -> None:
    """Copy each tensor into its counterpart."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(into, sources)
        return
    for target, new in zip(into, sources, strict=True):
        target.copy_(new)


def foreach_lerp_(into: Tensors, ends: Tensors, weight: float) -> None:
    """Interpolate each tensor in place towards its counterpart."""
    if hasattr(torch, "_foreach_lerp_"):
        torch._foreach_lerp_(into, ends, weight)
        return
    for target, end in zip(into, ends, strict=True):
        target.lerp_(end, weight)


def foreach_mul_(into: Tensors, factor: Tensor | float) -> None:
    """Multiply every tensor by one factor in place."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(into, factor)
        return
    for target in into:
        target.mul_(factor)


def foreach_add_(into: Tensors, more: Tensors) -> None:
    """Add to each tensor its counterpart in place."""
    if hasattr(torch, "_foreach_add_"):
        torch._foreach_add_(into, more)
        return
    for target, added in zip(into, more, strict=True):
        target.add_(added)


def optimizer_of_parts(kind: type[Optimizer], part: Callable[[Tensor], Tensor]) -> type[Optimizer]:
    """A kind of Adam that computes with `part(tensor)` in place of each tensor: DTensors cost the host more time."""
    if not hasattr(kind, "_init_group"):
        return kind

    class OfParts(kind):  # type: ignore[valid-type, misc]
        def _init_group(self, group: dict[str, Any], *collected: list[Tensor]) -> bool:
            has_complex: bool = super()._init_group(group, *collected)
            for tensors in collected:
                tensors[:] = map(part, tensors)
            return has_complex

    return OfParts


def log_softmax_(logits: Tensor) -> Tensor:
    """In-place log_softmax over the last axis."""
    if hasattr(torch, "_log_softmax"):
        return torch._log_softmax(logits, -1, False, out=logits)
    return logits.copy_(logits.log_softmax(-1))


def addmm_relu(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """relu(bias + x weight) for x [T, D] and weight [D, F]; on a GPU the ReLU is part of the matmul."""
    if hasattr(torch, "_addmm_activation"):
        return torch._addmm_activation(bias, x, weight)
    return torch.addmm(bias, x, weight).relu_()


def version(tensor: Tensor) -> int | None:
    """The number of in-place changes of a tensor; None if unknown."""
    return getattr(tensor, "_version", None)


def versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The numbers of in-place changes of tensors, where `can_prepack`."""
    return tuple(map(attrgetter("_version"), tensors))


def has_vnni() -> bool:
    """Return whether the processor has VNNI instructions (products of 8-bit integers, summed in 32 bits)."""
    known = getattr(torch.cpu, "_is_vnni_supported", None)
    return False if known is None else bool(known())


@cache
def can_prepack() -> bool:
    """Return whether oneDNN can pack the weights of a linear layer, and changes of weights are counted."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(Tensor, "_version")
    return torch.backends.mkldnn.is_available() and known


@cache
def onednn_linear() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Operators for weights from `prepack`: (x, weight, bias, function, [], "") -> function(W x + b), and
    (x, added, weight, bias, "add") -> W x + b + added.

    Looking them up costs more at every call than a small operator.
    """
    operators = torch.ops.mkldnn._linear_pointwise
    return operators.default, operators.binary


def prepack(weight: Tensor) -> Tensor:
    """A weight [O, I] in oneDNN's layout; unchanged if that is not available."""
    return torch.ops.mkldnn._reorder_linear_weight(weight) if can_prepack() else weight


def prepacked_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a weight from `prepack`."""
    if not can_prepack():
        return F.linear(x, packed, bias)
    return onednn_linear()[0](x, packed, bias, "none", [], "")


def can_trace() -> bool:
    """Return whether `fake_tensors` and `watch_operators` work with this version of PyTorch."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        return False
    return callable(FakeTensorMode) and callable(TorchDispatchMode)


def needs_data(error: BaseException) -> str:
    """The operator that cannot run on tensors without data, if that is the error, else ""."""
    from torch._subclasses import fake_tensor

    kinds = fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException
    return str(error.func) if isinstance(error, kinds) else ""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Create tensors with shapes, dtypes and storages, but without data, while the context lasts."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextmanager
def watch_operators(watch: OperatorWatcher) -> Iterator[None]:
    """Call `watch` after every operator that PyTorch runs, also in the backward pass, while the context lasts."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            watch(func, (args, kwargs or {}), out)
            return out

    with Watching():
        yield


def mutated_arguments(func: Any) -> list[int]:
    """The numbers of the positional arguments that an operator writes to."""
    arguments = func._schema.arguments
    return [
        i for i, argument in enumerate(arguments) if argument.alias_info is not None and argument.alias_info.is_write
    ]
