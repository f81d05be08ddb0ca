"""Signals that end a training run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C, SIGTERM and SIGHUP while the context lasts, so that the loop can finish its step and save.

    A SIGHUP that is ignored, as under nohup, stays ignored. Some platforms have none. A second Ctrl-C ends at once, or
    when the file that is being written is whole; only the steps since the last save are lost.
    """
    caught: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    try:
        before = {number: signal.signal(number, handle) for number in numbers}
    except ValueError:  # only the main thread may set handlers
        before = {}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
