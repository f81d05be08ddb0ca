"""regard compare"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from regard import tasks
from regard.api import load
from regard.cli import decoders, options
from regard.cli.groups import PairFileOptions, ScoreOptions, grouped
from regard.cli.held_out import held_out_pairs
from regard.cli.output import written
from regard.cli.progress import progress_bar
from regard.data.labelled import class_name
from regard.data.lines import read_lines
from regard.errors import UserError
from regard.evaluation import TextScores, moses_tokenize, moses_tokenized_bleu, score_texts
from regard.evaluation.compare import (
    ACCURACY,
    METRICS,
    Bucket,
    Metric,
    RunScores,
    TrainingSummary,
    distinct_names,
    measure,
    parse_buckets,
    rows,
)
from regard.evaluation.compare import buckets as buckets_by_length
from regard.files import errno_text
from regard.metrics.classes import ClassScores
from regard.run_dir import RunDir
from regard.tasks.classes import ClassTask
from regard.viz import charts
from regard.viz.charts import Chart, Point, Series
from regard.viz.terminal import capabilities


@grouped
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.", show_default=False)],
    *,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="The split of the first run's data to score: test, valid, ...")
    ] = "test",
    pair_files: PairFileOptions,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The metric to plot against source length: bleu, chrf or exact. [default: bleu; of classifiers exact]",
            show_default=False,
        ),
    ] = None,
    buckets: Annotated[
        str,
        typer.Option(
            metavar="N|LENGTHS", help="Number of groups of source lengths, or their upper limits, such as 5,10,15."
        ),
    ] = "6",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the plot in this .svg file.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write the translations of every run.", show_default=False),
    ] = None,
    scoring: ScoreOptions,
    as_json: options.Json = False,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Score several runs on the same pairs: a table, and a plot of quality by source length.

    The pairs are those of the first run. Perplexity is per token of a run's vocabulary, so it can be compared only
    between runs with the same vocabulary; BLEU, chrF and exact matches always can. Classifiers of texts are compared by
    accuracy and macro-F1; their perplexity is that of the classes.

    Examples:

        regard compare runs/ladder-lstm runs/ladder-transformer

        regard compare runs/ladder-* --metric exact --buckets 5,10,15 --out ladder.svg
    """
    if metric not in (None, *METRICS):
        raise UserError(f"--metric {metric}: must be one of {', '.join(METRICS)}")
    if out is not None and out.suffix.lower() != ".svg":
        raise UserError(f"{out}: the plot can only be written as .svg (it is also shown in the terminal)")
    limits, names = parse_buckets(buckets), distinct_names(runs)
    opened = [RunDir(path) for path in runs]
    _check(opened)
    classes = tasks.of(opened[0].recipe).output == "class"
    if classes:
        options.refuse("for classifiers", **scoring.decoding(), moses=scoring.moses)
        options.refuse("for classifiers", metric=None if metric == "exact" else metric)
    metric = metric or ("exact" if classes else "bleu")
    pairs = held_out_pairs(runs[0], split, pair_files)
    _make_folder(save)
    moses_references = _moses_references([target for _, target in pairs], scoring)
    groups = buckets_by_length([source for source, _ in pairs], limits)
    scored = []
    for run, name in zip(opened, names, strict=True):
        outputs, scores = _score(run, name, pairs, groups, cast("Metric", metric), scoring, device, quiet)
        if scoring.moses is not None:
            scores = replace(scores, moses=moses_tokenized_bleu(outputs, moses_references, language=scoring.moses))
        scored.append(scores)
        _save(save, name, outputs)
    _save(save, "references", [target for _, target in pairs])
    chart = _chart(
        scored, groups, ACCURACY if classes else METRICS[metric], _data_name(opened[0], split, pair_files.source)
    )
    if out is not None:
        with written(out) as file:
            file.write(charts.svg(chart))
    _print(opened, scored, groups, chart, metric, as_json)


def _check(runs: list[RunDir]) -> None:
    """Check that the runs can be compared, before anything is translated."""
    first = runs[0]
    for run in runs:
        task = tasks.of(run.recipe)
        if "compare" not in task.verbs:
            raise UserError(
                f"{run.path}: regard compare is for translation and for classes of texts; this run was trained for "
                f"{task.name}: use `regard evaluate`"
            )
        if task.name != tasks.of(first.recipe).name or run.classes != first.classes:
            raise UserError(f"{run.path} was trained for another task than {first.path}, or has other classes")
        if run.recipe.data.lowercase != first.recipe.data.lowercase:
            lower, other = (first, run) if first.recipe.data.lowercase else (run, first)
            raise UserError(f"{lower.path} is lower-cased and {other.path} is not: their scores cannot be compared")
        if not run.best.exists():
            raise UserError(f"{run.path} has no {run.best.name} yet: training has not reached its first validation")


def _moses_references(references: list[str], scoring: ScoreOptions) -> list[str]:
    """Read or make the tokenised references, before anything is translated, so that errors show at once."""
    language, file = scoring.moses, scoring.moses_reference
    if language is None:
        if file is not None:
            raise UserError("--moses-reference needs --moses LANG")
        return []
    if file is None:
        return moses_tokenize(references, language=language)
    lines = list(read_lines(file))
    if len(lines) != len(references):
        raise UserError(f"{file} has {len(lines)} lines for {len(references)} sentences")
    return lines


