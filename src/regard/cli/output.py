"""The output of a verb: standard output, standard error, or a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import typer

from regard import tasks
from regard.errors import UserError, printable
from regard.files import atomic_write, errno_text
from regard.run_dir import RunDir


class TextOutput(Protocol):
    """A stream that lines of text are written to."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class _Escaping:
    """Standard output that is a terminal: control characters are shown as escapes."""

    def write(self, text: str) -> int:
        return sys.stdout.write(printable(text))

    def flush(self) -> None:
        sys.stdout.flush()


def text_output() -> TextOutput:
    """Standard output for text that a model wrote: as it is in a file or a pipe, escaped in a terminal."""
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    return _Escaping() if sys.stdout.isatty() else sys.stdout


def note(text: str) -> None:
    """Print a line on standard error, escaped: names and settings in it may come from foreign files."""
    typer.echo(printable(text), err=True)


def next_step(run: RunDir) -> str:
    """A line that says how to use a run."""
    task = tasks.of(run.recipe)
    return f"{run.path} is ready: regard {task.verb} {run.path} {task.example_usage}"


@contextmanager
def written(path: Path) -> Iterator[IO[str]]:
    """Open a text file that appears whole when the block ends without error; write to a device or a pipe directly."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it")
    if path.exists() and not path.is_file():
        try:
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                yield file
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(f"{path} could not be written: {errno_text(error)}") from error
        return
    with atomic_write(path.resolve()) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        yield file
