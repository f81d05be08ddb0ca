"""regard import"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from regard.cli import options
from regard.cli.output import note, ready
from regard.interop import import_folder
from regard.interop.check import checked
from regard.run_dir import RunDir


def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A Hugging Face model directory: gpt2, bert or marian.")
    ],
    out: Annotated[Path, typer.Option(help="The run directory to make.", show_default=False)],
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Compare tokens and logits with transformers'; one that fails leaves nothing behind."
        ),
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Make a run of somebody else's model, to translate, generate, fill, evaluate and look into as any other.

    Reads config.json, model.safetensors and the tokenizer's files; nothing is unpickled and no code is run. With
    --check, the largest difference of the logits is printed, and one above 1e-4 is a failure that leaves no run behind.

    Examples:

        regard import opus-mt-en-de --out runs/en-de --check

        regard train runs/gpt2/recipe.toml --from runs/gpt2 --out runs/b --set data.text=a.txt --set data.held_out=0.1
    """
    run = import_folder(folder, out)
    if check:
        say_difference(run.path, folder, made=run.path)
    if not quiet:
        note(f"{run.recipe.about}; {ready(run)}")


def say_difference(run: Path, folder: Path, made: Path) -> None:
    """Print how far apart the two models' logits are; too far is an error, which removes what was just made."""
    try:
        found = checked(RunDir(run), folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    typer.echo(f"largest difference of the logits: {found:.1e}")
