"""The options of `regard translate`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.arguments import MAX_BEAM
from regard.cli import options
from regard.errors import UserError


@dataclass(frozen=True)
class FileOptions:
    """The input and the output."""

    input: Annotated[
        Path | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="Translate the lines of a file (plain, .gz, .xz or .zst); with --engine ray, of the files that a "
            "pattern such as 'in/*.jsonl.zst' matches.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to this file; FILE.part until it is complete; with --engine ray, a folder. "
            "[default: standard output]",
        ),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted --output FILE from its FILE.part.")
    ] = False
    errors: options.Errors = None

    def check(self, text: list[str] | None) -> None:
        if text and self.input is not None:
            raise UserError("give either sentences or --input, not both")
        if self.resume and (self.output is None or (self.output.exists() and not self.output.is_file())):
            raise UserError("--resume continues a file: name it with --output")


@dataclass(frozen=True)
class FormOptions:
    """The form of the output."""

    form: options.Format = options.OutputFormat.TEXT
    markup: Annotated[
        bool,
        typer.Option(
            "--markup",
            help="The lines are HTML: tags go to the words that the attention aligns with theirs, and the text between "
            "them is translated.",
        ),
    ] = False
    nbest: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=MAX_BEAM,
            help="Write this many translations of each line, each after its score and a tab, best first. The beam is "
            "at least this wide.",
        ),
    ] = 1
    confidence: Annotated[
        bool,
        typer.Option(
            "--confidence",
            help="With --format jsonl: how likely each translation and each of its words is right, calibrated if "
            "`regard calibrate` was run.",
        ),
    ] = False

    def check(self) -> None:
        jsonl = self.form is options.OutputFormat.JSONL
        if self.markup and (self.confidence or self.nbest > 1 or jsonl):
            raise UserError("--markup writes plain lines: it takes neither --format jsonl nor --nbest nor --confidence")
        if self.confidence and not jsonl:
            raise UserError("--confidence needs --format jsonl")


@dataclass(frozen=True)
class SearchOptions:
    """How translations are searched for, or drawn."""

    beam: options.Beam = None
    length_penalty: options.LengthPenalty = None
    sample: Annotated[bool, typer.Option("--sample", help="Sample translations instead of searching.")] = False
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0.01, help="With --sample: below 1 favours likely tokens. [default: the recipe's]"
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="With --sample: only the k most likely tokens; 0: all. [default: the recipe's]"
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            max=1.0,
            help="With --sample: only the most likely tokens whose probabilities add up to this. "
            "[default: the recipe's]",
        ),
    ] = None
    min_length: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Minimum number of output tokens. [default: the recipe's]")
    ] = None
    no_repeat_ngram: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Never repeat an n-gram of this length; 0: allow it. [default: the recipe's]"
        ),
    ] = None
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="With --sample: the random seed.")] = 0

    def check(self, nbest: int) -> None:
        if self.beam is not None and self.beam < nbest and not self.sample:
            raise UserError(f"--nbest {nbest} needs a beam of at least {nbest}, but --beam is {self.beam}")

    def settings(self) -> dict[str, Any]:
        """The decoding settings that were given."""
        search = options.changed(
            beam=self.beam,
            length_penalty=self.length_penalty,
            min_length=self.min_length,
            no_repeat_ngram=self.no_repeat_ngram,
        )
        return {**search, **self._sampling(), **({"method": "sample"} if self.sample else {})}

    def refuse_sampling(self, method: str) -> None:
        """Raise an error if there are options of sampling, and this method does not sample."""
        if not self.sample and method != "sample":
            options.refuse("without --sample", **self._sampling())

    def _sampling(self) -> dict[str, object]:
        return options.changed(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclass(frozen=True)
class TextOptions:
    """Constraints on translations."""

    prefix: Annotated[str | None, typer.Option(metavar="TEXT", help="Begin every translation with this text.")] = None
    source_tag: Annotated[
        str | None, typer.Option(metavar="TAG", help="Tag before every source. [default: the recipe's]")
    ] = None
    target_tag: Annotated[
        str | None, typer.Option(metavar="TAG", help="Tag before every translation. [default: the recipe's]")
    ] = None
    glossary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Terms and their translations, one entry per line: term, tab, translation, and more tabs and forms of "
            "which any may appear; a form after ! must not. Warns of terms that could not be met.",
            show_default=False,
        ),
    ] = None

    def tags(self) -> dict[str, Any]:
        return options.changed(source_tag=self.source_tag, target_tag=self.target_tag)


class BatchEngine(StrEnum):
    """The program that runs the translation."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True)
class EngineOptions:
    """The engine, and its workers."""

    engine: Annotated[
        BatchEngine, typer.Option(help="local: in this process; ray: many files, on this machine or a cluster.")
    ] = BatchEngine.LOCAL
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With --engine ray: processes. [default: one per core]")
    ] = None
    gpus_per_worker: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="With --engine ray: GPUs of each worker. [default: 0]")
    ] = None
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --engine ray: the field of .jsonl files to translate. [default: text]"),
    ] = None
