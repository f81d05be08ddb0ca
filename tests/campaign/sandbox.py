"""Run commands of regard in forked processes, each of which starts in milliseconds.

The forking process must not have computed anything: threads of PyTorch and of the tokenizers do not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

MAX_SECONDS = 5.0  # CPU time in which a hostile file must be refused
MAX_BYTES = 1 << 30  # peak memory of a refusal
TIMEOUT = 60.0  # seconds of wall-clock time, also on a busy machine


@dataclass(frozen=True)
class Outcome:
    """Exit status, output and cost of a process."""

    status: int  # or minus the signal that ended it
    out: str
    err: str
    seconds: float  # CPU time
    bytes: int  # peak memory
    hung: bool

    def fault(self, statuses: Sequence[int] = (0, 2)) -> str:
        """Return what is wrong in one line; an empty string if nothing is."""
        if self.hung:
            return "hangs"
        if "a bug in regard" in self.err or "Traceback" in self.err:
            return self.err.strip().splitlines()[-1][:300]
        if self.status not in statuses:
            return f"exit status {self.status}: {self.err[-200:]!r}"
        if self.status == 2 and len([line for line in self.err.splitlines() if line.startswith("regard: ")]) < 1:
            return f"status 2 without a line that says why: {self.err[-200:]!r}"
        if "\x1b" in self.err:
            return "an escape sequence reached standard error"
        return ""

    def cost(self) -> str:
        """Return what a refusal took too much of; an empty string if nothing. Accepted input may take any time."""
        if self.status == 0:
            return ""
        if self.seconds > MAX_SECONDS:
            return f"took {self.seconds:.1f} s"
        return f"took {self.bytes >> 20} MB" if self.bytes > MAX_BYTES else ""


def prepare() -> None:
    """Import what every child needs, without computing anything."""
    import torch

    import regard.api
    import regard.cli.app
    import regard.interop
    import regard.training.setup

    torch.set_num_threads(1)
    for name in regard.cli.app.VERBS:
        regard.cli.app.verb(name)


def call(function: Callable[[], int], scratch: Path, stdin: bytes = b"", seconds: float = TIMEOUT) -> Outcome:
    """Run a function, which returns the exit status, in a forked child whose working directory is `scratch`."""
    scratch.mkdir(parents=True, exist_ok=True)
    names = [scratch / f".{os.getpid()}.{stream}" for stream in ("in", "out", "err")]
    names[0].write_bytes(stdin)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become(function, names, scratch)
    deadline, hung = time.monotonic() + seconds, False
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if not hung and time.monotonic() > deadline:
            hung = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    out, err = (name.read_bytes().decode(errors="replace") for name in names[1:])
    for name in names:
        name.unlink()
    computing = used.ru_utime + used.ru_stime
    return Outcome(os.waitstatus_to_exitcode(status), out, err, computing, used.ru_maxrss << 10, hung)


def _become(function: Callable[[], int], names: Sequence[Path], scratch: Path) -> None:
    """Run the function in the child and exit."""
    status = 1
    try:
        os.chdir(scratch)  # relative paths in random command lines stay there
        for number, (name, mode) in enumerate(
            zip(names, (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT), strict=True)
        ):
            os.dup2(os.open(name, mode), number)
        sys.stdin, sys.stdout, sys.stderr = (
            open(0, closefd=False),  # noqa: SIM115
            open(1, "w", closefd=False, encoding="utf-8"),  # noqa: SIM115
            open(2, "w", closefd=False, encoding="utf-8", errors="backslashreplace"),  # noqa: SIM115
        )
        status = function()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def regard(words: Sequence[object], scratch: Path, stdin: bytes = b"", seconds: float = TIMEOUT) -> Outcome:
    """Run a command line of regard."""
    from regard.cli import run

    return call(partial(run, [str(word) for word in words], False), scratch, stdin, seconds)


@dataclass
class Tally:
    """Trials and failures of a part of the campaign."""

    part: str
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, kind: str, failure: str = "") -> None:
        """Count a trial."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if failure:
            self.failures.append(f"{self.part}: {kind}: {failure}")

    @property
    def trials(self) -> int:
        return sum(self.counts.values())


class Clock:
    """Ends a part after a number of trials or seconds."""

    def __init__(self, count: int | None, seconds: float | None) -> None:
        self.count, self.end = count, None if seconds is None else time.monotonic() + seconds

    def numbers(self) -> Iterator[int]:
        number = 0
        while (self.count is None or number < self.count) and (self.end is None or time.monotonic() < self.end):
            yield number
            number += 1
