"""regard export"""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from regard import tasks
from regard.cli import options
from regard.cli.import_ import CHECK, print_difference
from regard.cli.output import note
from regard.errors import UserError
from regard.interop.exported import OPENERS, verify
from regard.registry import EXPORTERS
from regard.run_dir import RunDir


def formats() -> dict[str, str]:
    """The formats and the first lines of their docstrings, read from the source, so that help need not import them."""
    found: dict[str, str] = {}
    for file in sorted((Path(__file__).parents[1] / "interop").glob("*.py")):
        source = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "@EXPORTERS.register" in source else ():
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                name = re.fullmatch(r"EXPORTERS\.register\('(.+)'\)", ast.unparse(node.decorator_list[0]))
                found |= {name[1]: (ast.get_docstring(node) or "").partition("\n")[0]} if name else {}
    return found


FORMATS = " ".join(f"{name}: {about}" for name, about in formats().items())


def export(
    run: options.RunPath,
    to: Annotated[str, typer.Option(metavar="FORMAT", help=FORMATS, show_default=False)],
    out: Annotated[Path, typer.Option(metavar="PATH", help="The folder or file to make.", show_default=False)],
    check: Annotated[bool, CHECK] = False,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Do not compare the export with RUN on texts, images or sounds.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a run in the format of another library.

    huggingface: a directory for transformers, with config.json, model.safetensors, the tokenizer and settings for
    generation. gpt becomes GPT2LMHeadModel or GPTNeoXForCausalLM (rotary positions); bert BertForMaskedLM or
    BertForSequenceClassification; transformer MarianMTModel or PegasusForConditionalGeneration (norms first); vit
    ViTForImageClassification; speech, if it was imported, WhisperForConditionalGeneration.

    ctranslate2: a directory for CTranslate2, of transformer and gpt. onnx: encoder.onnx and decoder.onnx (one step with
    cache) of transformer, decoder.onnx of gpt, model.onnx of bert; translate.py in the same folder runs the first two
    with onnxruntime, without regard.

    Settings that a format cannot express are an error that names them. At the end, RUN and the export process 200
    held-out texts (or 32 random images, or 3 random sounds); if results differ other than by rounding, the command
    fails and removes what it made.

    Examples:

        regard export runs/en-es --to ctranslate2 --out en-es-ct2

        regard export runs/gpt2 --to huggingface --out gpt2-again --check
    """
    tasks.of(RunDir(run).recipe).require_verb("export", run)
    if to not in EXPORTERS:
        *names, last = EXPORTERS
        raise UserError(f"--to {to}: must be {', '.join(names)} or {last}")
    if check and to != "huggingface":
        raise UserError("--check compares with transformers: it needs --to huggingface")
    written = EXPORTERS[to](RunDir(run), out)
    if check:
        print_difference(run, written, made=written)
    if not unverified:
        _verify(RunDir(run), written, to, quiet)
    if not quiet:
        note(f"{written} is ready")


def _verify(run: RunDir, written: Path, to: str, quiet: bool) -> None:
    """Compare an export with its run; remove it if they differ."""
    try:
        found = verify(run, written, to)
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise
    if quiet or to not in OPENERS:
        return
    if found is None:
        note(f"regard: warning: {written} was not compared with {run.path}: {OPENERS[to][0]} is not installed")
    for agreement in found or []:
        note(str(agreement))
