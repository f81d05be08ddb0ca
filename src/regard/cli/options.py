"""Options that several verbs share, and how their values are checked."""

from __future__ import annotations

import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regard.errors import RegardWarning, UserError


class OutputFormat(StrEnum):
    """What each line of output holds."""

    text = "text"
    jsonl = "jsonl"


class OnError(StrEnum):
    """What to do with a line that is not valid UTF-8."""

    REPLACE = "replace"
    SKIP = "skip"
    STOP = "stop"


class MaskMethodOption(StrEnum):
    """What stands in the place of a hidden word."""

    unknown = "unknown"
    drop = "drop"


RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, such as runs/en-es.", show_default=False)
]
With = Annotated[
    list[Path] | None,
    typer.Option(
        "--with",
        metavar="RUN",
        help="Another run for the same task (such as one of another --seed) to decide together with: probabilities "
        "are averaged, all else is as RUN's recipe says. Repeatable.",
        show_default=False,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        metavar="best|last|average|step-N|FILE",
        help="Which of RUN's weights: the best on held-out data, the last, the mean of the last snapshots, a snapshot.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Precision = Annotated[
    str,
    typer.Option(
        help="auto: fp32 on a CPU, bf16 on a GPU (if it trained so). int8: quicker on a CPU, a little less exact.",
        metavar="auto|fp32|bf16|int8",
    ),
]


def _without_warnings(quiet: bool) -> bool:
    if quiet:
        warnings.simplefilter("ignore", RegardWarning)  # until the command ends
    return quiet


Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_without_warnings, help="No progress and no warnings.")]
Errors = Annotated[
    OnError | None,
    typer.Option(
        help="Lines that are not valid UTF-8: replace the bad bytes by U+FFFD, skip the line (its output is blank), "
        "or stop there. [default: replace; stop for a file of --input]",
        show_default=False,
    ),
]


def _use_threads(count: int | None) -> int | None:
    if count is not None:
        import torch

        torch.set_num_threads(count)
    return count


Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        callback=_use_threads,
        help="CPU threads. [default: one for each core, or $OMP_NUM_THREADS]",
        show_default=False,
    ),
]
Beam = Annotated[int | None, typer.Option(min=1, help="Hypotheses kept; 1 is greedy. [default: the recipe's]")]
LengthPenalty = Annotated[float | None, typer.Option(min=0, help="GNMT's alpha. [default: the recipe's]")]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="Score without regard to case (see the signature).")]
Moses = Annotated[
    str | None,
    typer.Option(metavar="LANG", help="Also lower-cased Moses-tokenised BLEU; LANG is the target language."),
]
MosesReference = Annotated[
    Path | None,
    typer.Option(help="For --moses: a published tokenised reference. [default: made from the references]"),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Look the recipe's files up in this folder.", show_default=False),
]


def changed(**settings: object) -> dict[str, object]:
    """Only the settings that were given."""
    return {key: value for key, value in settings.items() if value is not None}


def folder(data: Path | None) -> Path | None:
    """The folder of `--data`, which has to be there."""
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data}: {'not a folder' if data.exists() else 'no such folder'}")
    return data


def readable(**texts: str | None) -> None:
    """Text from the command line has to be UTF-8; other bytes reach Python as halves of surrogate pairs."""
    for name, text in texts.items():
        if text is not None and any("\ud800" <= sign <= "\udfff" for sign in text):
            raise UserError(f"{name}: not valid UTF-8: {text!a}")
