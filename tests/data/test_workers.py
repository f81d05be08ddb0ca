"""A function applied by several processes: results in order, errors and deaths reported."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regard.data.workers import ITEMS_AHEAD, MAX_INLINE_ITEMS, map_in_order
from regard.errors import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


def test_results_come_in_order_whichever_is_ready_first() -> None:
    def slow_at_first(n: int) -> tuple[int, int]:
        time.sleep(0.05 if n % 4 == 0 else 0.0)
        return n, os.getpid()

    found = list(map_in_order(slow_at_first, range(40), workers=3))
    assert [n for n, _ in found] == list(range(40))
    assert {pid for _, pid in found[:MAX_INLINE_ITEMS]} == {os.getpid()}
    assert os.getpid() not in {pid for _, pid in found[MAX_INLINE_ITEMS:]}


def test_a_few_items_start_no_processes() -> None:
    assert set(map_in_order(lambda _: os.getpid(), range(MAX_INLINE_ITEMS), workers=3)) == {os.getpid()}


def test_garbage_is_collected_between_items_only() -> None:
    collecting = list(map_in_order(lambda _: gc.isenabled(), range(40), workers=2))
    assert not any(collecting) and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda n: 1 // n, range(2)))
    assert gc.isenabled()


def test_items_are_read_only_a_little_ahead() -> None:
    read = 0

    def items() -> Iterator[int]:
        nonlocal read
        for n in range(1000):
            read = n + 1
            yield n

    results = map_in_order(lambda n: n, items(), workers=2)
    for done, _ in enumerate(results, 1):
        assert read <= done + ITEMS_AHEAD * 2 + 1
        if done == 50:
            break
    results.close()  # type: ignore[attr-defined]


def test_an_error_of_a_worker_is_raised_here() -> None:
    def refuse(n: int) -> int:
        if n == 9:
            raise UserError("item 9 is bad")
        return n

    with pytest.raises(UserError, match="item 9 is bad"):
        list(map_in_order(refuse, range(40), workers=2))


def test_a_killed_worker_is_an_error_of_one_line() -> None:
    def die(n: int) -> int:
        if n == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    with pytest.raises(UserError, match="was killed"):
        list(map_in_order(die, range(40), workers=2))


PARENT = """
import fcntl, sys, time
from regard.data.workers import map_in_order
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
for n in map_in_order(lambda n: n, range(40), workers=2):
    if n == 20:
        print("workers are there", flush=True)
        time.sleep(60)
"""


def test_workers_of_a_killed_process_end_and_free_its_locks(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline()
        parent.kill()
    deadline = time.monotonic() + 120
    with open(path) as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < deadline, "workers hold the lock"
                time.sleep(0.1)
