"""regard predict"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.api import Model, load
from regard.cli import options
from regard.cli.inputs import Chunk, Input, InputLine
from regard.cli.output import note, text_output, written
from regard.errors import UserError
from regard.tasks.numbers import NumberPrediction


def predict(
    run: options.RunPath,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            help="Texts, image files, nodes or molecules, as the run was trained on; or held-out examples such as "
            "'test 3', except of texts. [default: the lines of standard input]",
        ),
    ] = None,
    others: options.With = None,
    input: Annotated[
        Path | None,
        typer.Option("--input", "-i", metavar="FILE", help="Read the lines of a file (plain, .gz, .xz or .zst)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file. [default: standard output]"),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Show this many classes with their probabilities, likeliest first. [default: the class alone; all "
            "with --format jsonl]",
            show_default=False,
        ),
    ] = None,
    form: options.Format = options.OutputFormat.TEXT,
    weights: options.Weights = "best",
    errors: options.Errors = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Predict the class of texts, images or nodes of a graph, or numbers for texts or molecules.

    Prints one line for each input: the class or, with --top, the most likely classes and their probabilities, separated
    by tabs. Blank lines stay blank. Texts are read line by line; one longer than the model's maximum is truncated, with
    a warning. An image is a .npy array or, if Pillow is installed, an image file; another size than the model reads is
    scaled, and cropped to its centre or (model.resize) stretched.

    Examples:

        regard predict runs/moods 'Ivan opened a small box, but it was empty.' --top 2

        regard predict runs/moods -i texts.txt -o classes.jsonl --format jsonl

        regard predict runs/shapes image.png 'test 3' --top 3
    """
    for given in inputs or []:
        options.check_utf8(INPUT=given)
    if inputs and input is not None:
        raise UserError("give either inputs or --input, not both")
    model = load(run, *(others or []), weights=weights, device=device, precision=precision)
    task = model.prediction_task()
    lines = [line for given in inputs or [] for line in given.split("\n")]
    source = Input(lines, input, errors, names=not task.has_source)
    if source.interactive and not quiet:
        note("Type a line and press Enter; Ctrl-D ends.")
    if output is not None:
        with written(output) as out:
            for chunk in source.chunks():
                out.writelines(line + "\n" for line in _lines(model, chunk, top, form, quiet))
        return
    out_stream = text_output()
    for chunk in source.chunks():
        for line in _lines(model, chunk, top, form, quiet):
            out_stream.write(line + "\n")
        out_stream.flush()


def _lines(model: Model, chunk: Chunk, top: int | None, form: options.OutputFormat, quiet: bool) -> Iterator[str]:
    """The lines of output for a chunk of input."""
    if not quiet:
        chunk.warn()
    task = model.prediction_task()
    predictions = iter(model.predictions([task.read_argument(text) for text in chunk.texts if text.strip()]))
    for number, line in enumerate(chunk.lines, chunk.first + 1):
        prediction = next(predictions) if line.to_process.strip() else None
        if prediction is not None and prediction.truncated and not quiet:
            limit = model.recipe.model.max_positions
            note(f"regard: warning: line {number} has more than {limit} tokens and was truncated")
        yield _json(line, prediction, top) if form is options.OutputFormat.JSONL else _plain(prediction, top)


def _plain(prediction: Any, top: int | None) -> str:
    if prediction is None:  # a blank line stays blank
        return ""
    if top is None or isinstance(prediction, NumberPrediction):
        return str(prediction)
    return "\t".join(f"{label} {probability:.1%}" for label, probability in _top(prediction, top).items())


def _json(line: InputLine, prediction: Any, top: int | None) -> str:
    if isinstance(prediction, NumberPrediction):
        return json.dumps({"input": line.text, **prediction.as_dict()}, ensure_ascii=False)
    entry: dict[str, Any] = {"input": line.text, "class": None if prediction is None else prediction.label}
    entry |= {"probabilities": _top(prediction, top), "truncated": prediction is not None and prediction.truncated}
    return json.dumps(entry | ({"error": line.error} if line.error is not None else {}), ensure_ascii=False)


def _top(prediction: Any, top: int | None) -> dict[str, float]:
    return {} if prediction is None else {k: round(p, 6) for k, p in list(prediction.probabilities.items())[:top]}
