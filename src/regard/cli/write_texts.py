"""The common part of `regard caption` and `regard transcribe`: files in, one line of text out for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from regard.cli import decoders
from regard.cli.output import text_output, written
from regard.cli.progress import progress_bar
from regard.runs import LoadedRun
from regard.tasks.translator import Answer

CHUNK = 64  # inputs that are read and decoded together


def write_texts(
    loaded: LoadedRun,
    names: Sequence[str],
    settings: dict[str, object],
    *,
    read: Callable[[str], Any],
    line_of: Callable[[str, Any, Answer], str],
    nbest: int = 1,
    output: Path | None = None,
    quiet: bool = False,
) -> None:
    """Write the text of each input, as a line: on standard output, or to a file.

    `read` reads the input of a name, and `line_of` makes a line of the name, the input and its answer.
    """
    lines = _lines(loaded, names, settings, read, line_of, nbest, quiet)
    if output is not None:
        with written(output) as out:
            out.writelines(f"{line}\n" for line in lines)
        return
    stream = text_output()
    for line in lines:
        stream.write(f"{line}\n")
        stream.flush()


def _lines(
    loaded: LoadedRun,
    names: Sequence[str],
    settings: dict[str, object],
    read: Callable[[str], Any],
    line_of: Callable[[str, Any, Answer], str],
    nbest: int,
    quiet: bool,
) -> Iterator[str]:
    task, write = loaded.feature_task(), decoders.writer(loaded, settings)
    with progress_bar("decoding", len(names), quiet or len(names) < CHUNK) as progress:
        for begin in range(0, len(names), CHUNK):
            chunk = names[begin : begin + CHUNK]
            inputs = [read(name) for name in chunk]
            answers = task.write(write, inputs, nbest=nbest, first=begin, progress=progress)
            yield from map(line_of, chunk, inputs, answers)
