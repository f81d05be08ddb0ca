"""Read the lines that `translate`, `generate` and `fill` work on, in chunks."""

from __future__ import annotations

import os
import queue
import stat
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import IO

import typer

from regard.cli.options import OnError
from regard.data.lines import decode_lines, describe_invalid, read_bytes, split_lines
from regard.errors import RegardWarning, UserError

CHUNK_LINES = 2048  # maximum number of lines that are processed together


@dataclass(frozen=True)
class InputLine:
    """A line of input. `error` describes its invalid bytes; a `skipped` line is not processed."""

    text: str
    error: str | None = None
    skipped: bool = False

    @property
    def to_process(self) -> str:
        """The text to process: blank if the line is skipped."""
        return "" if self.skipped else self.text


@dataclass(frozen=True)
class Chunk:
    """Lines that are processed together; `first` is the number of lines before them."""

    first: int
    lines: Sequence[InputLine]

    @property
    def texts(self) -> list[str]:
        """The texts to process, one for each line."""
        return [line.to_process for line in self.lines]

    def warn(self) -> None:
        """Print a warning for each line that was not valid UTF-8."""
        for number, line in enumerate(self.lines, self.first + 1):
            if line.error is not None:
                action = "the line was skipped" if line.skipped else "the bytes were replaced by U+FFFD"
                typer.echo(f"regard: warning: line {number}: {line.error}; {action}", err=True)


class Input:
    """Texts from the command line, or the lines of a file or of standard input.

    Chunks of a file have `CHUNK_LINES` lines: they depend on the file alone, not on how fast it is read. Chunks of a
    pipe or a terminal hold the lines that have arrived, so that no line waits for the next one.
    """

    def __init__(
        self,
        texts: Sequence[str] | None = None,
        file: Path | None = None,
        on_error: OnError | None = None,
        *,
        names: bool = False,
    ) -> None:
        """Invalid bytes are an error in a file, and replaced in standard input, unless `on_error` says otherwise.

        `names`: the lines are names, such as those of images; if not, a text that is the name of a file gets a warning.
        """
        self.done = 0  # lines read so far
        self._file = file
        self._arriving = False
        if texts:
            if not names:
                warn_of_file_names(texts)
            self._lines = iter([InputLine(text) for text in texts])
        elif file is not None:
            self._lines = _decoded(read_bytes(file), str(file), on_error or OnError.STOP)
        else:
            self._arriving = not _is_file(sys.stdin)
            self._lines = _decoded(_standard_input(), "standard input", on_error or OnError.REPLACE)

    @property
    def interactive(self) -> bool:
        """Whether the lines are typed into a terminal."""
        return self._arriving and sys.stdin is not None and sys.stdin.isatty()

    def skip(self, count: int) -> list[InputLine]:
        """Read and return the next lines, at most `count`, without processing them."""
        lines = list(islice(self._lines, count))
        self.done += len(lines)
        return lines

    def chunks(self) -> Iterator[Chunk]:
        """Yield the remaining lines in chunks."""
        for lines in _arriving(self._lines) if self._arriving else _batched(self._lines):
            chunk = Chunk(self.done, lines)
            self.done += len(lines)
            yield chunk

    def count(self) -> int | None:
        """Count the lines of the file by reading it; None if the input is not a file."""
        if self._file is None or not self._file.is_file():
            return None
        return sum(1 for _ in read_bytes(self._file))


def warn_of_file_names(texts: Sequence[str]) -> None:
    """Warn of a text that is the name of a file: most likely the lines of the file were meant."""
    for text in texts:
        if os.path.isfile(text):
            warnings.warn(
                f"{text!r} is read as a text, although it is the name of a file: for its lines, give < {quote(text)}",
                RegardWarning,
                stacklevel=2,
            )


def _is_file(stream: IO[str] | None) -> bool:
    """Whether standard input is a regular file, as with `< in.txt`."""
    return stream is not None and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def _standard_input() -> Iterator[bytes]:
    """Yield the lines of standard input.

    Bypasses Python's buffer, which is locked while a thread waits for input: the program could not exit.
    """
    if sys.stdin is None:
        return
    descriptor = sys.stdin.fileno()
    yield from split_lines(iter(lambda: os.read(descriptor, 1 << 16), b""))


def _decoded(stream: Iterable[bytes], name: str, on_error: OnError) -> Iterator[InputLine]:
    lines = 0
    errors: list[str] = []

    def note(error: UnicodeDecodeError) -> None:
        message = describe_invalid(error, lines + 1)
        if on_error is OnError.STOP:
            raise UserError(f"{name}, line {lines + 1}: {message}; --errors replace or --errors skip continues")
        errors.append(message)

    for text in decode_lines(stream, name, on_error=note):
        lines += 1
        yield InputLine(text, errors.pop(), on_error is OnError.SKIP) if errors else InputLine(text)


def _batched(lines: Iterator[InputLine]) -> Iterator[list[InputLine]]:
    while chunk := list(islice(lines, CHUNK_LINES)):
        yield chunk


Arrival = InputLine | BaseException | None  # None and an exception end the stream


def _arriving(lines: Iterator[InputLine]) -> Iterator[list[InputLine]]:
    """Read lines on another thread; yield chunks of those that have arrived."""
    waiting: queue.Queue[Arrival] = queue.Queue(maxsize=2 * CHUNK_LINES)
    threading.Thread(target=_read_into, args=(lines, waiting), daemon=True).start()
    while True:
        chunk, end = _next_chunk(waiting)
        if chunk:
            yield chunk
        if isinstance(end, BaseException):
            raise end
        if end is None:
            return


def _read_into(lines: Iterator[InputLine], into: queue.Queue[Arrival]) -> None:
    try:
        for line in lines:
            into.put(line)
        into.put(None)
    except BaseException as error:
        into.put(error)


def _next_chunk(waiting: queue.Queue[Arrival]) -> tuple[list[InputLine], Arrival]:
    """Wait for a line, then take all that have arrived. Also return the last arrival, which may end the stream."""
    chunk = []
    arrived = waiting.get()
    while isinstance(arrived, InputLine):
        chunk.append(arrived)
        if len(chunk) == CHUNK_LINES:
            break
        try:
            arrived = waiting.get_nowait()
        except queue.Empty:
            break
    return chunk, arrived
