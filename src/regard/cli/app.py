"""The verbs of `regard`, put together. Nothing heavy is imported until a verb runs."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import typer

from regard import __version__
from regard.cli import (
    bench,
    compare,
    draw,
    evaluate,
    explain,
    export,
    fetch,
    fill,
    generate,
    import_,
    look,
    recipes,
    train,
    translate,
    verify,
)

HELP = ["-h", "--help"]

app = typer.Typer(
    name="regard",
    help="Train attention models, put them to work, and see what they attend to.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Start with `regard train en-es`, then `regard translate runs/en-es 'this cat is very large'`.",
    context_settings={"help_option_names": HELP},
)

for verb in (
    train,
    translate,
    generate,
    fill,
    evaluate,
    compare,
    look,
    draw,
    explain,
    bench,
    recipes,
    fetch,
    import_,
    export,
    verify,
):
    name = verb.__name__.rsplit(".", 1)[-1]
    app.command(name.rstrip("_"))(getattr(verb, name))  # `import` is a word of Python's own


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    """`--debug` is read before the arguments are parsed, so that it may stand anywhere."""


@cache
def command() -> Any:
    """The parser that these verbs make."""
    top: Any = typer.main.get_command(app)
    for one in (top, *top.commands.values()):
        for option in (*one.params, one.get_help_option(typer.Context(one, help_option_names=HELP))):
            if getattr(option, "is_flag", False):
                option.metavar = ""  # or the help shows a type beside what takes no value
    return top
