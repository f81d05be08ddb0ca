"""regard generate"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from regard.api import load
from regard.cli import decoders, options
from regard.cli.inputs import Chunk, Input, Line
from regard.cli.output import note, text_output
from regard.cli.progress import counted
from regard.decoding.generate import Generation, Generator
from regard.errors import UserError

BETWEEN = "---"  # the line between two texts


def generate(
    run: options.RunPath,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Texts to continue; '' begins one. None: standard input, one a line."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Write at most this many tokens.")] = 100,
    samples: Annotated[int, typer.Option(min=1, help="Continue each prompt this many times.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Below 1 is more careful. [default: the recipe's, or 0.8]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Only the k likeliest tokens; 0: all.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Likeliest tokens up to this sum. [default: the recipe's, or 0.95]"),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(min=1.0, help="Above 1: what was said already is less likely again.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text (\\n is a newline). May be given several times."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another text.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token; nothing is random.")] = False,
    form: Annotated[
        options.OutputFormat, typer.Option("--format", help="Plain text, or a JSON object a prompt.")
    ] = options.OutputFormat.text,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Show each text as it comes. [default: in a terminal]"),
    ] = None,
    weights: options.Weights = "best",
    errors: options.Errors = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Continue a text, with a run that was trained on plain text.

    The text ends after --tokens tokens, where the model ends it, or before a --stop. Several texts have a line --- in
    between. A prompt's text depends on the prompt, its number, the seed and the settings, never on the
    other prompts.

    A model sees so many tokens at once: its context, model.max_positions of its recipe. A longer prompt loses its
    beginning, with a warning: the last half of the context's worth is kept. When the context is full while more tokens
    are wanted, the model goes on from the last half of what it has.

    Examples:

        regard generate runs/stories 'Once upon a time'

        regard generate runs/stories 'Once upon a time' --samples 3 --temperature 0.6 --stop '\\n'

        regard generate runs/stories --greedy --format jsonl < prompts.txt
    """
    stops = [text.replace("\\n", "\n").replace("\\t", "\t") for text in stop or []]
    for text in prompt or []:
        options.readable(PROMPT=text)
    for text in stops:
        options.readable(**{"--stop": text})
    random = options.changed(temperature=temperature, top_k=top_k, top_p=top_p)
    if greedy and (random or samples > 1):
        idle = next(iter(random), "samples").replace("_", "-")
        raise UserError(f"--{idle} has no effect with --greedy, which draws nothing at random")
    if stream and (form is options.OutputFormat.jsonl or samples > 1):
        raise UserError(
            "--stream shows one plain text after the other: it goes with neither --format jsonl nor --samples"
        )
    settings = options.changed(repetition_penalty=repetition_penalty, **random)
    settings |= {"method": "beam", "beam": 1} if greedy else {}
    continuer = decoders.generator(
        load(run, weights=weights, device=device, precision=precision), {**settings, "seed": seed}
    )
    source = Input(prompt, on_error=errors)
    if source.interactive and not quiet:
        note("Type the beginning of a text and press Enter; Ctrl-D ends.")
    shown = sys.stdout.isatty() if stream is None else stream
    job = _GenerateJob(continuer, samples, tokens, stops, form, shown and form is options.OutputFormat.text, quiet)
    for chunk in source.chunks():
        if not quiet:
            chunk.warn()
        job.answer(chunk)


class _GenerateJob:
    """Writes out what follows chunks of prompts."""

    def __init__(
        self,
        continuer: Generator,
        samples: int,
        tokens: int,
        stop: Sequence[str],
        form: options.OutputFormat,
        stream: bool,
        quiet: bool,
    ) -> None:
        self.continuer, self.samples, self.tokens, self.stop = continuer, samples, tokens, stop
        self.form, self.stream, self.quiet = form, stream, quiet
        self.out = text_output()
        self.texts = 0  # written so far

    def answer(self, chunk: Chunk) -> None:
        first, prompts = chunk.first, chunk.texts
        if self.stream and self.samples == 1:
            for number, line in enumerate(chunk.lines, first):
                if line.skipped:
                    self._next()
                    self.out.write("\n")
                else:
                    self._as_it_comes(number, line.text)
            return

        with counted("writing", len(prompts) * self.samples, self.quiet) as progress:
            found = self.continuer(
                prompts, samples=self.samples, tokens=self.tokens, stop=self.stop, first=first, progress=progress
            )
        for number, (line, one) in enumerate(zip(chunk.lines, found, strict=True), first + 1):
            self._warn(number, one)
            if self.form is options.OutputFormat.jsonl:
                self.out.write(_json(line, one) + "\n")
                continue
            for text in one.texts:
                self._next()
                self.out.write("\n" if line.skipped else f"{one.prompt}{text}\n")
        self.out.flush()

    def _as_it_comes(self, number: int, prompt: str) -> None:
        written = ""

        def show(line: int, sample: int, text: str) -> None:
            nonlocal written
            self.out.write(text[len(written) :])
            self.out.flush()
            written = text

        self._next()
        self.out.write(prompt)
        self.out.flush()
        (found,) = self.continuer([prompt], tokens=self.tokens, stop=self.stop, first=number, watch=show)
        show(0, 0, found.text)
        self.out.write("\n")
        self.out.flush()
        self._warn(number + 1, found)

    def _next(self) -> None:
        """A line between texts."""
        if self.texts:
            self.out.write(f"{BETWEEN}\n")
        self.texts += 1

    def _warn(self, number: int, found: Generation) -> None:
        if found.truncated and not self.quiet:
            most = self.continuer.longest
            what = f"prompt {number} is longer than the {most} tokens that this model sees: its beginning was left out"
            note(f"regard: warning: {what}")


def _json(line: Line, found: Generation) -> str:
    entry = found.as_dict() | {"prompt": line.text}
    for sample in entry["samples"]:
        sample["score"] = round(sample["score"], 4)
    if line.skipped:
        entry["samples"] = []
    return json.dumps(entry | ({"error": line.error} if line.error is not None else {}), ensure_ascii=False)
