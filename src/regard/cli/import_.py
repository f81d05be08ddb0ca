"""regard import"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from regard.cli import options
from regard.cli.output import next_step, note
from regard.errors import UserError
from regard.interop import import_folder
from regard.interop.check import checked
from regard.interop.hub import local_folder
from regard.interop.peft import import_adapter, is_adapter_folder
from regard.run_dir import RunDir

CHECK = typer.Option(
    "--check",
    help="Compare tokens (or pixels) and logits with those of transformers, and print the largest difference of a "
    "logit. Above 1e-4 the command fails and removes what it made.",
)


def import_(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A Hugging Face model directory, or a name on the hub; docs/formats.md lists the models.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run directory to make.", show_default=False)],
    base: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="The run that adapters belong to, if FOLDER holds adapters of peft."),
    ] = None,
    check: Annotated[bool, CHECK] = False,
    quiet: options.Quiet = False,
) -> None:
    """Make a run from a Hugging Face model.

    The run can be used by all verbs, and trained further with regard train --from. Reads config.json, model.safetensors
    and the files of the tokenizer, or of the image processor; unpickles nothing and runs no code of the model.

    Examples:

        regard import opus-mt-en-de --out runs/en-de --check

        regard import Helsinki-NLP/opus-mt-en-de --out runs/en-de

        regard import adapter --base runs/llama --out runs/tuned

        regard import vit-base-patch16-224 --out runs/vit --check

        regard train runs/gpt2/recipe.toml --from runs/gpt2 --out runs/b --set data.text=a.txt --set data.held_out=0.1
    """
    folder = local_folder(folder)
    if base is not None or is_adapter_folder(folder):
        if base is None or check:
            raise UserError(f"{folder} holds adapters: name the run that they belong to with --base, without --check")
        run = import_adapter(folder, RunDir(base), out)
    else:
        run = import_folder(folder, out)
    if check:
        print_difference(run.path, folder, made=run.path)
    if not quiet:
        note(f"{run.recipe.about}; {next_step(run)}")


def print_difference(run: Path, folder: Path, made: Path) -> None:
    """Print the largest difference between the logits of both models; remove `made` if it is too large."""
    try:
        difference = checked(RunDir(run), folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    typer.echo(f"largest difference of the logits: {difference:.1e}")
