"""regard translate"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from regard import __version__, tasks, tensor_io
from regard.api import Model, load
from regard.batch import BatchTranslator, find_shards, translate_folder
from regard.cli import decoders, options
from regard.cli.inputs import Chunk, Input, InputLine
from regard.cli.output import note, text_output, written
from regard.cli.partial import partial_output
from regard.cli.progress import progress_bar
from regard.data.workers import usable_cores
from regard.errors import UserError
from regard.run_dir import RunDir
from regard.tasks.confidence import Confidence, confidence
from regard.tasks.documents import Align, translate_documents
from regard.tasks.glossary import Glossary
from regard.tasks.translator import Answer, Translator
from regard.text import UNK


class BatchEngine(StrEnum):
    """What runs the translation."""

    LOCAL = "local"
    RAY = "ray"


def translate(
    run: options.RunPath,
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Sentences to translate. [default: the lines of standard input]"),
    ] = None,
    others: options.With = None,
    input: Annotated[
        Path | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="Translate the lines of a file (plain, .gz, .xz or .zst); with --engine ray, of the files that a "
            "pattern such as 'in/*.jsonl.zst' matches.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to this file; FILE.part until it is complete; with --engine ray, a folder. "
            "[default: standard output]",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted --output FILE from its FILE.part.")
    ] = False,
    errors: options.Errors = None,
    form: options.Format = options.OutputFormat.TEXT,
    markup: Annotated[
        bool,
        typer.Option(
            "--markup",
            help="The lines are HTML: tags go to the words that the attention aligns with theirs, and the text between "
            "them is translated.",
        ),
    ] = False,
    nbest: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Write this many translations of each line, each after its score and a tab, best first. The beam is "
            "at least this wide.",
        ),
    ] = 1,
    beam: options.Beam = None,
    length_penalty: options.LengthPenalty = None,
    sample: Annotated[bool, typer.Option("--sample", help="Sample translations instead of searching.")] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0.01, help="With --sample: below 1 favours likely tokens. [default: the recipe's]"
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="With --sample: only the k most likely tokens; 0: all. [default: the recipe's]"
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            max=1.0,
            help="With --sample: only the most likely tokens whose probabilities add up to this. "
            "[default: the recipe's]",
        ),
    ] = None,
    min_length: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Minimum number of output tokens. [default: the recipe's]")
    ] = None,
    no_repeat_ngram: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Never repeat an n-gram of this length; 0: allow it. [default: the recipe's]"
        ),
    ] = None,
    prefix: Annotated[str | None, typer.Option(metavar="TEXT", help="Begin every translation with this text.")] = None,
    source_tag: Annotated[
        str | None, typer.Option(metavar="TAG", help="Tag before every source. [default: the recipe's]")
    ] = None,
    target_tag: Annotated[
        str | None, typer.Option(metavar="TAG", help="Tag before every translation. [default: the recipe's]")
    ] = None,
    glossary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Terms and their translations, one entry per line: term, tab, translation, and more tabs and forms of "
            "which any may appear; a form after ! must not. Warns of terms that could not be met.",
            show_default=False,
        ),
    ] = None,
    confidences: Annotated[
        bool,
        typer.Option(
            "--confidence",
            help="With --format jsonl: how likely each translation and each of its words is right, calibrated if "
            "`regard calibrate` was run.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="With --sample: the random seed.")] = 0,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    threads: options.Threads = None,
    engine: Annotated[
        BatchEngine, typer.Option(help="local: in this process; ray: many files, on this machine or a cluster.")
    ] = BatchEngine.LOCAL,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With --engine ray: processes. [default: one per core]")
    ] = None,
    gpus_per_worker: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="With --engine ray: GPUs of each worker. [default: 0]")
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --engine ray: the field of .jsonl files to translate. [default: text]"),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Translate sentences, a file, or standard input, line by line.

    Every line of input gives one line of output (with --nbest N, N lines). Blank lines stay blank. A line longer than
    the model's maximum is truncated, with a warning. Lines from a pipe are translated as they arrive.

    With --output, an interrupted translation is kept in FILE.part, and the same command with --resume continues it; the
    result is the same as without the interruption.

    With --engine ray, workers translate whole files into the folder --output, each under its own name; JSON objects
    get a field "translation". A file appears when it is complete, so that the same command continues where it stopped.

    Examples:

        regard translate runs/en-es 'this cat is very large'

        regard translate runs/en-es --engine ray --input 'in/*.jsonl.zst' --output out/ --workers 8

        regard translate runs/en-es < in.txt > out.txt

        regard translate runs/en-es -i in.txt -o out.txt --resume

        regard translate runs/en-es --nbest 3 --format jsonl 'the dog sees the cat'

        regard translate runs/en-es --glossary terms.tsv 'the dog sees the cat'

        regard translate runs/en-es --markup 'the <b>black</b> cat'

        regard translate runs/seed-1 --with runs/seed-2 < in.txt > out.txt
    """
    for sentence in text or []:
        options.check_utf8(TEXT=sentence)
    options.check_utf8(**{"--prefix": prefix})
    if text and input is not None:
        raise UserError("give either sentences or --input, not both")
    if resume and (output is None or (output.exists() and not output.is_file())):
        raise UserError("--resume continues a file: name it with --output")
    if beam is not None and beam < nbest and not sample:
        raise UserError(f"--nbest {nbest} needs a beam of at least {nbest}, but --beam is {beam}")
    if markup and (confidences or nbest > 1 or form is options.OutputFormat.JSONL):
        raise UserError("--markup writes plain lines: it takes neither --format jsonl nor --nbest nor --confidence")
    if confidences and form is not options.OutputFormat.JSONL:
        raise UserError("--confidence needs --format jsonl")
    if engine is BatchEngine.RAY:
        options.refuse("with --engine ray", text=text or None, resume=resume or None, prefix=prefix, **{"with": others})
        options.refuse("with --engine ray", glossary=glossary, confidence=confidences or None, errors=errors)
        options.refuse("with --engine ray", nbest=None if nbest == 1 else nbest, threads=threads)
        search: dict[str, Any] = options.changed(beam=beam, length_penalty=length_penalty, min_length=min_length)
        search |= options.changed(no_repeat_ngram=no_repeat_ngram, source_tag=source_tag, target_tag=target_tag)
        search |= options.changed(temperature=temperature, top_k=top_k, top_p=top_p)
        search |= {"method": "sample", "seed": seed} if sample else {}
        loading: dict[str, Any] = {"weights": weights, "device": device, "precision": precision}
        sent = BatchTranslator(run, column=column or "text", **loading, **search)
        _with_ray(sent, input, output, workers, gpus_per_worker or 0.0, quiet)
        return
    options.refuse("without --engine ray", workers=workers, gpus_per_worker=gpus_per_worker, column=column)
    terms = None if glossary is None else Glossary.read(glossary)
    if terms is not None and sample:
        raise UserError("--glossary has no effect with --sample: terms need a beam search")
    model = load(run, *(others or []), weights=weights, device=device, precision=precision)
    translator = _translator(
        model,
        nbest,
        sample,
        options.changed(
            beam=beam, length_penalty=length_penalty, min_length=min_length, no_repeat_ngram=no_repeat_ngram
        ),
        options.changed(temperature=temperature, top_k=top_k, top_p=top_p),
        options.changed(seed=seed, source_tag=source_tag, target_tag=target_tag, glossary=terms),
    )
    if prefix is not None and UNK in translator.tokenizers[1].encode(prefix):
        raise UserError(f"--prefix {prefix!r}: contains text that this model's vocabulary cannot express")
    source = Input([line for sentence in text or [] for line in sentence.split("\n")], input, errors)
    if source.interactive and not quiet:
        note("Type a sentence and press Enter; Ctrl-D ends.")
    judge = partial(confidence, tokenizer=translator.tokenizers[1], calibration=model.calibration)
    job = _TranslateJob(translator, form, nbest, prefix, quiet, judge if confidences else None)
    if markup:
        job = _MarkupJob(translator, form, nbest, prefix, quiet, align=model.word_links)
    if output is None:
        _to_stdout(job, source)
    elif output.exists() and not output.is_file() and not output.is_dir():
        with written(output) as out:  # a device or a pipe
            for chunk in source.chunks():
                out.writelines(line + "\n" for line in job.translate(chunk))
                out.flush()
    else:
        _to_file(job, source, output, _settings(model, job), resume)


