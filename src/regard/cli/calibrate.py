"""regard calibrate"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from regard import tasks
from regard.api import load
from regard.cli import decoders, options
from regard.cli.groups import PairFileOptions, grouped
from regard.cli.held_out import held_out_pairs
from regard.cli.progress import progress_bar
from regard.errors import UserError
from regard.files import write_text
from regard.metrics.calibration import reliability
from regard.run_dir import RunDir
from regard.tasks.aligner import Aligner, NoAttention, TwoWayAligner
from regard.tasks.confidence import FILE, Calibration, calibration_errors, observations
from regard.viz.charts import Chart, Series
from regard.viz.views import files
from regard.viz.views.picture import Picture

MIN_PAIRS = 20
MIN_WORDS = 20  # minimum number of words of a point in the diagram


@grouped
def calibrate(
    run: options.RunPath,
    *,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="The split to calibrate on: valid, test, or another one.")
    ] = "valid",
    pair_files: PairFileOptions,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the reliability diagram of words to this file (.svg, .png or .pdf)."),
    ] = None,
    as_json: options.Json = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Calibrate the confidence of a translation model on held-out data.

    Translates held-out sentences and compares the model's probabilities with how often its words are right: those in a
    longest common subsequence with the reference. The curves that correct the probabilities are fitted to every other
    sentence, and the expected calibration error before and after is that of the rest. They are written to
    calibration.json in the run directory, where `regard translate --confidence`, Python and the server find them, with
    the layer and head of attention by which words are aligned best: tags in HTML follow it.

    Examples:

        regard calibrate runs/en-es

        regard calibrate runs/en-es --split test --picture reliability.svg
    """
    if picture is not None:
        files.checked(picture, traced=False)
    tasks.of(RunDir(run).recipe).require_verb("calibrate", run)
    pairs = held_out_pairs(run, split, pair_files)
    if len(pairs) < MIN_PAIRS:
        raise UserError(f"{len(pairs)} pairs are too few to calibrate on: at least {MIN_PAIRS}")
    model = load(run, device=device)
    with progress_bar("translating", len(pairs), quiet) as progress:
        answers = decoders.translator(model, {})([text for text, _ in pairs], progress=progress)
    references, tokenizer = [target for _, target in pairs], model.tokenizers[1]
    fitted = Calibration.fit(answers[::2], references[::2], tokenizer)
    with contextlib.suppress(NoAttention):
        outputs = [(text, answer.texts[0]) for (text, _), answer in zip(pairs, answers, strict=True)]
        aligner = Aligner(model.module, model.tokenizers, model.recipe)
        fitted = replace(fitted, attention=TwoWayAligner.choose(aligner, None, outputs).view)
    others = answers[1::2], references[1::2], tokenizer
    before, after = calibration_errors(*others, None), calibration_errors(*others, fitted)
    error = {
        "words": {"before": round(before[0], 4), "after": round(after[0], 4)},
        "sentences": {"before": round(before[1], 4), "after": round(after[1], 4)},
    }
    content = {**fitted.to_json(), "pairs": len(answers[::2]), "expected_calibration_error": error}
    write_text(model.run.path / FILE, json.dumps(content, indent=1) + "\n")
    if picture is not None:
        chart = _diagram(observations(*others, None)[0], observations(*others, fitted)[0], before[0], after[0])
        files.save(Picture("reliability", (chart,), lambda: error), picture)
    if as_json:
        print(json.dumps({"file": str(model.run.path / FILE), "pairs": len(pairs), **error}))
        return
    print(
        f"{model.run.path / FILE}: fitted to {len(answers[::2]):,} pairs, measured on {len(references[1::2]):,} others"
    )
    print("expected calibration error  before   after")
    for name, values in error.items():
        print(f"{name:<26} {100 * values['before']:6.1f} % {100 * values['after']:5.1f} %")


def _diagram(
    raw: tuple[list[float], list[float]], calibrated: tuple[list[float], list[float]], before: float, after: float
) -> Chart:
    """The reliability diagram: how many words are right, by their confidence."""
    series = [Series.of("perfect", [0, 1], [0, 1])]
    for name, values, error in (("raw", raw, before), ("calibrated", calibrated, after)):
        bins = reliability(*values)
        bins = [b for b in bins if b.count >= MIN_WORDS] or bins
        xs, ys = [b.confidence for b in bins], [b.accuracy for b in bins]
        series.append(Series.of(f"{name} (error {100 * error:.1f} %)", xs, ys))
    note = f"{len(raw[0]):,} words; a point is a tenth of the scale of confidence with at least {MIN_WORDS} of them"
    titles = "Reliability of word confidence", "confidence", "share of words that are right"
    return Chart(*titles, tuple(series), y_range=(0, 1), note=note)
