"""regard fill"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer

from regard.api import load
from regard.cli import options
from regard.cli.inputs import Input, InputLine
from regard.cli.output import note, text_output
from regard.tasks.mask_filler import Filled


def fill(
    run: options.RunPath,
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Texts that contain [MASK]. [default: the lines of standard input]"),
    ] = None,
    top: Annotated[
        int, typer.Option(metavar="N", min=1, help="Show this many guesses for each [MASK], best first.")
    ] = 5,
    form: options.Format = options.OutputFormat.TEXT,
    weights: options.Weights = "best",
    errors: options.Errors = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Predict the token at each [MASK] of a text, with a masked language model.

    Prints the text with the best guesses filled in, then the most likely tokens for each [MASK] (or `<mask>`) with
    their probabilities.

    A mask stands for one token. BPE tokens include the space before a word, so one space before [MASK] belongs to the
    mask: write 'the [MASK] sat'; without a space, the guess continues the word before it.

    A line of standard input that is longer than the model's maximum is truncated, and one without [MASK] is printed
    unchanged; both with a warning.

    Examples:

        regard fill runs/stories-bert 'Once upon a [MASK] there was a boy'

        regard fill runs/stories-bert --top 3 --format jsonl < texts.txt
    """
    for given in text or []:
        options.check_utf8(TEXT=given)
    filler = load(run, weights=weights, device=device).filler()
    source = Input(text, on_error=errors)
    if source.interactive:
        note("Type a text with [MASK] in it and press Enter; Ctrl-D ends.")
    out = text_output()
    for chunk in source.chunks():
        chunk.warn()
        answers = iter(filler([line for line in chunk.texts if line.strip()], top=top, lenient=not text))
        for number, line in enumerate(chunk.lines, chunk.first + 1):
            blank = not line.to_process.strip()
            filled = Filled(line.text, line.to_process, ()) if blank else next(answers)
            if not line.skipped:
                _warn(number, filled, filler.longest - 2)
            for output in _json(line, filled) if form is options.OutputFormat.JSONL else _plain(filled):
                out.write(output + "\n")
        out.flush()


def _warn(number: int, filled: Filled, limit: int) -> None:
    if filled.truncated:
        note(f"regard: warning: line {number} has more than {limit} tokens and was truncated")
    elif filled.source.strip() and not filled.guesses:
        note(f"regard: warning: line {number} has no [MASK]")


def _plain(filled: Filled) -> Iterator[str]:
    """Yield the text, then the guesses for each mask with their probabilities."""
    yield filled.text
    for number, guesses in enumerate(filled.guesses, 1):
        yield f"  mask {number}" if len(filled.guesses) > 1 else "  mask"
        yield from (f"    {guess.probability:6.1%}  {guess.text}" for guess in guesses)


def _json(line: InputLine, filled: Filled) -> Iterator[str]:
    masks = [[{"text": g.text, "probability": round(g.probability, 6)} for g in guesses] for guesses in filled.guesses]
    entry = {"source": filled.source, "text": filled.text, "guesses": masks, "truncated": filled.truncated}
    yield json.dumps(entry | ({"error": line.error} if line.error is not None else {}), ensure_ascii=False)
