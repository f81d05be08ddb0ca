"""regard translate"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli import options

if TYPE_CHECKING:
    from regard.decoding.lines import Answer, LineTranslator

MOST_AT_ONCE = 2048  # lines taken together when they are there already


class Form(StrEnum):
    """What each line of output holds."""

    text = "text"
    jsonl = "jsonl"


def translate(
    run: options.RunPath,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Sentences. None: standard input, line by line.")
    ] = None,
    others: options.With = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="A file (plain, .gz, .xz) to translate.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write. [default: stdout]")] = None,
    form: Annotated[Form, typer.Option("--format", help="Plain text, or a JSON object a line.")] = Form.text,
    nbest: Annotated[
        int,
        typer.Option(
            min=1, help="So many translations a line, with scores, best first; searched with as many beams at least."
        ),
    ] = 1,
    beam: options.Beam = None,
    length_penalty: options.LengthPenalty = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw translations at random instead of searching.")] = False,
    temperature: Annotated[float | None, typer.Option(min=0.01, help="Sampling: below 1 is more careful.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sampling: only the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sampling: likeliest tokens up to this sum.")
    ] = None,
    min_length: Annotated[int | None, typer.Option(min=0, help="Fewest tokens of output.")] = None,
    no_repeat: Annotated[int | None, typer.Option(min=0, help="Never repeat an n-gram of this length.")] = None,
    prefix: Annotated[str | None, typer.Option(help="What every translation must begin with.")] = None,
    source_tag: Annotated[
        str | None, typer.Option(help="Tag in front of every source. [default: the recipe's]")
    ] = None,
    target_tag: Annotated[
        str | None, typer.Option(help="Tag every translation begins with. [default: the recipe's]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Sampling: another seed, other translations.")] = 0,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Translate sentences, a file, or standard input: as many lines come out as went in.

    Lines from standard input are answered as they come. Blank lines stay blank; a line longer than the model reads is
    cut, with a warning that names it.

    Examples:

        regard translate runs/en-es 'this cat is very large'

        regard translate runs/en-es < in.txt > out.txt

        regard translate runs/en-es --nbest 3 --format jsonl 'the dog sees the cat'

        regard translate runs/seed-1 --with runs/seed-2 < in.txt > out.txt
    """
    from dataclasses import replace

    from regard.api import load
    from regard.errors import UserError
    from regard.text import UNKNOWN

    for sentence in text or []:
        options.readable(TEXT=sentence)
    options.readable(**{"--prefix": prefix})
    if text and input is not None:
        raise UserError("give sentences or --input, not both")
    if beam is not None and beam < nbest and not sample:
        raise UserError(f"--nbest {nbest} needs as many beams, and --beam is {beam}")
    model = load(run, *(others or []), weights=weights, device=device, precision=precision)
    usual = model.run.recipe.decoding
    settings = options.changed(
        method="sample" if sample else None,
        beam=max(usual.beam if beam is None else beam, nbest),
        length_penalty=length_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_length=min_length,
        no_repeat=no_repeat,
    )
    idle = options.changed(temperature=temperature, top_k=top_k, top_p=top_p)
    if idle and not sample and usual.method != "sample":
        raise UserError(f"--{next(iter(idle)).replace('_', '-')} has no effect without --sample")
    translator = replace(options.translator(model, settings), seed=seed)
    tags = options.changed(source_tag=source_tag, target_tag=target_tag)
    translator = replace(translator, **tags)  # type: ignore[arg-type]
    if prefix is not None and UNKNOWN in translator.tokenizers[1].encode(prefix):
        raise UserError(f"--prefix {prefix!r}: has something in it that this model cannot write")
    if not text and input is None and not quiet and sys.stdin is not None and sys.stdin.isatty():
        options.note("Type a sentence and press Enter; Ctrl-D ends.")
    with _opened(output) as out:
        job = _Job(translator, form, nbest, prefix, quiet)
        for first, lines in chunks(text, input):
            for line in job.answer(first, lines):
                out.write(line + "\n")
            out.flush()


class _Job:
    """Turns chunks of input lines into lines of output."""

    def __init__(self, translator: LineTranslator, form: Form, nbest: int, prefix: str | None, quiet: bool) -> None:
        self.translator, self.form, self.nbest, self.prefix, self.quiet = translator, form, nbest, prefix, quiet

    def answer(self, first: int, lines: list[str]) -> Iterator[str]:
        prefixes = None if self.prefix is None else [self.prefix] * len(lines)
        answers = self.translator(lines, nbest=self.nbest, first=first, prefixes=prefixes)
        for number, (line, answer) in enumerate(zip(lines, answers, strict=True), first + 1):
            if answer.truncated and not self.quiet:
                most = self.translator.room.source
                options.note(f"regard: warning: line {number} is longer than {most} tokens and was cut there")
            yield from self._lines(line, answer)

    def _lines(self, line: str, answer: Answer) -> Iterator[str]:
        scores = [round(h.score, 4) for h in answer.hypotheses] or [0.0]
        if self.form is Form.jsonl:
            found = [{"text": t, "score": s} for t, s in zip(answer.texts, scores, strict=True)]
            entry = {"source": line, **found[0], "truncated": answer.truncated}
            yield json.dumps(entry | ({"nbest": found} if self.nbest > 1 else {}), ensure_ascii=False)
        elif self.nbest == 1:
            yield answer.texts[0]
        else:
            written = [f"{score:.4f}\t{text}" for text, score in zip(answer.texts, scores, strict=True)]
            yield from written + [""] * (self.nbest - len(written))  # as many for every line: they can be told apart


def chunks(text: list[str] | None, file: Path | None) -> Iterator[tuple[int, list[str]]]:
    """Numbered chunks of lines, each as large as what is there already: none waits for more to come."""
    from regard.data.sources import decode_lines, read_lines

    if text:
        yield 0, [line for sentence in text for line in sentence.split("\n")]
        return
    lines = decode_lines(_standard_input(), "standard input") if file is None else read_lines(file)
    waiting: queue.Queue[str | BaseException | None] = queue.Queue(maxsize=2 * MOST_AT_ONCE)
    threading.Thread(target=_pour, args=(lines, waiting), daemon=True).start()
    first = 0
    while True:
        chunk, end = _take(waiting)
        if chunk:
            yield first, chunk
            first += len(chunk)
        if isinstance(end, BaseException):
            raise end
        if end is None:
            return


def _standard_input() -> Iterator[bytes]:
    """Its lines, past Python's buffer: that is locked while a thread waits in it, and the program could not end."""
    from regard.data.sources import split_lines

    if sys.stdin is None:
        return
    descriptor = sys.stdin.fileno()
    yield from split_lines(iter(lambda: os.read(descriptor, 1 << 16), b""))


def _pour(lines: Iterator[str], into: queue.Queue[str | BaseException | None]) -> None:
    try:
        for line in lines:
            into.put(line)
        into.put(None)
    except BaseException as error:
        into.put(error)


def _take(waiting: queue.Queue[str | BaseException | None]) -> tuple[list[str], str | BaseException | None]:
    """Wait for a line, then take all that came with it; and what ended the stream, or "" if nothing did."""
    chunk: list[str] = []
    while len(chunk) < MOST_AT_ONCE:
        try:
            line = waiting.get(block=not chunk)
        except queue.Empty:
            return chunk, ""
        if not isinstance(line, str):
            return chunk, line
        chunk.append(line)
    return chunk, ""


def _opened(path: Path | None) -> AbstractContextManager[options.TextOutput]:
    """Standard output, or a file that appears whole at the end."""
    if path is not None:
        return options.written(path)
    return nullcontext(options.text_output())
