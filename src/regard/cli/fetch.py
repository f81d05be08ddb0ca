"""regard fetch"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from regard.cli import options
from regard.data.fetch import fetch as download
from regard.data.fetch import sets


def fetch(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A public data set. [default: list them]", show_default=False),
    ] = None,
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Make a folder NAME with the data set in this folder.")
    ] = Path("data"),
    quiet: options.Quiet = False,
) -> None:
    """Download a public data set.

    Its terms of use are printed first. The same command resumes an interrupted download. Files that are complete are
    not downloaded again.

    Set the environment variable REGARD_MIRROR to the address of a server that has the files under the same paths.

    Examples:

        regard fetch

        regard fetch multi30k --to ~/data && regard train multi30k-en-de --data ~/data/multi30k
    """
    if name is None:
        for known in sets().values():
            typer.echo(f"{known.name:<16}{known.description}\n{'':<16}Terms: {known.terms}")
        return
    if name in sets() and not quiet:
        typer.echo(f"terms of {name}: {sets()[name].terms}", err=True)
    with _progress_bars(quiet) as progress:
        folder = download(name, to, base=os.environ.get("REGARD_MIRROR"), progress=progress)
    typer.echo(str(folder))
    if (recipes := sets()[name].recipes) and not quiet:
        typer.echo(f"it is ready: regard train {recipes[0]} --data {folder}", err=True)


@contextmanager
def _progress_bars(quiet: bool) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Show a bar for each file, in a terminal only."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, int] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done, total=total)  # type: ignore[arg-type]

        yield show
