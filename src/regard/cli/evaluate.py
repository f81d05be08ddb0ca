"""regard evaluate"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from regard import tasks
from regard.api import load
from regard.cli import options
from regard.cli.evaluate_captions import evaluate_captions
from regard.cli.evaluate_classes import evaluate_classes
from regard.cli.evaluate_numbers import evaluate_numbers
from regard.cli.evaluate_speech import evaluate_speech
from regard.cli.evaluate_text import evaluate_text
from regard.cli.evaluate_translations import OutputOptions, evaluate_files, evaluate_translations
from regard.cli.groups import LoadOptions, PairFileOptions, ScoreOptions, grouped
from regard.cli.held_out import data_settings, held_out_examples, held_out_pairs
from regard.errors import UserError
from regard.run_dir import RunDir
from regard.runs import LoadedRun


@dataclass(frozen=True)
class PlainTextOptions:
    """How plain text is scored."""

    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Language models: score this file instead of a split.")
    ] = None
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Language models: move the window by this many tokens. [default: half the context]"
        ),
    ] = None


@grouped
def evaluate(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run directory. [default: score --outputs]")
    ] = None,
    *,
    others: options.With = None,
    split: Annotated[
        str,
        typer.Option(metavar="NAME", help="The split to score: test, valid, or another one of a built-in corpus."),
    ] = "test",
    files: PairFileOptions,
    texts: PlainTextOptions,
    outputs: OutputOptions,
    scoring: ScoreOptions,
    as_json: options.Json = False,
    loading: LoadOptions,
    quiet: options.Quiet = False,
) -> None:
    """Score a run on held-out data, or a file of translations against references.

    Translation: BLEU and chrF by sacreBLEU, with the signatures that make them comparable; exact, the percentage of
    sentences identical to the reference; perplexity of the reference per token of this run's vocabulary.

    Language models: perplexity and bits per byte. Text longer than the context is scored in overlapping windows: every
    token is scored once, with at least context - stride tokens before it, except at the start.

    Masked language models: accuracy. Classifiers: accuracy, macro-F1 (the mean over classes of the harmonic mean of
    precision and recall), and the confusion matrix. Regression: root mean squared error, mean absolute error and R2.

    Captions: as translation; for the built-in scenes also the share of cross-attention inside the region of the image
    that a word speaks of, beside the region's share of the image.

    Speech: word and character error rates; BLEU and chrF too, for texts in another language than the recordings.

    How well attention aligns words: regard align.

    Examples:

        regard evaluate runs/en-es

        regard evaluate runs/en-es --split shapes

        regard evaluate runs/seed-1 --with runs/seed-2

        regard evaluate runs/stories --stride 16

        regard evaluate --outputs out.txt --reference ref.txt
    """
    given = Evaluation(run, others or [], split, files, texts, outputs, scoring, as_json, loading, quiet)
    if run is None:
        given.of_files()
        return
    task = tasks.of(RunDir(run).recipe)
    task.require_verb("evaluate", run)
    by_verb = {
        "predict": given.of_predictions,
        "caption": given.of_captions,
        "transcribe": given.of_transcripts,
        "generate": given.of_plain_text,
        "fill": given.of_plain_text,
        "translate": given.of_translations,
    }
    by_verb[task.verb](run, task)


@dataclass(frozen=True)
class Evaluation:
    """The arguments of `regard evaluate`; a method for each kind of task checks which of them apply."""

    run: Path | None
    others: list[Path]
    split: str
    files: PairFileOptions
    texts: PlainTextOptions
    outputs: OutputOptions
    scoring: ScoreOptions
    as_json: bool
    loading: LoadOptions
    quiet: bool

    def of_files(self) -> None:
        weights = None if self.loading.weights == "best" else self.loading.weights
        options.refuse("without a RUN", text=self.texts.text, stride=self.texts.stride)
        options.refuse("without a RUN", **{"with": self.others or None}, weights=weights)
        evaluate_files(self.files, self.outputs, self.scoring, self.as_json)

    def of_translations(self, run: Path, task: tasks.Task) -> None:
        where = "except for a run that was trained on plain text"
        options.refuse(where, text=self.texts.text, stride=self.texts.stride)
        if self.outputs.outputs is not None:
            raise UserError("give either a RUN or --outputs with --reference, not both")
        pairs = held_out_pairs(run, self.split, self.files)
        save, runs = self.outputs.save, [run, *self.others]
        evaluate_translations(runs, pairs, self.loading, self.scoring, save, self.as_json, self.quiet)

    def of_predictions(self, run: Path, task: tasks.Task) -> None:
        where = f"for a run that was trained for {task.name}"
        options.refuse(where, **vars(self.outputs), **self.scoring.given(), **vars(self.texts))
        examples = held_out_examples(run, task, self.split, self.files)
        loaded = LoadedRun.load(run, *self.others, **self.loading.settings())
        score = evaluate_numbers if task.output == "numbers" else evaluate_classes
        score(loaded, examples, self.as_json, self.quiet)

    def of_captions(self, run: Path, task: tasks.Task) -> None:
        loaded, examples = self._feature_texts(run, task)
        evaluate_captions(loaded, examples, self.scoring.decoding(), self.outputs.save, self.as_json, self.quiet)

    def of_transcripts(self, run: Path, task: tasks.Task) -> None:
        options.refuse(f"for a run that was trained for {task.name}", **{"with": self.others or None})
        loaded, examples = self._feature_texts(run, task)
        evaluate_speech(loaded, examples, self.scoring.decoding(), self.outputs.save, self.as_json, self.quiet)

    def _feature_texts(self, run: Path, task: tasks.Task) -> tuple[LoadedRun, list[Any]]:
        """A run whose outputs are texts, but not its inputs, and the held-out examples."""
        where, given = f"for a run that was trained for {task.name}", self.scoring
        options.refuse(where, source=self.files.source, reference=self.files.reference, outputs=self.outputs.outputs)
        options.refuse(where, **vars(self.texts), lowercase=given.lowercase or None)
        options.refuse(where, moses=given.moses, moses_reference=given.moses_reference)
        loaded = load(run, *self.others, **self.loading.settings())
        return loaded, held_out_examples(run, task, self.split, self.files)

    def of_plain_text(self, run: Path, task: tasks.Task) -> None:
        where, loading = f"for a run that was trained on {task.trained_on}", self.loading
        precision = None if loading.precision == "auto" else loading.precision
        options.refuse(where, source=self.files.source, reference=self.files.reference)
        options.refuse(where, **vars(self.outputs), **self.scoring.given())
        options.refuse(where, **{"with": self.others or None}, precision=precision)
        data, texts = data_settings(run, self.files.data), self.texts
        evaluate_text(RunDir(run), data, self.split, texts.text, texts.stride, loading, self.as_json, self.quiet)
