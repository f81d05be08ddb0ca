"""regard translate"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard import devices, tasks
from regard.api import Model, load
from regard.batch import BatchTranslator, find_shards, translate_folder
from regard.cli import decoders, options
from regard.cli.groups import LoadOptions, grouped
from regard.cli.inputs import Input
from regard.cli.output import note
from regard.cli.progress import progress_bar
from regard.cli.translate_job import MarkupJob, TranslateJob, write_translations
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

        regard translate runs/en-es < in.txt > out.txt

        regard translate runs/en-es -i in.txt -o out.txt --resume

        regard translate runs/en-es --nbest 3 --format jsonl 'the dog sees the cat'

        regard translate runs/en-es --glossary terms.tsv 'the dog sees the cat'

        regard translate runs/en-es --markup 'the <b>black</b> cat'

        regard translate runs/seed-1 --with runs/seed-2 < in.txt > out.txt

        regard translate runs/en-es --engine ray --input 'in/*.jsonl.zst' --output out/ --workers 8
    """
    given = TranslateCommand(run, text or [], others or [], files, form, search, texts, loading, engine, quiet)
    given.check()
    if engine.engine is BatchEngine.RAY:
        given.translate_files()
    else:
        given.translate_lines()


@dataclass(frozen=True)
class TranslateCommand:
    """The arguments of `regard translate`; a method for each engine checks which of them apply."""

    run: Path
    sentences: list[str]
    others: list[Path]
    files: FileOptions
    form: FormOptions
    search: SearchOptions
    texts: TextOptions
    loading: LoadOptions
    engine: EngineOptions
    quiet: bool

    def check(self) -> None:
        for sentence in self.sentences:
            options.check_utf8(TEXT=sentence)
        options.check_utf8(**{"--prefix": self.texts.prefix})
        self.files.check(self.sentences)
        self.search.check(self.form.nbest)
        self.form.check()

    # -- many files, by Ray -------------------------------------------------------------------------------------------

    def translate_files(self) -> None:
        """Translate whole files, several at a time, into a folder."""
        files, form, search = self.files, self.form, self.search
        refused: dict[str, object] = {"text": self.sentences or None, "with": self.others or None}
        refused |= {"resume": files.resume or None, "errors": files.errors, "threads": self.loading.threads}
        refused |= {"prefix": self.texts.prefix, "glossary": self.texts.glossary}
        refused |= {"confidence": form.confidence or None, "nbest": None if form.nbest == 1 else form.nbest}
        options.refuse("with --engine ray", **refused)
        if files.input is None or files.output is None:
            raise UserError("--engine ray needs --input 'PATTERN' and --output FOLDER")
        run = RunDir(self.run)  # report mistakes before workers start
        tasks.of(run.recipe).require_verb("translate", run.path)
        run.checkpoint(self.loading.weights)
        settings = {**self.loading.settings(), **search.settings(), **self.texts.tags()}
        settings |= {"seed": search.seed} if search.sample else {}
        translator = BatchTranslator(self.run, column=self.engine.column or "text", **settings)
        pattern, workers = str(files.input), self.engine.workers or usable_cores()
        gpus, total = self.engine.gpus_per_worker or 0.0, len(find_shards(pattern, files.output))
        with progress_bar("files", total, self.quiet) as progress:
            done, lines = translate_folder(
                translator, pattern, files.output, workers=workers, gpus=gpus, progress=progress
            )
        if not self.quiet:
            note(f"{files.output} has the translations of {done:,} files; {lines:,} lines are new")

    # -- lines, in this process ---------------------------------------------------------------------------------------

    def translate_lines(self) -> None:
        """Translate sentences, or the lines of a file or of standard input."""
        engine = self.engine
        workers = {"workers": engine.workers, "gpus_per_worker": engine.gpus_per_worker, "column": engine.column}
        options.refuse("without --engine ray", **workers)
        glossary = None if self.texts.glossary is None else Glossary.read(self.texts.glossary)
        if glossary is not None and self.search.sample:
            raise UserError("--glossary has no effect with --sample: terms need a beam search")
        model = load(self.run, *self.others, **self.loading.settings())
        job = self._job(model, replace(self._translator(model), glossary=glossary))
        lines = [line for sentence in self.sentences for line in sentence.split("\n")]
        source = Input(lines, self.files.input, self.files.errors)
        if source.interactive and not self.quiet:
            note("Type a sentence and press Enter; Ctrl-D ends.")
        with devices.held_memory(model.device):
            write_translations(job, source, self.files.output, model, self.files.resume)

    def _translator(self, model: Model) -> Translator:
        """A translator with the options that were given; its beam is at least `nbest` wide."""
        recipe = model.run.recipe.decoding
        self.search.refuse_sampling(recipe.method)
        settings = {"beam": recipe.beam, **self.search.settings()}
        translator = decoders.translator(model, {**settings, "beam": max(settings["beam"], self.form.nbest)})
        return replace(translator, seed=self.search.seed, **self.texts.tags())

    def _job(self, model: Model, translator: Translator) -> TranslateJob:
        form, prefix = self.form, self.texts.prefix
        if prefix is not None and UNK in translator.tokenizers[1].encode(prefix):
            raise UserError(f"--prefix {prefix!r}: contains text that this model's vocabulary cannot express")
        if form.markup:
            return MarkupJob(translator, form.form, form.nbest, prefix, self.quiet, align=model.word_links)
        confidence_of = partial(confidence, tokenizer=translator.tokenizers[1], calibration=model.calibration)
        given = confidence_of if form.confidence else None
        return TranslateJob(translator, form.form, form.nbest, prefix, self.quiet, given)
