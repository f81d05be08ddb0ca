"""regard translate"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from regard import __version__, devices, tasks, tensor_io
from regard.api import Model, load
from regard.batch import BatchTranslator, find_shards, translate_folder
from regard.cli import decoders, options
from regard.cli.groups import LoadOptions, grouped
from regard.cli.inputs import Input
from regard.cli.output import note, text_output, written
from regard.cli.partial import partial_output
from regard.cli.progress import progress_bar
from regard.cli.translate_job import MarkupJob, TranslateJob
from regard.cli.translate_options import (
    BatchEngine,
    EngineOptions,
    FileOptions,
    FormOptions,
    SearchOptions,
    TextOptions,
)
from regard.data.workers import usable_cores
from regard.errors import UserError
from regard.run_dir import RunDir
from regard.tasks.confidence import confidence
from regard.tasks.glossary import Glossary
from regard.tasks.translator import Translator
from regard.text import UNK


@grouped
def translate(
    run: options.RunPath,
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Sentences to translate. [default: the lines of standard input]"),
    ] = None,
    *,
    others: options.With = None,
    files: FileOptions,
    form: FormOptions,
    search: SearchOptions,
    texts: TextOptions,
    loading: LoadOptions,
    engine: EngineOptions,
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
    options.check_utf8(**{"--prefix": texts.prefix})
    files.check(text)
    search.check(form.nbest)
    form.check()
    if engine.engine is BatchEngine.RAY:
        local: dict[str, object] = {
            "text": text or None,
            "resume": files.resume or None,
            "with": others,
            "threads": loading.threads,
        }
        local |= {"prefix": texts.prefix, "glossary": texts.glossary, "errors": files.errors}
        local |= {"confidence": form.confidence or None, "nbest": None if form.nbest == 1 else form.nbest}
        options.refuse("with --engine ray", **local)
        seed = {"seed": search.seed} if search.sample else {}
        settings = {**loading.settings(), **search.settings(), **texts.tags(), **seed}
        _with_ray(BatchTranslator(run, column=engine.column or "text", **settings), files, engine, quiet)
        return
    remote = {"workers": engine.workers, "gpus_per_worker": engine.gpus_per_worker, "column": engine.column}
    options.refuse("without --engine ray", **remote)
    glossary = None if texts.glossary is None else Glossary.read(texts.glossary)
    if glossary is not None and search.sample:
        raise UserError("--glossary has no effect with --sample: terms need a beam search")
    model = load(run, *(others or []), **loading.settings())
    translator = replace(_translator(model, form.nbest, search), seed=search.seed, glossary=glossary, **texts.tags())
    if texts.prefix is not None and UNK in translator.tokenizers[1].encode(texts.prefix):
        raise UserError(f"--prefix {texts.prefix!r}: contains text that this model's vocabulary cannot express")
    source = Input([line for sentence in text or [] for line in sentence.split("\n")], files.input, files.errors)
    if source.interactive and not quiet:
        note("Type a sentence and press Enter; Ctrl-D ends.")
    with devices.held_memory(model.device):
        _write(_job(model, translator, form, texts.prefix, quiet), source, files, model)


def _with_ray(translator: BatchTranslator, files: FileOptions, engine: EngineOptions, quiet: bool) -> None:
    """Translate many files with Ray."""
    if files.input is None or files.output is None:
        raise UserError("--engine ray needs --input 'PATTERN' and --output FOLDER")
    run = RunDir(Path(translator.run))  # report mistakes before workers start
    tasks.of(run.recipe).require_verb("translate", run.path)
    run.checkpoint(translator.loading["weights"])
    pattern, workers, gpus = str(files.input), engine.workers or usable_cores(), engine.gpus_per_worker or 0.0
    total = len(find_shards(pattern, files.output))
    with progress_bar("files", total, quiet) as progress:
        done, lines = translate_folder(translator, pattern, files.output, workers=workers, gpus=gpus, progress=progress)
    if not quiet:
        note(f"{files.output} has the translations of {done:,} files; {lines:,} lines are new")


def _translator(model: Model, nbest: int, search: SearchOptions) -> Translator:
    """Make a translator with the options that were given; its beam is at least `nbest` wide."""
    recipe = model.run.recipe.decoding
    search.refuse_sampling(recipe.method)
    settings = {"beam": recipe.beam, **search.settings()}
    return decoders.translator(model, {**settings, "beam": max(settings["beam"], nbest)})


def _job(model: Model, translator: Translator, form: FormOptions, prefix: str | None, quiet: bool) -> TranslateJob:
    if form.markup:
        return MarkupJob(translator, form.form, form.nbest, prefix, quiet, align=model.word_links)
    confidence_of = partial(confidence, tokenizer=translator.tokenizers[1], calibration=model.calibration)
    return TranslateJob(translator, form.form, form.nbest, prefix, quiet, confidence_of if form.confidence else None)


def _write(job: TranslateJob, source: Input, files: FileOptions, model: Model) -> None:
    """Translate all lines, to standard output or to a file."""
    output = files.output
    if output is None:
        _to_stdout(job, source)
    elif output.exists() and not output.is_file() and not output.is_dir():
        with written(output) as out:  # a device or a pipe
            for chunk in source.chunks():
                out.writelines(line + "\n" for line in job.translate(chunk))
                out.flush()
    else:
        _to_file(job, source, output, _settings(model, job), files.resume)


def _to_stdout(job: TranslateJob, source: Input) -> None:
    out = text_output()
    for chunk in source.chunks():
        for line in job.translate(chunk):
            out.write(line + "\n")
        out.flush()


def _to_file(job: TranslateJob, source: Input, path: Path, settings: dict[str, Any], resume: bool) -> None:
    with partial_output(path, settings, resume) as out:
        if out.lines:
            out.skip(line.text for line in source.skip(out.lines))
            if not job.quiet:
                note(f"resuming after line {out.lines:,}")
        quiet = job.quiet or source.interactive
        with progress_bar("translating", source.count, quiet, done=source.done) as progress:
            for chunk in source.chunks():
                out.write((line.text for line in chunk.lines), list(job.translate(chunk, progress)))


def _settings(model: Model, job: TranslateJob) -> dict[str, Any]:
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
        "confidence": job.confidence_of is not None,
        "markup": isinstance(job, MarkupJob),
        "glossary": [] if translator.glossary is None else [asdict(entry) for entry in translator.glossary.entries],
    }
