"""Output that is kept when it is interrupted: FILE.part while it is written, FILE when it is complete.

Beside it, FILE.part.json says how far the output got and what it was made with and from, so that `--resume` continues
exactly there, or refuses.
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


class PartialOutput:
    """The output for the lines of input answered so far."""

    def __init__(self, path: Path, made_with: Mapping[str, Any], resume: bool) -> None:
        self.path = path.resolve()
        self.part = self.path.with_name(self.path.name + ".part")
        self.facts = self.path.with_name(self.path.name + ".part.json")
        self.made_with = json.loads(json.dumps(made_with))  # as it comes back from the file
        self.lines = 0  # of input, answered
        self.bytes = 0  # of output
        self._input = hashlib.blake2b(digest_size=16)
        self._expected: str | None = None
        if resume and self.part.exists():
            self._read_facts()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.fdopen(os.open(self.part, flags, 0o666), "r+b")
        self._lock()
        if not self.lines:
            self.facts.unlink(missing_ok=True)
        if os.fstat(self._file.fileno()).st_size < self.bytes:
            raise UserError(f"{self.part} is shorter than when it was written: start again without --resume")
        self._file.truncate(self.bytes)
        self._file.seek(self.bytes)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(f"{self.part}: another process is writing it; wait for it, or stop it") from None
        except OSError:
            pass  # a file system without locks

    def _read_facts(self) -> None:
        try:
            facts = json.loads(self.facts.read_text(encoding="utf-8"))
            before, self.lines, self.bytes = dict(facts["made_with"]), int(facts["lines"]), int(facts["bytes"])
            self._expected = str(facts["input"])
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(f"{self.facts} cannot be read: start again without --resume") from None
        for name in {**before, **self.made_with}:
            if before.get(name) != self.made_with.get(name):
                was, now = before.get(name), self.made_with.get(name)
                raise UserError(
                    f"{self.part} was made with other settings ({name}: {was} then, {now} now): "
                    "use the same ones, or start again without --resume"
                )

    def skip(self, lines: Iterable[str]) -> None:
        """Check that these lines of input, `self.lines` of them, are those that were answered."""
        count = self._hash(lines)
        if count != self.lines or self._input.hexdigest() != self._expected:
            raise UserError(
                f"{self.part} was made from other input (its first {self.lines:,} lines differ): "
                "use the same input, or start again without --resume"
            )

    def write(self, lines: Iterable[str], output: Iterable[str]) -> None:
        """Append the output for these lines of input; from here on an interruption loses none of them."""
        text = "".join(line + "\n" for line in output).encode()
        self._file.write(text)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines += self._hash(lines)
        self.bytes += len(text)
        facts = {
            "made_with": self.made_with,
            "lines": self.lines,
            "bytes": self.bytes,
            "input": self._input.hexdigest(),
        }
        write_text(self.facts, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")

    def _hash(self, lines: Iterable[str]) -> int:
        count = 0
        for count, line in enumerate(lines, 1):  # noqa: B007
            self._input.update(line.encode("utf-8", "surrogatepass") + b"\n")
        return count

    def finish(self) -> None:
        """Put the complete output in place of FILE."""
        os.fsync(self._file.fileno())
        os.replace(self.part, self.path)
        self.facts.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, and remove it if it holds no output."""
        with suppress(OSError):
            self._file.close()
            if not self.lines:
                self.part.unlink(missing_ok=True)

    @property
    def hint(self) -> str:
        """How to continue; empty if there is no output to continue from."""
        if not self.lines:
            return ""
        return f"; {self.part} has the output of {self.lines:,} lines: the same command with --resume continues it"


@contextmanager
def kept(path: Path, made_with: Mapping[str, Any], resume: bool) -> Iterator[PartialOutput]:
    """Write to FILE.part, and rename it to FILE when the block ends well.

    Otherwise the part stays, unless it is empty, and the message says how to continue.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it")
    part = None
    with _signals():
        try:
            part = PartialOutput(path, made_with, resume)
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


@contextmanager
def _signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted("stopped", 128 + number)

    before: dict[int, Any] = {}
    with suppress(ValueError):  # only the main thread may
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_DFL:
                before[getattr(signal, name)] = signal.signal(getattr(signal, name), stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
