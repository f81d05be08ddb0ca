"""The verbs of `regard`, as a lazy command group.

A verb's module is imported when the verb is called, not to list the verbs: most import torch, which takes a second or
two. For the help of one verb, `placeholders` stand in for what only running needs.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from regard import __version__
from regard.cli.placeholders import placeholders
from regard.errors import UserError

HELP = ["-h", "--help"]
MARKUP: Literal["markdown"] = "markdown"
# The extra that each optional package belongs to.
EXTRAS = dict.fromkeys(("fastapi", "prometheus_client", "starlette", "uvicorn"), "serve")

# The list that `regard --help` shows. A test compares each line with the first paragraph of the verb's own help.
VERBS = {
    "train": "Train a model on raw data.",
    "translate": "Translate sentences, a file, or standard input, line by line.",
    "generate": "Continue a text, with a language model.",
    "fill": "Predict the token at each [MASK] of a text, with a masked language model.",
    "caption": "Describe images in words, one line for each image.",
    "predict": "Predict the class of texts, images or nodes of a graph, or numbers for texts or molecules.",
    "transcribe": "Write what is said in recordings, with a speech model.",
    "act": "Act in an environment, and print the returns that are achieved.",
    "collect": "Play episodes in an environment and write them as trajectories, to train on.",
    "evaluate": "Score a run on held-out data, or a file of translations against references.",
    "align": "Link the words of sentence pairs by cross-attention, or score such links against gold ones.",
    "calibrate": "Calibrate the confidence of a translation model on held-out data.",
    "compare": "Score several runs on the same pairs: a table, and a plot of quality by source length.",
    "look": "Look inside runs, live, on a page in the browser.",
    "serve": "Serve translation and language models over HTTP.",
    "draw": "Draw what happens inside a model: attention, gates, the path to the next token.",
    "explain": "Show which input words or pixels the output depends on, with the model as a black box (RISE).",
    "bench": "Measure how fast a run trains and decodes on this machine.",
    "plan": "Plan a training before it runs: memory, speed and cost, on one GPU or many.",
    "recipes": "List the built-in recipes, or print one with all its settings.",
    "fetch": "Download a public data set.",
    "import": "Make a run from a Hugging Face model.",
    "export": "Write a run in the format of another library.",
    "verify": "Compare every file of a run, and its cached tokens, with their checksums.",
}


class LazyGroup(TyperGroup):
    """Lists placeholders with the name and first paragraph of a verb; resolves to the verb itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in VERBS.items():
            self.add_command(TyperCommand(name, help=summary, rich_markup_mode=MARKUP))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        if name and rest[:1] and rest[0] in HELP:
            with placeholders():
                return name, verb(name), rest
        return name, name and verb(name), rest


app = typer.Typer(
    name="regard",
    cls=LazyGroup,
    help="Train attention models, use them, and see what they attend to.",
    no_args_is_help=True,
    rich_markup_mode=MARKUP,
    pretty_exceptions_enable=False,
    epilog="Start with `regard train en-es`, then `regard translate runs/en-es 'this cat is very large'`.",
    context_settings={"help_option_names": HELP},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when a command fails.")] = False,
) -> None:
    """`--debug` is read before the arguments are parsed, so that it may stand anywhere."""


@cache
def command() -> Any:
    """The parser of `regard`, whose verbs are not imported yet."""
    return _hide_flag_types(typer.main.get_command(app))


@cache
def verb(name: str) -> Any:
    """The parser of a verb; imports its module."""
    function = f"{name}_" if keyword.iskeyword(name) else name
    try:
        module = import_module(f"regard.cli.{function}")
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise UserError(f"regard {name} needs {error.name}: pip install 'regard[{EXTRAS[error.name]}]'") from None
    alone = typer.Typer(rich_markup_mode=MARKUP, add_completion=False)
    alone.command(name)(getattr(module, function))
    return _hide_flag_types(typer.main.get_command(alone))


def _hide_flag_types(parser: Any) -> Any:
    """Clear the metavar of flags: the help would show a type beside an option that takes no value."""
    options: Iterable[Any] = (*parser.params, parser.get_help_option(typer.Context(parser, help_option_names=HELP)))
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return parser
