"""regard verify"""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli import options
from regard.errors import UserError
from regard.verify import accept
from regard.verify import verify as check_files


def verify(
    run: options.RunPath,
    accept_edit: Annotated[
        bool, typer.Option("--accept-edit", help="First record the edited recipe.toml as the settings of the run.")
    ] = False,
) -> None:
    """Compare every file of a run, and its cached tokens, with their checksums.

    Prints one line for each file: ok, edited (recipe.toml, with the changed settings), damaged or missing. The exit
    status is 0 if all files are ok, otherwise 2. Other verbs refuse a damaged file, and warn of an edited recipe.

    Examples:

        regard verify runs/en-es

        regard verify runs/en-es --accept-edit
    """
    if accept_edit:
        accept(run)
    changed = 0
    for finding in check_files(run):
        reason = f": {finding.why}" if finding.why else ""
        typer.echo(f"{finding.status:<8} {finding.file}{reason}")
        changed += finding.status != "ok"
    if changed:
        raise UserError(f"{run}: {changed} {'file differs' if changed == 1 else 'files differ'} from what was written")
