"""regard fill"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer

from regard.api import load
from regard.cli import options
from regard.cli.inputs import Input, Line
from regard.cli.output import note, text_output
from regard.decoding.fill_mask import Filled


def fill(
    run: options.RunPath,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts with [MASK] in them. None: standard input.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Show this many guesses for each gap, best first.")] = 5,
    form: Annotated[
        options.OutputFormat, typer.Option("--format", help="Plain text, or a JSON object a text.")
    ] = options.OutputFormat.text,
    weights: options.Weights = "best",
    errors: options.Errors = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Guess what stands at each [MASK] (or `<mask>`) of a text: the likeliest pieces, and the text with the best ones.

    A gap is one token. With bpe a token begins with the blank before its word, so one blank before [MASK] belongs to
    the gap: write 'the [MASK] sat', and put no blank before [MASK] to go on with a word.

    From standard input, a line longer than the model reads is cut, and one without [MASK] comes back as it is, with a
    warning that names it.

    Examples:

        regard fill runs/stories-bert 'Once upon a [MASK] there was a boy'

        regard fill runs/stories-bert --top 3 --format jsonl < texts.txt
    """
    for one in text or []:
        options.readable(TEXT=one)
    filler = load(run, weights=weights, device=device).filler()
    source = Input(text, on_error=errors)
    if source.interactive:
        note("Type a text with [MASK] in it and press Enter; Ctrl-D ends.")
    out = text_output()
    for chunk in source.chunks():
        chunk.warn()
        found = iter(filler([line for line in chunk.texts if line.strip()], top=top, lenient=not text))
        for number, line in enumerate(chunk.lines, chunk.first + 1):
            blank = not line.wanted.strip()
            filled = Filled(line.text, line.wanted, ()) if blank else next(found)
            if not line.skipped:
                _warn(number, filled, filler.longest - 2)
            for written in _json(line, filled) if form is options.OutputFormat.jsonl else _plain(filled):
                out.write(written + "\n")
        out.flush()


def _warn(number: int, filled: Filled, most: int) -> None:
    if filled.truncated:
        note(f"regard: warning: line {number} is longer than {most} tokens and was cut there")
    elif filled.source.strip() and not filled.guesses:
        note(f"regard: warning: line {number} has no [MASK] to fill in")


def _plain(filled: Filled) -> Iterator[str]:
    """The text, then for each gap its guesses with their probabilities."""
    yield filled.text
    for number, guesses in enumerate(filled.guesses, 1):
        yield f"  gap {number}" if len(filled.guesses) > 1 else "  gap"
        yield from (f"    {guess.probability:6.1%}  {guess.text}" for guess in guesses)


def _json(line: Line, filled: Filled) -> Iterator[str]:
    gaps = [[{"text": g.text, "probability": round(g.probability, 6)} for g in guesses] for guesses in filled.guesses]
    entry = {"source": filled.source, "text": filled.text, "guesses": gaps, "truncated": filled.truncated}
    yield json.dumps(entry | ({"error": line.error} if line.error is not None else {}), ensure_ascii=False)
