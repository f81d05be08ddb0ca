"""Options that several verbs share, and how their values are checked."""

from __future__ import annotations

import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regard.arguments import MAX_BEAM
from regard.errors import RegardWarning, UserError

MAX_THREADS = 1024  # each takes memory, and PyTorch fails on numbers that exceed a C integer


class OutputFormat(StrEnum):
    """The format of each line of output."""

    TEXT = "text"
    JSONL = "jsonl"


class OnError(StrEnum):
    """The treatment of lines that are not valid UTF-8."""

    REPLACE = "replace"
    SKIP = "skip"
    STOP = "stop"


class MaskMethodOption(StrEnum):
    """How a word is hidden from the model: replaced by the unknown token, or removed."""

    UNKNOWN = "unknown"
    DROP = "drop"


class FillOption(StrEnum):
    """The values of hidden pixels."""

    GREY = "grey"
    BLACK = "black"
    BLUR = "blur"


RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, such as runs/en-es.", show_default=False)
]
With = Annotated[
    list[Path] | None,
    typer.Option(
        "--with",
        metavar="RUN",
        help="Decode with an ensemble of RUN and this run, which must have the same task and vocabulary (such as one "
        "trained with another --seed): their probabilities are averaged. Other settings are those of RUN. Repeatable.",
        show_default=False,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Which weights of RUN to use: best (on the validation data), last, average (of the last snapshots), "
        "step-N (a snapshot), or a file.",
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto (a GPU if there is one), cpu, cuda or cuda:N.")
]
Precision = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="fp32, bf16 or int8; auto is bf16 on a GPU for models trained in bf16, else fp32. int8 is faster on a CPU "
        "and slightly less accurate.",
    ),
]


def _ignore_warnings(quiet: bool) -> bool:
    if quiet:
        warnings.simplefilter("ignore", RegardWarning)  # until the command ends
    return quiet


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", callback=_ignore_warnings, help="Show no progress and no warnings.")
]
Errors = Annotated[
    OnError | None,
    typer.Option(
        metavar="HOW",
        help="What to do with a line that is not valid UTF-8: replace its invalid bytes by U+FFFD, skip it (its output "
        "is blank), or stop. [default: replace; stop for a file]",
        show_default=False,
    ),
]


def _use_threads(count: int | None) -> int | None:
    if count is not None:
        import torch  # here, because verbs without this option do not need torch

        torch.set_num_threads(count)
    return count


Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=MAX_THREADS,
        callback=_use_threads,
        help="Number of CPU threads. [default: $OMP_NUM_THREADS, or one for each core]",
        show_default=False,
    ),
]
Format = Annotated[
    OutputFormat, typer.Option("--format", help="Plain text, or one JSON object for each line of input.")
]
Beam = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=MAX_BEAM,
        help="Beam size; 1 is greedy search. [default: the recipe's]",
        show_default=False,
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        min=0,
        help="Exponent of the length penalty (alpha of GNMT): larger values favour longer outputs. "
        "[default: the recipe's]",
        show_default=False,
    ),
]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="Ignore case when scoring (the signature says so).")]
Moses = Annotated[
    str | None,
    typer.Option(
        metavar="LANG",
        help="Also compute lower-cased, Moses-tokenised BLEU, as older papers report it; LANG is the target language.",
        show_default=False,
    ),
]
MosesReference = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --moses: a tokenised reference as published. [default: the references, tokenised]",
        show_default=False,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="FOLDER", help="Look for the recipe's data files in this folder.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def changed(**settings: object) -> dict[str, object]:
    """Return only the settings that are not None."""
    return {key: value for key, value in settings.items() if value is not None}


def folder(data: Path | None) -> Path | None:
    """Check that the folder of `--data` exists."""
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data}: {'not a folder' if data.exists() else 'no such folder'}")
    return data


def with_folder(changes: list[str] | None, data: Path | None) -> list[str]:
    """The changes of `--set`, and the folder of `--data` as one of them."""
    found = [] if folder(data) is None else [f"data.folder={Path(str(data)).resolve()}"]
    return [*(changes or []), *found]


def check_utf8(**texts: str | None) -> None:
    """Check that texts of the command line are UTF-8; Python turns other bytes into unpaired surrogates."""
    for name, text in texts.items():
        if text is not None and any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"{name}: not valid UTF-8: {text!a}")


def refuse(where: str, **given: object) -> None:
    """Raise an error if one of these options was given, because it has no effect there."""
    for name in changed(**given):
        raise UserError(f"--{name.replace('_', '-')} has no effect {where}")
