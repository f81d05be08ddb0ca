"""regard export"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regard.cli import options
from regard.cli.import_ import say_difference
from regard.cli.output import note
from regard.interop import export_run
from regard.run_dir import RunDir


class ExportFormat(StrEnum):
    """Whose files to write."""

    huggingface = "huggingface"


def export(
    run: options.RunPath,
    to: Annotated[ExportFormat, typer.Option(help="Whose files to write.")],
    out: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Compare tokens and logits with transformers'; one that fails leaves nothing behind."
        ),
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a run in somebody else's layout.

    huggingface: a directory for transformers, with config.json, model.safetensors and tokenizer: gpt as
    GPT2LMHeadModel, bert as BertForMaskedLM or BertForSequenceClassification, transformer (norms after, positions in
    halves) as MarianMTModel. Settings that have no counterpart there are named.

    Examples:

        regard export runs/gpt2 --to huggingface --out gpt2-again --check
    """
    folder = export_run(RunDir(run), out)
    if check:
        say_difference(run, folder, made=folder)
    if not quiet:
        note(f"{folder} is ready for transformers")
