"""regard train"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli import options
from regard.cli.output import next_step, note
from regard.recipes import load
from regard.resuming import MAY_CHANGE
from regard.training.setup import train as run_training


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
    """
    changes = list(set_ or [])
    if options.folder(data) is not None:
        changes.append(f"data.folder={Path(str(data)).resolve()}")
    if seed is not None:
        changes.append(f"training.seed={seed}")
    target = out if out is not None else Path("runs") / Path(recipe).stem
    run = run_training(load(recipe, changes), target, device=device, start_from=start_from, quiet=quiet)
    if not quiet:
        note(next_step(run))


train.__doc__ = (train.__doc__ or "").replace("MAY_CHANGE", ", ".join(MAY_CHANGE))
