"""regard evaluate"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from regard import tasks
from regard.api import load
from regard.cli import decoders, options
from regard.cli.evaluate_captions import evaluate_captions
from regard.cli.evaluate_classes import evaluate_classes
from regard.cli.evaluate_numbers import evaluate_numbers
from regard.cli.evaluate_speech import evaluate_speech
from regard.cli.evaluate_text import evaluate_text
from regard.cli.groups import PairFileOptions, grouped
from regard.cli.output import written
from regard.cli.progress import progress_bar
from regard.data.corpora import held_out
from regard.data.lines import read_lines
from regard.errors import UserError
from regard.evaluation import TextScores, moses_tokenize, moses_tokenized_bleu, score_texts
from regard.recipes.schema import DataSettings
from regard.run_dir import RunDir
from regard.tasks.captioning import CaptioningTask
from regard.tasks.speech import SpeechTask


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
    pair_files: PairFileOptions,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Language models: score this file instead of a split.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Language models: move the window by this many tokens. [default: half the context]"
        ),
    ] = None,
    outputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Score these translations against --reference, without a RUN."),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the translations to this file.")] = None,
    beam: options.Beam = None,
    length_penalty: options.LengthPenalty = None,
    lowercase: options.Lowercase = False,
    moses: options.Moses = None,
    moses_reference: options.MosesReference = None,
    as_json: options.Json = False,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    threads: options.Threads = None,
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
    ensemble = {"with": others or None}
    source, reference, data = pair_files.source, pair_files.reference, pair_files.data
    task = None if run is None else tasks.of(RunDir(run).recipe)
    if run is not None and task is not None and task.verb == "predict":
        where = f"for a run that was trained for {task.name}"
        options.refuse(where, outputs=outputs, save=save, beam=beam, text=text)
        options.refuse(where, length_penalty=length_penalty, lowercase=lowercase or None, stride=stride)
        options.refuse(where, moses=moses, moses_reference=moses_reference)
        examples = _examples(run, task, split, source, reference, data)
        score = evaluate_numbers if task.output == "numbers" else evaluate_classes
        score([run, *(others or [])], examples, weights, device, precision, as_json, quiet)
        return
    if run is not None and isinstance(task, CaptioningTask):
        where = f"for a run that was trained for {task.name}"
        options.refuse(where, source=source, reference=reference, outputs=outputs, text=text, stride=stride)
        options.refuse(where, lowercase=lowercase or None, moses=moses, moses_reference=moses_reference)
        changed = options.changed(beam=beam, length_penalty=length_penalty)
        loaded = load(run, *(others or []), weights=weights, device=device, precision=precision)
        evaluate_captions(loaded, _examples(run, task, split, None, None, data), changed, save, as_json, quiet)
        return
    if run is not None and isinstance(task, SpeechTask):
        where = f"for a run that was trained for {task.name}"
        options.refuse(where, source=source, reference=reference, outputs=outputs, text=text, stride=stride)
        options.refuse(where, lowercase=lowercase or None, moses=moses, moses_reference=moses_reference, **ensemble)
        changed = options.changed(beam=beam, length_penalty=length_penalty)
        loaded = load(run, weights=weights, device=device, precision=precision)
        evaluate_speech(loaded, _examples(run, task, split, None, None, data), changed, save, as_json, quiet)
        return
    if run is not None and task is not None and not task.has_source:
        where = f"for a run that was trained on {task.trained_on}"
        options.refuse(where, source=source, reference=reference, outputs=outputs, save=save, beam=beam)
        options.refuse(where, length_penalty=length_penalty, lowercase=lowercase or None, **ensemble)
        options.refuse(where, moses=moses, moses_reference=moses_reference, precision=_unusual(precision))
        evaluate_text(RunDir(run), _data(run, data), split, text, stride, weights, device, as_json, quiet)
        return
    options.refuse("except for a run that was trained on plain text", text=text, stride=stride)
    with ExitStack() as stack:
        # Opened before translating, so that a wrong path fails at once.
        saved = stack.enter_context(written(save)) if save is not None else None
        perplexity = None
        if run is None:
            options.refuse("without a RUN", **ensemble, weights=None if weights == "best" else weights)
            hypotheses, references = _files(outputs, source, reference)
        elif outputs is not None:
            raise UserError("give either a RUN or --outputs with --reference, not both")
        else:
            pairs = held_out_pairs(run, split, pair_files)
            references = [target for _, target in pairs]
            changed = options.changed(beam=beam, length_penalty=length_penalty)
            hypotheses, perplexity = _translate(
                [run, *(others or [])], pairs, weights, device, precision, quiet, changed
            )
        if saved is not None:
            saved.writelines(line + "\n" for line in hypotheses)
    scores = score_texts(hypotheses, references, lowercase=lowercase)
    tokenized = None
    if moses is not None:
        moses_references = (
            moses_tokenize(references, language=moses) if moses_reference is None else list(read_lines(moses_reference))
        )
        tokenized = moses_tokenized_bleu(hypotheses, moses_references, language=moses)
    _print(scores, perplexity, tokenized, as_json)


def _files(outputs: Path | None, source: Path | None, reference: Path | None) -> tuple[list[str], list[str]]:
    if outputs is None or reference is None:
        raise UserError("give a RUN, or --outputs with --reference")
    if source is not None:
        raise UserError("--source has no effect with --outputs, which needs only --reference")
    return _aligned(outputs, reference)


def _aligned(first: Path, second: Path) -> tuple[list[str], list[str]]:
    """Read two files that must have the same number of lines."""
    lines = list(read_lines(first)), list(read_lines(second))
    if len(lines[0]) != len(lines[1]):
        raise UserError(f"not line-aligned: {first} has {len(lines[0])} lines, {second} has {len(lines[1])}")
    if not lines[0]:
        raise UserError(f"no lines to score: {first} is empty")
    return lines


def _data(run: Path, folder: Path | None) -> DataSettings:
    """The data settings of a run, with the folder of --data."""
    settings = RunDir(run).recipe.data
    given = options.folder(folder)
    return settings if given is None else settings.model_copy(update={"folder": str(given)})


def _unusual(precision: str) -> str | None:
    """The precision, if it is not the default."""
    return None if precision == "auto" else precision


def held_out_pairs(run: Path, split: str, files: PairFileOptions) -> list[tuple[str, str]]:
    """The pairs of two files, or of a split of the run's data."""
    if (files.source is None) != (files.reference is None):
        raise UserError("--source and --reference must be given together")
    if files.source is not None and files.reference is not None:
        return list(zip(*_aligned(files.source, files.reference), strict=True))
    return held_out(_data(run, files.data), split)


