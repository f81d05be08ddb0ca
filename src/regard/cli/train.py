"""regard train"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli import options
from regard.cli.output import note, ready
from regard.recipes import load
from regard.resuming import MAY_CHANGE
from regard.training.setup import train as run_training


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|FILE.toml", help="A built-in recipe or a TOML file.")],
    out: Annotated[
        Path | None, typer.Option(help="The run directory. [default: runs/RECIPE]", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: --set training.steps=500. Repeatable."),
    ] = None,
    data: options.Data = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Short for --set training.seed=N.", show_default=False)
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Begin with another run's weights and vocabulary.")
    ] = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Train a model from raw text: vocabulary, training, validation, all into one run directory.

    The same command again goes on exactly where it stopped, whether Ctrl-C, a dropped connection or a power cut stopped
    it. What may have changed by then: --device, --data, and the settings MAY_CHANGE.

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
    chosen = load(recipe, changes)
    target = out if out is not None else Path("runs") / Path(recipe).stem
    run = run_training(chosen, target, device=device, start_from=start_from, quiet=quiet)
    if not quiet:
        note(ready(run))


train.__doc__ = (train.__doc__ or "").replace("MAY_CHANGE", ", ".join(MAY_CHANGE))
