"""regard recipes"""

from __future__ import annotations

from typing import Annotated

import typer

from regard.errors import UserError
from regard.recipes import describe, load, names


def recipes(
    name: Annotated[str | None, typer.Argument(help="A built-in recipe or a TOML file.", show_default=False)] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")] = None,
) -> None:
    """List the built-in recipes, or print one whole: every setting resolved, with a comment beside it.

    What it prints is a recipe again, so it is the way to start one of your own.

    Examples:

        regard recipes

        regard recipes en-es > mine.toml && regard train mine.toml
    """
    if name is not None:
        typer.echo(describe(load(name, set_ or [])), nl=False)
        return
    if set_:
        raise UserError("--set changes a recipe: name one")
    listed = names()
    width = max(len(known) for known, _ in listed)
    for known, about in listed:
        typer.echo(f"{known:<{width}}  {about}")
