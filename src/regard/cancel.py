"""Cancel work from outside: a server stops a search or a trace whose client disconnected.

The work calls `check()` between two steps; outside `cancellable` that does nothing. Work that waits for another thread
is woken if it was started with a `Cancellation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

_is_cancelled: ContextVar[Callable[[], bool] | None] = ContextVar("regard_is_cancelled", default=None)


class Cancelled(Exception):
    """Raised by `check` in work that is no longer wanted."""


class Cancellation:
    """Whether some work was cancelled, for `cancellable`; `cancel` may be called by any thread."""

    def __init__(self) -> None:
        self.reason: str | None = None  # None: it was not cancelled
        self._wakers: list[Callable[[], None]] = []
        self._lock = Lock()

    def __call__(self) -> bool:
        return self.reason is not None

    def cancel(self, reason: str = "the client disconnected") -> None:
        """Cancel the work, and wake it; the first reason counts."""
        with self._lock:
            self.reason = self.reason or reason
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    @contextmanager
    def wakes(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` when the work is cancelled, at once if it already is, while the context lasts."""
        with self._lock:
            late = self.reason is not None
            if not late:
                self._wakers.append(wake)
        if late:
            wake()
        try:
            yield
        finally:
            with self._lock:
                self._wakers = [other for other in self._wakers if other is not wake]


@contextmanager
def cancellable(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Make `check()` raise `Cancelled` in this thread as soon as `is_cancelled()` is true.

    >>> with cancellable(lambda: True):
    ...     check()
    Traceback (most recent call last):
    ...
    regard.cancel.Cancelled: the client disconnected
    """
    token = _is_cancelled.set(is_cancelled)
    try:
        yield
    finally:
        _is_cancelled.reset(token)


@contextmanager
def woken(wake: Callable[[], None]) -> Iterator[bool]:
    """Call `wake` when the work of this thread is cancelled; the value is False if that has to be polled instead."""
    is_cancelled = _is_cancelled.get()
    if isinstance(is_cancelled, Cancellation):
        with is_cancelled.wakes(wake):
            yield True
    else:
        yield is_cancelled is None


def check() -> None:
    """Raise `Cancelled` if this work is no longer wanted."""
    is_cancelled = _is_cancelled.get()
    if is_cancelled is not None and is_cancelled():
        reason = is_cancelled.reason if isinstance(is_cancelled, Cancellation) else None
        raise Cancelled(reason or "the client disconnected")
