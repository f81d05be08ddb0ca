"""Named places where a run can be read or changed.

A module says `x = tap(self, "stream", x)` where something is worth seeing. With nobody listening that costs one look at
an empty tuple. A listener is called with the module, the kind and the value, and may return another value to put in its
place. Values that cost work (attention weights beside a fused kernel) are offered lazily, and computed only if a
listener wants them.
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
    """Something worth seeing that costs work: called for its value, or given another one."""

    def __call__(self) -> Tensor: ...

    def replaced(self, value: Tensor) -> LazyValue: ...


@dataclass(frozen=True)
class Deferred:
    """The plainest lazy value: what `work` gives."""

    compute: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        return self.compute()

    def replaced(self, value: Tensor) -> Deferred:
        return Deferred(lambda: value)


Value = Tensor | LazyValue
Listener = Callable[[nn.Module, str, Value], Tensor | None]

# One set of listeners a thread or task: requests served side by side do not hear each other.
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("regard_listeners", default=())


def has_listeners() -> bool:
    """Whether anyone listens at the taps. Nobody does inside a compiled run: what is recorded is a plain one."""
    return not torch.compiler.is_compiling() and bool(_listeners.get())


def offer(module: nn.Module, kind: str, value: Value) -> Tensor | None:
    """Show a value to every listener; the last replacement given, or None."""
    replacement: Tensor | None = None
    for listener in _listeners.get():
        answer = listener(module, kind, value)
        if answer is not None:
            replacement = answer
            value = answer if isinstance(value, Tensor) else value.replaced(answer)
    return replacement


def tap(module: nn.Module, kind: str, value: Tensor) -> Tensor:
    """`value`, or what a listener put in its place."""
    if not has_listeners():
        return value
    replacement = offer(module, kind, value)
    return value if replacement is None else replacement


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Listen at every tap while the context lasts."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)
