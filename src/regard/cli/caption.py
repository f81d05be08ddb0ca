"""regard caption"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.api import load
from regard.arguments import MAX_BEAM
from regard.cli import options
from regard.cli.write_texts import write_texts
from regard.errors import UserError
from regard.tasks.translator import Answer


def caption(
    run: options.RunPath,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE", help="Image files, .npy arrays, or held-out examples such as 'test 3'.", show_default=False
        ),
    ] = None,
    others: options.With = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file. [default: standard output]"),
    ] = None,
    nbest: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=MAX_BEAM,
            help="Write this many captions of each image, each after its score and a tab, best first.",
        ),
    ] = 1,
    beam: options.Beam = None,
    length_penalty: options.LengthPenalty = None,
    form: options.Format = options.OutputFormat.TEXT,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Describe images in words, one line for each image.

    An image of another size than the model reads is scaled and cropped. Image files need Pillow
    (pip install 'regard[vision]').

    Examples:

        regard caption runs/scenes image.png

        regard caption runs/scenes images/*.png --format jsonl -o captions.jsonl

        regard caption runs/scenes 'test 1' 'test 2' --nbest 3
    """
    names = images or []
    for name in names:
        options.check_utf8(INPUT=name)
    loaded = load(run, *(others or []), weights=weights, device=device, precision=precision)
    loaded.require_verb("caption")
    if not names:
        raise UserError(f"nothing to read: give files, as in regard caption RUN {loaded.task.usage}")
    settings = options.changed(beam=beam, length_penalty=length_penalty)
    if nbest > 1:
        settings = {"beam": max(nbest, loaded.recipe.decoding.beam), **settings}
    read = loaded.feature_task().read_argument
    line_of = _json if form is options.OutputFormat.JSONL else partial(_plain, nbest)
    write_texts(loaded, names, settings, read=read, line_of=line_of, nbest=nbest, output=output, quiet=quiet)


def _plain(nbest: int, name: str, image: Any, answer: Answer) -> str:
    if nbest == 1:
        return answer.texts[0]
    scored = zip(answer.hypotheses, answer.texts, strict=True)
    return "\n".join(f"{hypothesis.score:.4f}\t{text}" for hypothesis, text in scored)


def _json(name: str, image: Any, answer: Answer) -> str:
    scores = [round(hypothesis.score, 6) for hypothesis in answer.hypotheses]
    entry: dict[str, Any] = {"input": name, "text": answer.texts[0], "score": scores[0] if scores else None}
    if len(answer.texts) > 1:
        entry["alternatives"] = [
            {"text": text, "score": score} for text, score in zip(answer.texts, scores, strict=True)
        ]
    return json.dumps(entry, ensure_ascii=False)
