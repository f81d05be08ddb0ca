"""Options that several verbs share, and how their values are checked."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Protocol, TypeVar

import typer

from regard.cli.inputs import OnError
from regard.errors import RegardWarning

if TYPE_CHECKING:
    from regard.api import Model
    from regard.decoding.generate import Generator
    from regard.decoding.translate import Translator
    from regard.run_dir import RunDir


class TextOutput(Protocol):
    """Where lines of text go."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


Made = TypeVar("Made")
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


class _Escaping:
    """Standard output that is a terminal: text is shown, and what is no text in it is not obeyed."""

    def write(self, text: str) -> int:
        from regard.errors import printable

        return sys.stdout.write(printable(text))

    def flush(self) -> None:
        sys.stdout.flush()


def text_output() -> TextOutput:
    """Standard output for text that a model wrote: as it is in a file or a pipe, escaped in a terminal."""
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    return _Escaping() if sys.stdout.isatty() else sys.stdout


def note(text: str) -> None:
    """Say something on standard error; names and settings in it may come from foreign files."""
    from regard.errors import printable

    typer.echo(printable(text), err=True)


def changed(**settings: object) -> dict[str, object]:
    """Only the settings that were given."""
    return {key: value for key, value in settings.items() if value is not None}


def folder(data: Path | None) -> Path | None:
    """The folder of `--data`, which has to be there."""
    from regard.errors import UserError

    if data is not None and not data.is_dir():
        raise UserError(f"--data {data}: {'not a folder' if data.exists() else 'no such folder'}")
    return data


def readable(**texts: str | None) -> None:
    """Text from the command line has to be UTF-8; other bytes reach Python as halves of surrogate pairs."""
    from regard.errors import UserError

    for name, text in texts.items():
        if text is not None and any("\ud800" <= sign <= "\udfff" for sign in text):
            raise UserError(f"{name}: not valid UTF-8: {text!a}")


def translator(model: Model, settings: dict[str, object]) -> Translator:
    """A translator with the settings that were given."""
    return _made(model.translator, settings)


def generator(model: Model, settings: dict[str, object]) -> Generator:
    """What continues texts with the settings that were given."""
    return _made(model.generator, settings)


def _made(make: Callable[..., Made], settings: dict[str, object]) -> Made:
    """Make it with these settings; one that cannot be is an error that names its option."""
    from regard.errors import UserError
    from regard.recipes.errors import SettingFault

    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{_option(name)} {value}: must be a finite number")
    try:
        return make(**settings)
    except SettingFault as fault:
        raise UserError(f"{_option(fault.name)} {fault.value}: {fault.rule}") from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def ready(run: RunDir) -> str:
    """That a run can be used, and how."""
    recipe = run.recipe
    if recipe.fills:
        use = f"fill {run.path} 'the [MASK] sat on the mat'"
    elif recipe.data.is_text:
        use = f"generate {run.path} 'Once upon a time'"
    else:
        use = f"translate {run.path} 'a sentence'"
    return f"{run.path} is ready: regard {use}"


@contextmanager
def written(path: Path) -> Iterator[IO[str]]:
    """A text file that appears whole when the block ends well; a device or a pipe is written to as it is."""
    from regard.errors import UserError
    from regard.files import atomic_write, errno_text

    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it")
    if path.exists() and not path.is_file():
        try:
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                yield file
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(f"{path} could not be written: {errno_text(error)}") from error
        return
    with atomic_write(path.resolve()) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        yield file
