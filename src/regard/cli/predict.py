"""regard predict"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from regard.cli import options
from regard.cli.inputs import Input
from regard.cli.output import note, text_output
from regard.runs import LoadedRun
from regard.tasks.classes import Prediction


def predict(
    run: options.RunPath,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Image files. [default: those named by the lines of standard input]"),
    ] = None,
    others: options.With = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Show this many classes, most likely first.")] = 1,
    form: options.Format = options.OutputFormat.TEXT,
    weights: options.Weights = "best",
    errors: options.Errors = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Predict the class of images.

    Prints one line for each input: the class or, with --top, the most likely classes and their probabilities, separated
    by tabs. An image is a .npy array of the size that the model reads or, if Pillow is installed, an image file. For
    classes of texts, use regard translate.

    Examples:

        regard predict runs/shapes image.npy --top 3

        regard predict runs/shapes --format jsonl < names-of-files.txt
    """
    for given in inputs or []:
        options.check_utf8(INPUT=given)
    loaded = LoadedRun.load(run, *(others or []), weights=weights, device=device)
    loaded.require_verb("predict")
    source = Input(inputs, on_error=errors)
    if source.interactive:
        note("Type the name of a file and press Enter; Ctrl-D ends.")
    out = text_output()
    for chunk in source.chunks():
        chunk.warn()
        read = [loaded.read_input(text) if text.strip() else None for text in chunk.texts]
        predictions = iter(loaded.predict([item for item in read if item is not None]))
        for text, item in zip(chunk.texts, read, strict=True):
            prediction = None if item is None else next(predictions)
            as_json = form is options.OutputFormat.JSONL
            out.write((_json(text, prediction, top) if as_json else _plain(prediction, top)) + "\n")
        out.flush()


def _plain(prediction: Prediction | None, top: int) -> str:
    if prediction is None:  # a blank line stays blank
        return ""
    if top == 1:
        return prediction.label
    return "\t".join(f"{label} {probability:.1%}" for label, probability in _top(prediction, top).items())


def _json(text: str, prediction: Prediction | None, top: int) -> str:
    entry = {"input": text, "class": None if prediction is None else prediction.label}
    return json.dumps({**entry, "probabilities": _top(prediction, top)}, ensure_ascii=False)


def _top(prediction: Prediction | None, top: int) -> dict[str, float]:
    return {} if prediction is None else {k: round(p, 6) for k, p in list(prediction.probabilities.items())[:top]}
