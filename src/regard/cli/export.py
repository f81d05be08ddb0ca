"""regard export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard import tasks
from regard.cli import options
from regard.cli.import_ import CHECK, print_difference
from regard.cli.output import note
from regard.errors import UserError
from regard.registry import EXPORTERS
from regard.run_dir import RunDir

FORMATS = " ".join(f"{name}: {(export.__doc__ or '').splitlines()[0]}" for name, export in EXPORTERS.items())


def export(
    run: options.RunPath,
    to: Annotated[str, typer.Option(metavar="FORMAT", help=FORMATS, show_default=False)],
    out: Annotated[Path, typer.Option(metavar="PATH", help="The folder or file to make.", show_default=False)],
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
    if to not in EXPORTERS:
        raise UserError(f"--to {to}: must be {' or '.join(EXPORTERS)}")
    if check and to != "huggingface":
        raise UserError("--check compares with transformers: it needs --to huggingface")
    written = EXPORTERS[to](RunDir(run), out)
    if check:
        print_difference(run, written, made=written)
    if not quiet:
        note(f"{written} is ready")
