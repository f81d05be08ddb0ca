"""regard recipes"""

from __future__ import annotations

from typing import Annotated

import typer

from regard.errors import UserError
from regard.recipes import describe, load, names


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|FILE.toml",
            help="The recipe to print. [default: list the built-in recipes]",
            show_default=False,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the printed recipe. Repeatable."),
    ] = None,
) -> None:
    """List the built-in recipes, or print one with all its settings.

    The printed recipe is complete, with a comment beside each setting, and can be edited and trained.

    Examples:

        regard recipes

        regard recipes en-es > mine.toml && regard train mine.toml
    """
    if name is not None:
        typer.echo(describe(load(name, set_ or [])), nl=False)
        return
    if set_:
        raise UserError("--set changes a recipe: name the recipe")
    built_in = names()
    width = max(len(recipe) for recipe, _ in built_in)
    for recipe, about in built_in:
        typer.echo(f"{recipe:<{width}}  {about}")