def _score(
    run: RunDir, name: str, pairs: list[tuple[str, str]], groups: list[Bucket], metric: Metric,
    scoring: ScoreOptions, device: str, quiet: bool,
) -> tuple[list[str], RunScores]:  # fmt: skip
    """Translate or classify with one run; return the outputs and their scores."""
    model = load(run.path, device=device)
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    scores: TextScores | ClassScores
    if isinstance(model.task, ClassTask):
        with progress_bar(f"predicting with {name}", len(pairs), quiet) as progress:
            predictions = model.predictions(sources, progress)
        outputs, scores = [each.label for each in predictions], model.task.score(run, predictions, references)
        right = zip(predictions, references, strict=True)
        logprobs = [[math.log(max(each.probabilities[class_name(label)], 1e-30))] for each, label in right]
    else:
        logprobs, _ = model.score_pairs(pairs)
        with progress_bar(f"translating with {name}", len(pairs), quiet) as progress:
            answers = decoders.translator(model, scoring.decoding())(sources, progress=progress)
        outputs = [answer.texts[0] for answer in answers]
        scores = score_texts(outputs, references, lowercase=scoring.lowercase)
    tokens = sum(map(len, logprobs))
    return outputs, RunScores(
        name=name,
        model=run.recipe.model.summary(),
        parameters=sum(tensor.numel() for tensor in model.module.parameters()),
        training=TrainingSummary.of(run.log("metrics.jsonl")),
        perplexity=math.exp(min(-sum(map(sum, logprobs)) / max(tokens, 1), 80)),
        scores=scores,
        by_length=tuple(
            measure(metric, group.of(outputs), group.of(references), scoring.lowercase) for group in groups
        ),
    )


def _make_folder(folder: Path | None) -> None:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--save {folder}: {errno_text(error)}") from error


def _save(folder: Path | None, name: str, lines: list[str]) -> None:
    if folder is not None:
        with written(folder / f"{name.replace('/', '-')}.txt") as file:
            file.writelines(line + "\n" for line in lines)


def _data_name(run: RunDir, split: str, source: Path | None) -> str:
    """A name for the pairs that were translated."""
    data = run.recipe.data
    if source is None and data.corpus is None:
        files = {"valid": data.valid, "test": data.test}.get(split)
        source = Path(files[0]) if files else None
    return source.name if source is not None else f"{data.corpus} {split}" if data.corpus else split


def _chart(scored: list[RunScores], groups: list[Bucket], y_title: str, data_name: str) -> Chart:
    series = tuple(
        Series(s.name, tuple(Point(g.mean, m.score, m.low, m.high) for g, m in zip(groups, s.by_length, strict=True)))
        for s in scored
    )
    sizes = [len(group.lines) for group in groups]
    size = f"{min(sizes):,} to {max(sizes):,} sentences" if min(sizes) < max(sizes) else f"{sizes[0]:,} sentences"
    return Chart(
        title=f"Quality by source length: {data_name}",
        x_title="source length (words)",
        y_title=y_title,
        series=series,
        x_ticks=tuple((group.mean, group.label) for group in groups),
        note=f"Each point: {size}. Bars: 95 % intervals.",
    )


def _print(
    runs: list[RunDir], scored: list[RunScores], groups: list[Bucket], chart: Chart, metric: str, as_json: bool
) -> None:
    scores, moses = scored[0].scores, scored[0].moses
    classes = isinstance(scores, ClassScores)
    same = classes or len({run.tokenizers[1].to_json() for run in runs}) == 1
    count = sum(len(group.lines) for group in groups)
    if as_json:
        entry: dict[str, Any] = {"lines": count, "metric": metric, "same_vocabulary": same}
        if isinstance(scores, TextScores):
            entry |= {"bleu_signature": scores.bleu_signature, "chrf_signature": scores.chrf_signature}
        entry |= {"moses_bleu_signature": moses[1]} if moses is not None else {}
        typer.echo(json.dumps(entry | {"runs": [each.as_json(groups) for each in scored]}))
        return
    width, colour = capabilities(sys.stdout)
    typer.echo(charts.columned(*rows(scored, same), width=max(width, 80), left=2))
    if not same:
        typer.echo("* per token of the run's vocabulary; the vocabularies differ, so these cannot be compared")
    speed = "examples/s: examples" if classes else "tokens/s: target tokens"
    typer.echo(f"{count:,} sentences. {speed} per second of training.")
    for other, each in zip(runs[1:], scored[1:], strict=True):
        if other.recipe.data.model_copy(update={"folder": None}) != runs[0].recipe.data.model_copy(
            update={"folder": None}
        ):
            typer.echo(f"{each.name} was trained on other data than {scored[0].name}")
    if isinstance(scores, TextScores):
        typer.echo(f"BLEU {scores.bleu_signature}\nchrF {scores.chrf_signature}")
    if moses is not None:
        typer.echo(f"Moses BLEU {moses[1]}")
    typer.echo()
    typer.echo(charts.terminal(replace(chart, note=""), width=width, colour=colour))
    typer.echo(charts.table(chart, max(width, 80)))
    typer.echo("In brackets: 95 % intervals.")
