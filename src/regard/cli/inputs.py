"""Read the lines that `translate`, `generate` and `fill` work on, in chunks."""

from __future__ import annotations

import os
import queue
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

import typer

from regard.cli.options import OnError
from regard.data.corpora import decode_lines, read_bytes, split_lines

CHUNK_LINES = 2048  # the most lines answered together


@dataclass(frozen=True)
class Line:
    """A line of input; `error` says what was wrong with its bytes, and `skipped` that it gets no answer."""

    text: str
    error: str | None = None
    skipped: bool = False

    @property
    def wanted(self) -> str:
        """The text to work on: blank if the line is skipped."""
        return "" if self.skipped else self.text


@dataclass(frozen=True)
class Chunk:
    """Lines to be answered together; `first` is the number of lines before them."""

    first: int
    lines: Sequence[Line]

    @property
    def texts(self) -> list[str]:
        return [line.wanted for line in self.lines]

    def warn(self) -> None:
        """Name the lines whose bytes were not valid UTF-8."""
        for number, line in enumerate(self.lines, self.first + 1):
            if line.error is not None:
                what = "was skipped" if line.skipped else "its bad bytes were replaced by U+FFFD"
                typer.echo(f"regard: warning: line {number}: {line.error}; {what}", err=True)


class Input:
    """Texts from the command line, or the lines of a file or of standard input.

    Chunks of a file are `CHUNK_LINES` long: they depend on the file alone, not on how fast it is read. Chunks of a pipe
    or a terminal hold what has arrived, so that no line waits for the next one.
    """

    def __init__(
        self, texts: Sequence[str] | None = None, file: Path | None = None, on_error: OnError | None = None
    ) -> None:
        """`on_error` is by default to stop at bad bytes of a file, and to replace those of standard input."""
        self.done = 0  # lines read so far
        self._file = file
        self._arriving = False
        if texts:
            self._lines = iter([Line(text) for text in texts])
        elif file is not None:
            self._lines = _decoded(read_bytes(file), str(file), on_error or OnError.STOP)
        else:
            self._arriving = not _is_file(sys.stdin)
            self._lines = _decoded(_standard_input(), "standard input", on_error or OnError.REPLACE)

    @property
    def interactive(self) -> bool:
        """Whether the lines are typed in a terminal."""
        return self._arriving and sys.stdin is not None and sys.stdin.isatty()

    def skip(self, count: int) -> list[Line]:
        """Read the next lines, at most `count`, without answering them."""
        lines = list(islice(self._lines, count))
        self.done += len(lines)
        return lines

    def chunks(self) -> Iterator[Chunk]:
        """The rest of the lines."""
        for lines in _arriving(self._lines) if self._arriving else _batched(self._lines):
            chunk = Chunk(self.done, lines)
            self.done += len(lines)
            yield chunk

    def count(self) -> int | None:
        """Count the lines of the file, which takes a pass over it; None if the input is no file."""
        if self._file is None or not self._file.is_file():
            return None
        return sum(1 for _ in read_bytes(self._file))


def _is_file(stream: IO[str] | None) -> bool:
    """Whether standard input is a regular file, as after `< in.txt`."""
    return stream is not None and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def _standard_input() -> Iterator[bytes]:
    """Its lines, past Python's buffer: that is locked while a thread waits in it, and the program could not end."""
    if sys.stdin is None:
        return
    descriptor = sys.stdin.fileno()
    yield from split_lines(iter(lambda: os.read(descriptor, 1 << 16), b""))


def _decoded(stream: Iterable[bytes], name: str, on_error: OnError) -> Iterator[Line]:
    faults: list[str] = []

    def note(error: UnicodeDecodeError) -> None:
        faults.append(f"not valid UTF-8 (byte {error.start + 1} of the line)")

    for text in decode_lines(stream, name, on_error=None if on_error is OnError.STOP else note):
        yield Line(text, faults.pop(), on_error is OnError.SKIP) if faults else Line(text)


def _batched(lines: Iterator[Line]) -> Iterator[list[Line]]:
    while chunk := list(islice(lines, CHUNK_LINES)):
        yield chunk


Arrival = Line | BaseException | None  # None and an exception end the stream


def _arriving(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """Chunks as large as what has arrived already, read on a thread of its own."""
    waiting: queue.Queue[Arrival] = queue.Queue(maxsize=2 * CHUNK_LINES)
    threading.Thread(target=_pour, args=(lines, waiting), daemon=True).start()
    while True:
        chunk, end = _take(waiting)
        if chunk:
            yield chunk
        if isinstance(end, BaseException):
            raise end
        if end is None:
            return


def _pour(lines: Iterator[Line], into: queue.Queue[Arrival]) -> None:
    try:
        for line in lines:
            into.put(line)
        into.put(None)
    except BaseException as error:
        into.put(error)


def _take(waiting: queue.Queue[Arrival]) -> tuple[list[Line], Arrival]:
    """Wait for a line, then take all that came with it; and what ended the stream, or the last line if nothing did."""
    chunk = []
    arrived = waiting.get()
    while isinstance(arrived, Line):
        chunk.append(arrived)
        if len(chunk) == CHUNK_LINES:
            break
        try:
            arrived = waiting.get_nowait()
        except queue.Empty:
            break
    return chunk, arrived
