"""Output that survives an interruption: FILE.part while it is written, FILE when it is complete.

FILE.part.json, next to it, records how much is complete and the settings and input that produced it, so that `--resume`
continues exactly there, or refuses.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from regard.errors import Interrupted, UserError
from regard.files import errno_text, write_text


class Signals:
    """Raises `Interrupted` on Ctrl-C, SIGTERM and SIGHUP; `deferred` delays that to the end of a block."""

    def __init__(self) -> None:
        self._deferring = False
        self._pending: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals in this block, except those that the process ignores or handles otherwise."""
        before: dict[int, Any] = {}
        with suppress(ValueError):  # only the main thread may install handlers
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    before[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._pending is not None:
            self._handle(self._pending, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._deferring:
            raise Interrupted("stopped", 128 + number)
        self._pending = number


class PartialOutput:
    """The output for the input lines processed so far."""

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool, signals: Signals) -> None:
        self._signals = signals
        self.path = path.resolve()
        self.part = self.path.with_name(self.path.name + ".part")
        self.state_file = self.path.with_name(self.path.name + ".part.json")
        self.settings = json.loads(json.dumps(settings))  # as they are read back from the file
        self.lines = 0  # lines of input processed
        self.bytes = 0  # bytes of output written
        self._input = hashlib.blake2b(digest_size=16)
        self._expected: str | None = None
        if resume and self.part.exists():
            self._read_state()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.fdopen(os.open(self.part, flags, 0o666), "r+b")
        self._lock()
        if not self.lines:
            self.state_file.unlink(missing_ok=True)
        if os.fstat(self._file.fileno()).st_size < self.bytes:
            raise UserError(f"{self.part} is shorter than when it was written: start again without --resume")
        self._file.truncate(self.bytes)
        self._file.seek(self.bytes)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(f"{self.part}: another process is writing it; wait for it, or stop it") from None
        except OSError:
            pass  # a file system without locks

    def _read_state(self) -> None:
        try:
            state = json.loads(self.state_file.read_text(encoding="utf-8"))
            before, self.lines, self.bytes = dict(state["settings"]), int(state["lines"]), int(state["bytes"])
            self._expected = str(state["input"])
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(f"{self.state_file} cannot be read: start again without --resume") from None
        for name in {**before, **self.settings}:
            old, new = before.get(name), self.settings.get(name)
            if old != new:
                raise UserError(
                    f"{self.part} was written with other settings ({name} was {old} and is now {new}): "
                    "use the same settings, or start again without --resume"
                )

    def skip(self, lines: Iterable[str]) -> None:
        """Check that these lines of input, `self.lines` of them, are those already processed."""
        count = self._hash(lines)
        if count != self.lines or self._input.hexdigest() != self._expected:
            raise UserError(
                f"{self.part} was written from other input (its first {self.lines:,} lines differ): "
                "use the same input, or start again without --resume"
            )

    def write(self, lines: Iterable[str], output: Iterable[str]) -> None:
        """Append the output for these lines of input; from then on an interruption does not lose it."""
        text = "".join(line + "\n" for line in output).encode()
        with self._signals.deferred():  # a signal between the two files would leave an output that cannot be resumed
            self._file.write(text)
            self._file.flush()
            os.fsync(self._file.fileno())
            done = {"lines": self.lines + self._hash(lines), "bytes": self.bytes + len(text)}
            state = {"settings": self.settings, **done, "input": self._input.hexdigest()}
            write_text(self.state_file, json.dumps(state, indent=1, ensure_ascii=False) + "\n")
            self.lines, self.bytes = done["lines"], done["bytes"]

    def _hash(self, lines: Iterable[str]) -> int:
        """Add the lines to the hash of the input; return their number."""
        count = 0
        for count, line in enumerate(lines, 1):  # noqa: B007
            self._input.update(line.encode("utf-8", "surrogatepass") + b"\n")
        return count

    def finish(self) -> None:
        """Rename FILE.part, which is complete, to FILE."""
        os.fsync(self._file.fileno())
        os.replace(self.part, self.path)
        self.state_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, and remove it if it holds no output."""
        with suppress(OSError):
            self._file.close()
            if not self.lines:
                self.part.unlink(missing_ok=True)

    @property
    def hint(self) -> str:
        """A sentence on how to continue; empty if there is no output to continue from."""
        if not self.lines:
            return ""
        return f"; {self.part} has the output of {self.lines:,} lines: the same command with --resume continues it"


@contextmanager
def partial_output(path: Path, settings: Mapping[str, Any], resume: bool) -> Iterator[PartialOutput]:
    """Write to FILE.part, and rename it to FILE when the block ends without error.

    Otherwise FILE.part stays, unless it is empty, and the error message says how to continue.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it")
    part, signals = None, Signals()
    with signals.installed():
        try:
            part = PartialOutput(path, settings, resume, signals)
            yield part
            part.finish()
        except OSError as error:
            raise UserError(f"{path} could not be written: {errno_text(error)}{part.hint if part else ''}") from error
        except UserError as error:
            raise UserError(f"{error}{part.hint if part else ''}") from error
        except KeyboardInterrupt as stop:
            status = stop.status if isinstance(stop, Interrupted) else 130
            raise Interrupted(f"stopped{part.hint if part else ''}", status) from None
        finally:
            if part is not None:
                part.close()
