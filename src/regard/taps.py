"""Taps: named points of a forward pass whose values can be recorded or replaced.

A module calls `x = tap(self, "stream", x)`. Without listeners that costs one look at an empty tuple. A listener gets
the module, the kind and the value, and may return a replacement. Expensive values (attention weights beside a fused
kernel) are offered lazily and computed only if a listener reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class LazyValue(Protocol):
    """A value that is computed when it is called, or replaced."""

    def __call__(self) -> Tensor: ...

    def replaced(self, value: Tensor) -> LazyValue: ...


@dataclass(frozen=True)
class Deferred:
    """A lazy value: the result of `compute`."""

    compute: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        return self.compute()

    def replaced(self, value: Tensor) -> Deferred:
        return Deferred(lambda: value)


Value = Tensor | LazyValue
Listener = Callable[[nn.Module, str, Value], Tensor | None]

# Listeners are per thread or task: concurrent requests do not see each other's values.
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("regard_listeners", default=())


def has_listeners() -> bool:
    """Return whether there are listeners. Compiled code has none: recording runs the model uncompiled."""
    return not torch.compiler.is_compiling() and bool(_listeners.get())


def offer(module: nn.Module, kind: str, value: Value) -> Tensor | None:
    """Offer a value to every listener; return the last replacement, or None."""
    replacement: Tensor | None = None
    for listener in _listeners.get():
        answer = listener(module, kind, value)
        if answer is not None:
            replacement = answer
            value = answer if isinstance(value, Tensor) else value.replaced(answer)
    return replacement


def tap(module: nn.Module, kind: str, value: Tensor) -> Tensor:
    """Return `value`, or its replacement by a listener."""
    if not has_listeners():
        return value
    replacement = offer(module, kind, value)
    return value if replacement is None else replacement


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Add a listener to all taps while the context lasts."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)
