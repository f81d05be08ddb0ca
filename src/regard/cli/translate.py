"""regard translate"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from regard import __version__, tensor_io
from regard.api import Model, load
from regard.cli import decoders, options
from regard.cli.inputs import Chunk, Input, Line
from regard.cli.output import note, text_output, written
from regard.cli.partial import kept
from regard.cli.progress import counted
from regard.decoding.translate import Answer, Translator
from regard.errors import UserError
from regard.text import UNK


def translate(
    run: options.RunPath,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Sentences. None: standard input, line by line.")
    ] = None,
    others: options.With = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="A file (plain, .gz, .xz) to translate.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write; FILE.part until it is complete. [default: stdout]"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted --output FILE from its FILE.part.")
    ] = False,
    errors: options.Errors = None,
    form: Annotated[
        options.OutputFormat, typer.Option("--format", help="Plain text, or a JSON object a line.")
    ] = options.OutputFormat.text,
    nbest: Annotated[
        int,
        typer.Option(
            min=1, help="So many translations a line, with scores, best first; searched with as many beams at least."
        ),
    ] = 1,
    beam: options.Beam = None,
    length_penalty: options.LengthPenalty = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw translations at random instead of searching.")] = False,
    temperature: Annotated[float | None, typer.Option(min=0.01, help="Sampling: below 1 is more careful.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sampling: only the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sampling: likeliest tokens up to this sum.")
    ] = None,
    min_length: Annotated[int | None, typer.Option(min=0, help="Fewest tokens of output.")] = None,
    no_repeat_ngram: Annotated[int | None, typer.Option(min=0, help="Never repeat an n-gram of this length.")] = None,
    prefix: Annotated[str | None, typer.Option(help="What every translation must begin with.")] = None,
    source_tag: Annotated[
        str | None, typer.Option(help="Tag in front of every source. [default: the recipe's]")
    ] = None,
    target_tag: Annotated[
        str | None, typer.Option(help="Tag every translation begins with. [default: the recipe's]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Sampling: another seed, other translations.")] = 0,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Translate sentences, a file, or standard input: as many lines come out as went in.

    Lines from a pipe are answered as they come. Blank lines stay blank; a line longer than the model reads is
    cut, with a warning that names it.

    With --output, what is complete when it is interrupted stays in FILE.part: the same command with --resume continues
    it, to the same result.

    Examples:

        regard translate runs/en-es 'this cat is very large'

        regard translate runs/en-es < in.txt > out.txt

        regard translate runs/en-es -i in.txt -o out.txt --resume

        regard translate runs/en-es --nbest 3 --format jsonl 'the dog sees the cat'

        regard translate runs/seed-1 --with runs/seed-2 < in.txt > out.txt
    """
    for sentence in text or []:
        options.readable(TEXT=sentence)
    options.readable(**{"--prefix": prefix})
    if text and input is not None:
        raise UserError("give sentences or --input, not both")
    if resume and (output is None or (output.exists() and not output.is_file())):
        raise UserError("--resume continues a file: name it with --output")
    if beam is not None and beam < nbest and not sample:
        raise UserError(f"--nbest {nbest} needs as many beams, and --beam is {beam}")
    model = load(run, *(others or []), weights=weights, device=device, precision=precision)
    usual = model.run.recipe.decoding
    settings = options.changed(
        method="sample" if sample else None,
        beam=max(usual.beam if beam is None else beam, nbest),
        length_penalty=length_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_length=min_length,
        no_repeat_ngram=no_repeat_ngram,
    )
    idle = options.changed(temperature=temperature, top_k=top_k, top_p=top_p)
    if idle and not sample and usual.method != "sample":
        raise UserError(f"--{next(iter(idle)).replace('_', '-')} has no effect without --sample")
    translator = replace(decoders.translator(model, settings), seed=seed)
    tags = options.changed(source_tag=source_tag, target_tag=target_tag)
    translator = replace(translator, **tags)  # type: ignore[arg-type]
    if prefix is not None and UNK in translator.tokenizers[1].encode(prefix):
        raise UserError(f"--prefix {prefix!r}: has something in it that this model cannot write")
    source = Input([line for sentence in text or [] for line in sentence.split("\n")], input, errors)
    if source.interactive and not quiet:
        note("Type a sentence and press Enter; Ctrl-D ends.")
    job = _TranslateJob(translator, form, nbest, prefix, quiet)
    if output is None:
        _to_stdout(job, source)
    elif output.exists() and not output.is_file() and not output.is_dir():
        with written(output) as out:  # a device or a pipe
            for chunk in source.chunks():
                out.writelines(line + "\n" for line in job.answer(chunk))
                out.flush()
    else:
        _to_file(job, source, output, _made_with(model, job), resume)


