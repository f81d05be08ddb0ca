"""Prefetch batches on a thread while the present one is trained on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Prefetched(Generic[Item]):
    """The items of an iterator in order, of which a thread makes at most `ahead` in advance.

    Items do not depend on how many were made in advance: each share of a `BatchStream` carries the position after it,
    so that a run resumed from the last one taken makes the rest again. An exception of the iterator is raised in place
    of its item. `waited` counts the seconds spent waiting for items.

    >>> with Prefetched(iter(range(5)), ahead=2) as items:
    ...     list(items)
    [0, 1, 2, 3, 4]
    """

    def __init__(self, items: Iterator[Item], ahead: int = 4) -> None:
        if ahead < 1:
            raise ValueError(f"{ahead} items ahead: there must be at least one")
        self.waited = 0.0
        self._items, self._ahead = items, ahead
        self._made: deque[Item] = deque()
        self._error: BaseException | None = None
        self._over = self._closed = False  # over: the iterator has ended
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._make, name="regard-prefetch", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    self._made.append(item)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or len(self._made) < self._ahead)
                    if self._closed:
                        return
        except BaseException as error:  # raised again by `__next__`
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        with self._changed:
            if not self._made and not self._over and not self._closed:
                begin = time.perf_counter()
                self._changed.wait_for(lambda: bool(self._made) or self._over or self._closed)
                self.waited += time.perf_counter() - begin
            if self._made and not self._closed:
                item = self._made.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread, and drop what was made in advance."""
        with self._changed:
            self._closed = True
            self._made.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
