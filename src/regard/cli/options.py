"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, such as runs/en-es.", show_default=False)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only results and errors.")]
Beam = Annotated[int | None, typer.Option(min=1, help="Hypotheses kept; 1 is greedy. [default: the recipe's]")]
LengthPenalty = Annotated[float | None, typer.Option(min=0, help="GNMT's alpha. [default: the recipe's]")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Look the recipe's files up in this folder.", show_default=False),
]


def changed(**settings: object) -> dict[str, object]:
    """Only the settings that were given."""
    return {key: value for key, value in settings.items() if value is not None}
