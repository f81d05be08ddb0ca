"""regard generate"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from regard.api import load
from regard.cli import decoders, options
from regard.cli.groups import LoadOptions, grouped
from regard.cli.inputs import Chunk, Input, InputLine
from regard.cli.output import note, text_output
from regard.cli.progress import progress_bar
from regard.errors import UserError
from regard.tasks.generator import Generation, Generator

SEPARATOR = "---"  # the line between two texts
MAX_SAMPLES = 10_000  # samples of a prompt, which are in memory together


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen, and where a text ends."""

    temperature: Annotated[
        float | None,
        typer.Option(metavar="X", min=0.01, help="Below 1 favours likely tokens. [default: the recipe's, or 0.8]"),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Sample from the k most likely tokens only; 0: from all. [default: the recipe's, or 0]",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            max=1.0,
            help="Sample from the most likely tokens whose probabilities add up to this. "
            "[default: the recipe's, or 0.95]",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=1.0,
            help="Above 1 makes tokens that have occurred less likely. [default: the recipe's, or 1]",
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; \\n is a newline, \\t a tab. Repeatable."),
    ] = None
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The random seed.")] = 0
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most likely token instead of sampling.")] = (
        False
    )

    def stops(self) -> list[str]:
        """The texts that end a continuation."""
        stops = [text.replace("\\n", "\n").replace("\\t", "\t") for text in self.stop or []]
        for text in stops:
            options.check_utf8(**{"--stop": text})
        return stops

    def settings(self, samples: int) -> dict[str, object]:
        """The decoding settings that were given, and the seed."""
        sampling = options.changed(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        if self.greedy and (sampling or samples > 1):
            option = next(iter(sampling), "samples").replace("_", "-")
            raise UserError(f"--{option} has no effect with --greedy, which does not sample")
        settings = options.changed(repetition_penalty=self.repetition_penalty, **sampling)
        return settings | ({"method": "beam", "beam": 1} if self.greedy else {}) | {"seed": self.seed}


@dataclass(frozen=True)
class ChatOptions:
    """Conversations instead of plain texts."""

    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Prompts are messages, put into the chat template that the model was imported with."
        ),
    ] = False
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --chat: the system message before each prompt.")
    ] = None

    def check(self) -> None:
        if self.system is not None and not self.chat:
            raise UserError("--system is a message of a conversation: use it with --chat")


@grouped
def generate(
    run: options.RunPath,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT", help="Texts to continue; '' starts a new one. [default: the lines of standard input]"
        ),
    ] = None,
    *,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of tokens to generate.")] = 100,
    samples: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_SAMPLES, help="Generate this many continuations of each prompt.")
    ] = 1,
    sampling: SamplingOptions,
    conversation: ChatOptions,
    form: options.Format = options.OutputFormat.TEXT,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream", help="Show each text while it is generated. [default: if the output is a terminal]"
        ),
    ] = None,
    errors: options.Errors = None,
    loading: LoadOptions,
    quiet: options.Quiet = False,
) -> None:
    """Continue a text, with a language model.

    A text ends after --tokens tokens, at the model's end-of-text token, or before a --stop text. Several texts are
    separated by lines of three dashes. What is generated for a prompt depends on the prompt, its number, the seed and
    the settings, not on the other prompts.

    The model sees at most model.max_positions tokens of its recipe, the context. A prompt that is longer keeps its last
    tokens, half a context of them, with a warning. When the context is full during generation, its first half is
    dropped.

    Examples:

        regard generate runs/stories 'Once upon a time'

        regard generate runs/stories 'Once upon a time' --samples 3 --temperature 0.6 --stop '\\n'

        regard generate runs/stories --greedy --format jsonl < prompts.txt
    """
    stops = sampling.stops()
    for text in prompt or []:
        options.check_utf8(PROMPT=text)
    settings = sampling.settings(samples)
    if stream and (form is options.OutputFormat.JSONL or samples > 1):
        raise UserError("--stream shows one plain text after another: use it without --format jsonl and --samples")
    conversation.check()
    generator = decoders.generator(load(run, **loading.settings()), settings)
    if conversation.chat:
        generator = replace(generator, chat=decoders.chat(run, generator.tokenizer, conversation.system))
    source = Input(prompt, on_error=errors)
    if source.interactive and not quiet:
        note("Type the beginning of a text and press Enter; Ctrl-D ends.")
    streaming = (sys.stdout.isatty() if stream is None else stream) and form is options.OutputFormat.TEXT
    job = _GenerateJob(generator, samples, tokens, stops, form, streaming, quiet)
    for chunk in source.chunks():
        if not quiet:
            chunk.warn()
        job.write(chunk)


class _GenerateJob:
    """Writes the continuations of chunks of prompts."""

    def __init__(
        self,
        generator: Generator,
        samples: int,
        tokens: int,
        stop: Sequence[str],
        form: options.OutputFormat,
        stream: bool,
        quiet: bool,
    ) -> None:
        self.generator, self.samples, self.tokens, self.stop = generator, samples, tokens, stop
        self.form, self.stream, self.quiet = form, stream, quiet
        self.out = text_output()
        self.texts = 0  # written so far

    def write(self, chunk: Chunk) -> None:
        if self.stream and self.samples == 1:
            for number, line in enumerate(chunk.lines, chunk.first):
                if line.skipped:
                    self._separate()
                    self.out.write("\n")
                else:
                    self._stream(number, line.text)
            return
        with progress_bar("generating", len(chunk.lines) * self.samples, self.quiet) as progress:
            generations = self.generator(
                chunk.texts,
                samples=self.samples,
                tokens=self.tokens,
                stop=self.stop,
                first=chunk.first,
                progress=progress,
            )
        for number, (line, generation) in enumerate(zip(chunk.lines, generations, strict=True), chunk.first + 1):
            self._warn(number, generation)
            if self.form is options.OutputFormat.JSONL:
                self.out.write(_json(line, generation) + "\n")
                continue
            for text in generation.texts:
                self._separate()
                before = "" if self.generator.chat is not None else generation.prompt
                self.out.write("\n" if line.skipped else f"{before}{text}\n")
        self.out.flush()

    def _stream(self, number: int, prompt: str) -> None:
        """Write the prompt and its continuation token by token."""
        written = ""

        def show(line: int, sample: int, text: str) -> None:
            nonlocal written
            self.out.write(text[len(written) :])
            self.out.flush()
            written = text

        self._separate()
        self.out.write("" if self.generator.chat is not None else prompt)
        self.out.flush()
        (generation,) = self.generator([prompt], tokens=self.tokens, stop=self.stop, first=number, watch=show)
        show(0, 0, generation.text)
        self.out.write("\n")
        self.out.flush()
        self._warn(number + 1, generation)

    def _separate(self) -> None:
        """Write a separator, except before the first text."""
        if self.texts:
            self.out.write(f"{SEPARATOR}\n")
        self.texts += 1

    def _warn(self, number: int, generation: Generation) -> None:
        if generation.truncated and not self.quiet:
            limit = self.generator.longest
            note(f"regard: warning: prompt {number} has more than {limit} tokens: its beginning was dropped")


def _json(line: InputLine, generation: Generation) -> str:
    entry = generation.as_dict() | {"prompt": line.text}
    for sample in entry["samples"]:
        sample["score"] = round(sample["score"], 4)
    if line.skipped:
        entry["samples"] = []
    return json.dumps(entry | ({"error": line.error} if line.error is not None else {}), ensure_ascii=False)
