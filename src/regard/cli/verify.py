"""regard verify"""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli import options
from regard.errors import UserError
from regard.verify import accept
from regard.verify import verify as findings


def verify(
    run: options.RunPath,
    accept_edit: Annotated[
        bool, typer.Option("--accept-edit", help="Record an edited recipe.toml as the run's settings first.")
    ] = False,
) -> None:
    """Compare every file of a run with its checksum, and its tokens in the cache.

    One line a file: ok, edited (recipe.toml, with the settings that changed), damaged or missing. The exit status is 0
    if all are ok, else 2. Other verbs refuse a damaged file; with an edited recipe they warn and go on.

    Examples:

        regard verify runs/en-es

        regard verify runs/en-es --accept-edit
    """
    if accept_edit:
        accept(run)
    bad = 0
    for finding in findings(run):
        why = f": {finding.why}" if finding.why else ""
        typer.echo(f"{finding.status:<8} {finding.file}{why}")
        bad += finding.status != "ok"
    if bad:
        raise UserError(f"{run}: {bad} {'file is' if bad == 1 else 'files are'} not as written")
