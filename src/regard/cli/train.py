"""regard train"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from regard import planning
from regard.cli import options
from regard.cli.output import next_step, note
from regard.cli.processes import run_on_devices
from regard.data.corpora import MissingData
from regard.data.fetch import set_of
from regard.errors import UserError
from regard.recipes import load, names
from regard.recipes.schema import Recipe
from regard.resuming import MAY_CHANGE
from regard.training.setup import train as run_training

MAX_DEVICES = 1024


def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE.toml", help="A built-in recipe (see regard recipes) or a TOML file.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="The run directory. [default: runs/RECIPE]", show_default=False),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting, such as --set training.steps=500. Repeatable."
        ),
    ] = None,
    data: options.Data = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="The random seed; short for --set training.seed=N. [default: the recipe's]",
            show_default=False,
        ),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Start from the weights and the vocabulary of another run."),
    ] = None,
    device: options.Device = "auto",
    devices: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=MAX_DEVICES,
            help="Train on this many GPUs of this machine, or in this many processes on a CPU; see docs/scale.md.",
        ),
    ] = 1,
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Train a model on raw data.

    Learns the vocabulary, trains, validates, and writes everything into one run directory.

    The same command resumes an interrupted training (Ctrl-C, a lost connection, a power cut) exactly where it was. When
    resuming, you may change --device, --data, and the settings MAY_CHANGE.

    Examples:

        regard train en-es

        regard train multi30k-en-de --data ~/data/multi30k --set training.seed=2

        regard train mine.toml --out runs/mine

        regard train mine.toml --devices 4 --set training.accumulate=4

        torchrun --nnodes 2 --nproc-per-node 8 ... -m regard train mine.toml
    """
    changes = options.with_folder(set_, data)
    if seed is not None:
        changes.append(f"training.seed={seed}")
    target = out if out is not None else Path("runs") / Path(recipe).stem
    if devices > 1:
        load(recipe, changes)  # a mistake is reported once, before any process starts
        words = ["train", recipe, "--out", str(target), "--device", device]
        words += [word for change in changes for word in ("--set", change)]
        words += [] if start_from is None else ["--from", str(start_from)]
        words += [] if threads is None else ["--threads", str(threads)]
        return run_on_devices([*words, *["--quiet"] * quiet], devices, device)
    settings = load(recipe, changes)
    try:
        run = run_training(settings, target, device=device, start_from=start_from, quiet=quiet, fits=planning.fits)
    except MissingData as error:
        raise UserError(f"{error}{_where_data_are(recipe, settings)}") from None
    if not quiet and int(os.environ.get("RANK", 0)) == 0:
        note(next_step(run))


def _where_data_are(recipe: str, settings: Recipe) -> str:
    """Say how to get the data of a built-in recipe; return an empty text for other recipes."""
    if recipe not in dict(names()):
        return ""
    if (known := set_of(recipe)) is not None:
        return f"; `regard fetch {known.name}` downloads these data, for --data data/{known.name}"
    return f" ({recipe}: {settings.about})"


train.__doc__ = (train.__doc__ or "").replace("MAY_CHANGE", ", ".join(MAY_CHANGE))
