"""A function applied to a stream of items by several processes, in order and with bounded memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from regard.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_INLINE_ITEMS = 4  # items that are done in this process first: a small corpus needs no other
ITEMS_AHEAD = 2  # items per process that are read before their turn

_work: Callable[[Any], Any] | None = None  # the function of a worker process, which inherits it


def usable_cores() -> int:
    """The number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None) -> Iterator[Result]:
    """Yield work(item) for each item, in order; `workers` processes (by default one per core) share the work.

    At most `ITEMS_AHEAD` items per process are in memory. Workers are forked, so that a script that calls this library
    need not guard its main module, and `work` need not be pickled; where there is no fork, this process does all.
    """
    items = iter(items)
    work = partial(_without_gc, work)
    yield from map(work, islice(items, MAX_INLINE_ITEMS))
    count = usable_cores() if workers is None else workers
    item = next(items, None)
    if item is None:
        return
    if count < 2 or sys.platform != "linux" or multiprocessing.current_process().daemon:
        yield work(item)
        yield from map(work, items)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=(work, os.getpid()))
    try:
        yield from _in_order(pool, item, items, ITEMS_AHEAD * count)
    except BrokenProcessPool:
        raise UserError("a process that tokenizes was killed, perhaps because memory ran out: try again") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _without_gc(work: Callable[[Item], Result], item: Item) -> Result:
    """work(item) without garbage collection, which would visit the many lists of tokens again and again.

    None of them is in a cycle, so they are freed all the same.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return work(item)
    finally:
        if enabled:
            gc.enable()


def _in_order(pool: ProcessPoolExecutor, first: Any, items: Iterator[Any], ahead: int) -> Iterator[Any]:
    pending: deque[Future[Any]] = deque([_submit(pool, first)])
    for item in items:
        pending.append(_submit(pool, item))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _submit(pool: ProcessPoolExecutor, item: Any) -> Future[Any]:
    with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads, of which workers use none
        warnings.simplefilter("ignore", DeprecationWarning)
        return pool.submit(_run, item)


def _start_worker(work: Callable[[Any], Any], parent: int) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its workers
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process soon after its parent, which may be killed: a worker would keep the parent's locks."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _run(item: Any) -> Any:
    assert _work is not None
    return _work(item)
