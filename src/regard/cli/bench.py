"""regard bench"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from regard import devices, tasks
from regard.benchmark import DecodingSpeed, TrainingSpeed, decoding_speed, training_speed
from regard.cli import options
from regard.cli.output import note
from regard.cli.progress import progress_bar
from regard.run_dir import RunDir


def bench(
    run: options.RunPath,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of training steps to measure.")] = 100,
    seconds: Annotated[
        float,
        typer.Option(metavar="X", min=0.1, help="Maximum number of seconds for training, and again for decoding."),
    ] = 20.0,
    as_json: options.Json = False,
    data: options.Data = None,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Measure how fast a run trains and decodes on this machine.

    The run is not changed. Tokens are target tokens without padding. `arithmetic` compares the floating-point
    operations of the model's matrix multiplications, forward and backward, by formula, with the rate that the device
    reaches on one large matrix multiplication in the same precision. Batches are prepared by another thread; `waiting`
    is the share of time in which training waited for them.

    Examples:

        regard bench runs/en-es

        regard bench runs/en-es --steps 20 --json
    """
    opened, target = RunDir(run), devices.pick(device)
    recipe, folder = opened.recipe, options.folder(data)
    tasks.of(recipe).require_verb("bench", run)
    if folder is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"folder": str(folder)})})

    def report(line: str) -> None:
        if not quiet:
            note(line)

    training = None
    if recipe.data.imported is None:
        with progress_bar("training", steps, quiet) as progress:
            training = training_speed(
                opened, recipe, target, steps=steps, seconds=seconds, progress=progress, say=report
            )
    else:
        report(f"{opened.path} was imported without training data: only decoding is measured, on random text")
    with progress_bar("decoding", None, quiet) as progress:
        decoding = decoding_speed(opened, recipe, target, seconds=seconds, progress=progress)
    if as_json:
        typer.echo(json.dumps(_as_dict(str(target), training, decoding)))
        return
    typer.echo(f"{opened.path}, {recipe.model.summary()}, on {target}")
    for name, value, unit in _lines(training, decoding):
        typer.echo(f"{name:<11}{value:>12}   {unit}")


def _as_dict(device: str, training: TrainingSpeed | None, decoding: DecodingSpeed) -> dict[str, object]:
    """All measurements, rates per second."""
    entry = None
    if training is not None:
        entry = {**asdict(training), "share": training.share, "packing_ahead": training.packing_ahead}
    return {"device": device, "training": entry, "decoding": asdict(decoding)}


def _lines(training: TrainingSpeed | None, decoding: DecodingSpeed) -> list[tuple[str, str, str]]:
    """Name, value and unit of each measurement."""
    lines = []
    if training is not None:
        t = training
        step = f"{1000 * t.seconds:,.1f} ms for a step of {t.tokens:,.0f} tokens, {t.step}, {t.updates} measured"
        rates = f"{t.flops_per_second / 1e9:,.1f} of {t.matrix_rate / 1e9:,.0f} GFLOP/s in {t.precision}"
        lines += [
            ("training", f"{t.tokens_per_second:,.0f}", f"target tokens/s: {step}"),
            ("arithmetic", f"{t.share:.1%}", f"of the device's matrix multiplication rate: {rates}"),
            ("waiting", f"{t.waiting:.1%}", "of the time spent waiting for batches"),
        ]
        if t.idle is not None:
            lines.append(("idle", f"{t.idle:.1%}", "of the time the GPU was idle"))
        lines += [
            ("packing", f"{t.packing:,.0f}", f"target tokens/s: {t.packing_ahead:,.1f} times the rate of training"),
            ("memory", f"{t.peak_bytes / 2**30:.2f}", "GiB at peak while training"),
        ]
    lines.append(("decoding", f"{decoding.sentences_per_second:,.1f}", f"per second: {decoding.what}"))
    if decoding.tokens_per_second is not None:
        lines.append(("", f"{decoding.tokens_per_second:,.0f}", "output tokens/s"))
    return lines
