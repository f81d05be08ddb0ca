"""regard bench"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from regard import devices
from regard.benchmark import DecodingSpeed, TrainingSpeed, decoding_speed, training_speed
from regard.cli import options
from regard.cli.output import note
from regard.cli.progress import counted
from regard.run_dir import RunDir


def bench(
    run: options.RunPath,
    steps: Annotated[int, typer.Option(min=1, help="Updates to measure, at most.")] = 100,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds for training, and for decoding, at most.")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    data: options.Data = None,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Measure how fast a run trains and decodes on this machine, and what that is of what the machine can do.

    Nothing in the run is changed. Tokens are real target tokens: padding and fill do not count. The arithmetic is that
    of the model's matrix products by formula, forward and backward, held against one large matrix product in the same
    precision. Batches are made ahead on a thread: `waiting` is the time in which they were not there yet.

    Examples:

        regard bench runs/en-es

        regard bench runs/en-es --steps 20 --json
    """
    chosen, where = RunDir(run), devices.pick(device)
    recipe, found = chosen.recipe, options.folder(data)
    if found is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"folder": str(found)})})

    def say(line: str) -> None:
        if not quiet:
            note(line)

    training = None
    if recipe.data.imported is None:
        with counted("training", steps, quiet) as progress:
            training = training_speed(chosen, recipe, where, steps=steps, seconds=seconds, progress=progress, say=say)
    else:
        say(f"{chosen.path} was imported and has nothing to train on: only decoding is measured, on random text")
    with counted("decoding", None, quiet) as progress:
        decoding = decoding_speed(chosen, recipe, where, seconds=seconds, progress=progress)
    if as_json:
        typer.echo(json.dumps(_facts(str(where), training, decoding)))
        return
    typer.echo(f"{chosen.path}, {chosen.recipe.model.family}, on {where}")
    for name, value, unit in _lines(training, decoding):
        typer.echo(f"{name:<11}{value:>12}   {unit}")


def _facts(device: str, training: TrainingSpeed | None, decoding: DecodingSpeed) -> dict[str, object]:
    """All that was measured, rates in units a second."""
    more = None
    if training is not None:
        more = {**asdict(training), "share": training.share, "packing_ahead": training.packing_ahead}
    return {"device": device, "training": more, "decoding": asdict(decoding)}


def _lines(training: TrainingSpeed | None, decoding: DecodingSpeed) -> list[tuple[str, str, str]]:
    """What, how much, and of which unit."""
    lines = []
    if training is not None:
        t = training
        each = f"{1000 * t.seconds:,.1f} ms an update of {t.tokens:,.0f} tokens, {t.step} step, {t.updates} measured"
        rates = f"{t.flops_per_second / 1e9:,.1f} of {t.matrix_rate / 1e9:,.0f} GFLOP/s in {t.precision}"
        lines += [
            ("training", f"{t.tokens_per_second:,.0f}", f"target tokens/s: {each}"),
            ("arithmetic", f"{t.share:.1%}", f"of the device's matrix rate: {rates}"),
            ("waiting", f"{t.waiting:.1%}", "of the time for batches"),
        ]
        if t.idle is not None:
            lines.append(("idle", f"{t.idle:.1%}", "of the time the GPU had nothing to do"))
        lines += [
            ("packing", f"{t.packing:,.0f}", f"target tokens/s: {t.packing_ahead:,.1f} times what training takes"),
            ("memory", f"{t.peak_bytes / 2**30:.2f}", "GiB at the peak of training"),
        ]
    lines.append(("decoding", f"{decoding.sentences_per_second:,.1f}", f"{decoding.what}, a second"))
    if decoding.tokens_per_second is not None:
        lines.append(("", f"{decoding.tokens_per_second:,.0f}", "output tokens/s"))
    return lines