def _with_ray(
    translator: BatchTranslator, input: Path | None, output: Path | None, workers: int | None, gpus: float, quiet: bool
) -> None:
    """Translate many files with Ray."""
    if input is None or output is None:
        raise UserError("--engine ray needs --input 'PATTERN' and --output FOLDER")
    run = RunDir(Path(translator.run))  # report mistakes before workers start
    tasks.of(run.recipe).require_verb("translate", run.path)
    run.checkpoint(translator.loading["weights"])
    total = len(find_shards(str(input), output))
    with progress_bar("files", total, quiet) as progress:
        files, lines = translate_folder(
            translator, str(input), output, workers=workers or usable_cores(), gpus=gpus, progress=progress
        )
    if not quiet:
        note(f"{output} has the translations of {files:,} files; {lines:,} lines are new")


def _translator(
    model: Model,
    nbest: int,
    sample: bool,
    search: dict[str, object],
    sampling: dict[str, object],
    other: dict[str, Any],
) -> Translator:
    """Make a translator with the options that were given."""
    recipe = model.run.recipe.decoding
    if sampling and not sample and recipe.method != "sample":
        raise UserError(f"--{next(iter(sampling)).replace('_', '-')} has no effect without --sample")
    settings = {"beam": recipe.beam, **search, **sampling} | ({"method": "sample"} if sample else {})
    settings["beam"] = max(settings["beam"], nbest)  # type: ignore[call-overload]
    return replace(decoders.translator(model, settings), **other)