def _translate(
    runs: list[Path],
    pairs: list[tuple[str, str]],
    weights: str,
    device: str,
    precision: str,
    quiet: bool,
    settings: dict[str, object],
) -> tuple[list[str], float]:
    """Translate the sources; return the translations, and the perplexity of the targets."""
    model = load(*runs, weights=weights, device=device, precision=precision)
    logprobs, _ = model.score_pairs(pairs)
    tokens = sum(len(line) for line in logprobs)
    perplexity = math.exp(min(-sum(map(sum, logprobs)) / max(tokens, 1), 80))
    with progress_bar("translating", len(pairs), quiet) as progress:
        answers = decoders.translator(model, settings)([source for source, _ in pairs], progress=progress)
    return [answer.texts[0] for answer in answers], perplexity


def _examples(
    run: Path, task: tasks.Task, split: str, source: Path | None, reference: Path | None, data: Path | None
) -> list[Any]:
    """The inputs and labels of two files of lines, or of a split of the run's data."""
    if source is not None or reference is not None:
        if not task.has_source:
            raise UserError(f"--source and --reference are files of text, and this run was trained for {task.name}")
        return held_out_pairs(run, split, PairFileOptions(source, reference, data))
    return tasks.of(task.recipe.model_copy(update={"data": _data(run, data)})).held_out(split)


def _print(scores: TextScores, perplexity: float | None, tokenized: tuple[float, str] | None, as_json: bool) -> None:
    if as_json:
        entry = {
            "lines": scores.lines,
            "bleu": scores.bleu,
            "bleu_signature": scores.bleu_signature,
            "chrf": scores.chrf,
            "chrf_signature": scores.chrf_signature,
            "exact": scores.exact,
            "perplexity": perplexity,
        }
        if tokenized is not None:
            entry |= {"moses_bleu": tokenized[0], "moses_bleu_signature": tokenized[1]}
        typer.echo(json.dumps(entry))
        return
    typer.echo(f"BLEU        {scores.bleu:6.2f}   {scores.bleu_signature}")
    typer.echo(f"chrF        {scores.chrf:6.2f}   {scores.chrf_signature}")
    typer.echo(f"exact       {scores.exact:6.2f} % of {scores.lines:,} sentences")
    if perplexity is not None:
        typer.echo(f"perplexity  {perplexity:6.3f}   per target token, EOS included")
    if tokenized is not None:
        typer.echo(f"Moses BLEU  {tokenized[0]:6.2f}   {tokenized[1]}")