def _to_stdout(job: _TranslateJob, source: Input) -> None:
    out = text_output()
    for chunk in source.chunks():
        for line in job.answer(chunk):
            out.write(line + "\n")
        out.flush()


def _to_file(job: _TranslateJob, source: Input, path: Path, made_with: dict[str, Any], resume: bool) -> None:
    with kept(path, made_with, resume) as out:
        if out.lines:
            out.skip(line.text for line in source.skip(out.lines))
            if not job.quiet:
                note(f"resuming after line {out.lines:,}")
        quiet = job.quiet or source.interactive
        with counted("translating", source.count, quiet, done=source.done) as progress:
            for chunk in source.chunks():
                out.write((line.text for line in chunk.lines), list(job.answer(chunk, progress)))


def _made_with(model: Model, job: _TranslateJob) -> dict[str, Any]:
    """What the output depends on besides the input."""
    translator = job.translator
    return {
        "version": __version__,
        "weights": tensor_io.digest(tensor_io.model_tensors(model.module)),
        "device": model.device.type,
        "precision": model.precision,
        **translator.settings.model_dump(),
        "seed": translator.seed,
        "source_tag": translator.source_tag,
        "target_tag": translator.target_tag,
        "prefix": job.prefix,
        "nbest": job.nbest,
        "format": str(job.form),
    }


class _TranslateJob:
    """Turns chunks of input lines into lines of output."""

    def __init__(
        self, translator: Translator, form: options.OutputFormat, nbest: int, prefix: str | None, quiet: bool
    ) -> None:
        self.translator, self.form, self.nbest, self.prefix, self.quiet = translator, form, nbest, prefix, quiet

    def answer(self, chunk: Chunk, progress: Callable[[int], None] | None = None) -> Iterator[str]:
        """The lines of output for some lines of input; `progress` is told how many lines more are done."""
        texts = chunk.texts
        prefixes = None if self.prefix is None else [self.prefix] * len(texts)
        if not self.quiet:
            chunk.warn()
        answers = self.translator(texts, nbest=self.nbest, first=chunk.first, prefixes=prefixes, progress=progress)
        if progress is not None:
            progress(sum(not text.strip() for text in texts))  # blank lines, which the translator does not count
        for number, (line, answer) in enumerate(zip(chunk.lines, answers, strict=True), chunk.first + 1):
            if answer.truncated and not self.quiet:
                most = self.translator.room.source
                note(f"regard: warning: line {number} is longer than {most} tokens and was cut there")
            yield from self._lines(line, answer)

    def _lines(self, line: Line, answer: Answer) -> Iterator[str]:
        scores = [round(h.score, 4) for h in answer.hypotheses] or [0.0]
        if self.form is options.OutputFormat.jsonl:
            found = [{"text": t, "score": s} for t, s in zip(answer.texts, scores, strict=True)]
            entry: dict[str, object] = {"source": line.text, **found[0], "truncated": answer.truncated}
            if line.error is not None:
                entry["error"] = line.error
            if self.nbest > 1:
                entry["nbest"] = found
            yield json.dumps(entry, ensure_ascii=False)
        elif self.nbest == 1:
            yield answer.texts[0]
        else:
            written = [f"{score:.4f}\t{text}" for text, score in zip(answer.texts, scores, strict=True)]
            yield from written + [""] * (self.nbest - len(written))  # as many for every line: they can be told apart
