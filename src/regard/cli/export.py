"""regard export"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regard import tasks
from regard.cli import options
from regard.cli.import_ import CHECK, print_difference
from regard.cli.output import note
from regard.interop import export_run
from regard.run_dir import RunDir


class ExportFormat(StrEnum):
    """The layout of the exported files."""

    HUGGINGFACE = "huggingface"


def export(
    run: options.RunPath,
    to: Annotated[ExportFormat, typer.Option(help="The format to write.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder to make.", show_default=False)],
    check: Annotated[bool, CHECK] = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a run in the format of another library.

    huggingface: a directory for transformers, with config.json, model.safetensors and the tokenizer. gpt becomes
    GPT2LMHeadModel; bert BertForMaskedLM or BertForSequenceClassification; transformer (with norm_first = false and
    sinusoidal positions in halves) MarianMTModel. Settings that the format cannot express are an error that names them.

    Examples:

        regard export runs/gpt2 --to huggingface --out gpt2-again --check
    """
    tasks.of(RunDir(run).recipe).require_verb("export", run)
    folder = export_run(RunDir(run), out)
    if check:
        print_difference(run, folder, made=folder)
    if not quiet:
        note(f"{folder} is ready for transformers")
