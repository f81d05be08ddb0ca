"""Cancel work from outside: a server stops a search or a trace whose client hung up.

The work calls `check()` between two steps; outside `cancellable` that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_cancelled: ContextVar[Callable[[], bool] | None] = ContextVar("regard_is_cancelled", default=None)


class Cancelled(Exception):
    """Raised by `check` in work that is no longer wanted."""


@contextmanager
def cancellable(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Make `check()` raise `Cancelled` in this thread as soon as `is_cancelled()` is true.

    >>> with cancellable(lambda: True):
    ...     check()
    Traceback (most recent call last):
    ...
    regard.cancel.Cancelled: the client hung up
    """
    token = _is_cancelled.set(is_cancelled)
    try:
        yield
    finally:
        _is_cancelled.reset(token)


def check() -> None:
    """Raise `Cancelled` if this work is no longer wanted."""
    is_cancelled = _is_cancelled.get()
    if is_cancelled is not None and is_cancelled():
        raise Cancelled("the client hung up")
