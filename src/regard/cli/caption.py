"""regard caption"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.api import load
from regard.cli import options
from regard.cli.write_texts import write_texts


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
    loaded = load(run, *(others or []), weights=weights, device=device, precision=precision)
    loaded.require_verb("caption")
    settings = options.changed(beam=beam, length_penalty=length_penalty)
    write_texts(loaded, images or [], settings, nbest, form, output, quiet)