def _to_stdout(job: _TranslateJob, source: Input) -> None:
    out = text_output()
    for chunk in source.chunks():
        for line in job.translate(chunk):
            out.write(line + "\n")
        out.flush()


def _to_file(job: _TranslateJob, source: Input, path: Path, settings: dict[str, Any], resume: bool) -> None:
    with partial_output(path, settings, resume) as out:
        if out.lines:
            out.skip(line.text for line in source.skip(out.lines))
            if not job.quiet:
                note(f"resuming after line {out.lines:,}")
        quiet = job.quiet or source.interactive
        with progress_bar("translating", source.count, quiet, done=source.done) as progress:
            for chunk in source.chunks():
                out.write((line.text for line in chunk.lines), list(job.translate(chunk, progress)))


def _settings(model: Model, job: _TranslateJob) -> dict[str, Any]:
    """Everything that the output depends on, apart from the input."""
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
        "confidence": job.judge is not None,
        "markup": isinstance(job, _MarkupJob),
        "glossary": [] if translator.glossary is None else [asdict(entry) for entry in translator.glossary.entries],
    }


def _confidence_fields(found: Confidence) -> dict[str, object]:
    words = [{"text": word.text, "confidence": round(word.confidence, 4)} for word in found.words]
    return {"confidence": round(found.sentence, 4), "calibrated": found.calibrated, "words": words}


class _TranslateJob:
    """Turns chunks of input lines into lines of output."""

    def __init__(
        self,
        translator: Translator,
        form: options.OutputFormat,
        nbest: int,
        prefix: str | None,
        quiet: bool,
        judge: Callable[[Answer], Confidence] | None = None,
    ) -> None:
        self.translator, self.form, self.nbest, self.prefix, self.quiet = translator, form, nbest, prefix, quiet
        self.judge = judge

    def translate(self, chunk: Chunk, progress: Callable[[int], None] | None = None) -> Iterator[str]:
        """Yield the lines of output for a chunk of input; `progress` is called with the number of lines done."""
        texts = chunk.texts
        prefixes = None if self.prefix is None else [self.prefix] * len(texts)
        if not self.quiet:
            chunk.warn()
        answers = self.translator(texts, nbest=self.nbest, first=chunk.first, prefixes=prefixes, progress=progress)
        if progress is not None:
            progress(sum(not text.strip() for text in texts))  # blank lines, which the translator does not count
        for number, (line, answer) in enumerate(zip(chunk.lines, answers, strict=True), chunk.first + 1):
            if answer.truncated and not self.quiet:
                limit = self.translator.budget.source
                note(f"regard: warning: line {number} has more than {limit} tokens and was truncated")
            for requirement in () if self.quiet else answer.unmet:
                note(f"regard: warning: line {number}: {requirement}")
            yield from self._lines(line, answer)

    def _lines(self, line: InputLine, answer: Answer) -> Iterator[str]:
        """Format the translations of one line."""
        scores = [round(hypothesis.score, 4) for hypothesis in answer.hypotheses] or [0.0]
        if self.form is options.OutputFormat.JSONL:
            nbest = [{"text": text, "score": score} for text, score in zip(answer.texts, scores, strict=True)]
            entry: dict[str, object] = {"source": line.text, **nbest[0], "truncated": answer.truncated}
            if line.error is not None:
                entry["error"] = line.error
            if self.judge is not None:
                entry.update(_confidence_fields(self.judge(answer)))
            if self.translator.glossary is not None:
                entry["unmet"] = [str(requirement) for requirement in answer.unmet]
            if self.nbest > 1:
                entry["nbest"] = nbest
            yield json.dumps(entry, ensure_ascii=False)
        elif self.nbest == 1:
            yield answer.texts[0]
        else:
            lines = [f"{score:.4f}\t{text}" for text, score in zip(answer.texts, scores, strict=True)]
            yield from lines + [""] * (self.nbest - len(lines))  # the same number for every line of input


class _MarkupJob(_TranslateJob):
    """Translates lines of HTML."""

    def __init__(self, *settings: Any, align: Align) -> None:
        super().__init__(*settings)
        self.align = align

    def translate(self, chunk: Chunk, progress: Callable[[int], None] | None = None) -> Iterator[str]:
        """Yield the lines of output for a chunk of input."""
        if not self.quiet:
            chunk.warn()
        found = translate_documents(self.translator, self.align, chunk.texts, format="html", prefix=self.prefix)
        if progress is not None:
            progress(len(found))
        for number, translated in enumerate(found, chunk.first + 1):
            unmet = [requirement for answer in translated.answers for requirement in answer.unmet]
            for requirement in () if self.quiet else unmet:
                note(f"regard: warning: line {number}: {requirement}")
            yield translated.texts[0]
