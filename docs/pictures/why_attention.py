"""Measure why attention trains better: three figures and their numbers.

    python docs/pictures/why_attention.py gradient             # untrained models of the ladder recipes
    python docs/pictures/why_attention.py gradient runs/a ...  # trained models
    python docs/pictures/why_attention.py loss runs/a runs/b ...
    python docs/pictures/why_attention.py speed

Each writes docs/pictures/why-NAME.svg (or to --out FOLDER) and prints its numbers, with --json as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from regard.evaluation.compare import distinct_names
from regard.models import SequenceModel, build
from regard.packed import SeqBatch
from regard.recipes import load
from regard.run_dir import RunDir
from regard.text import BOS, EOS
from regard.viz.charts import Chart, Point, Series, columned, svg, table

RUNGS = ["ladder-lstm", "ladder-gru", "ladder-dot", "ladder-additive", "ladder-transformer"]
LENGTHS = [4, 8, 16, 32, 64, 128]  # tokens in source and target
LONGER = [8, 16, 32, 64, 128, 256]  # for the speed measurement
SENTENCES = 16  # per length, for the gradients
BATCH = 2048  # target tokens, and as many source tokens, per batch of the speed measurement
REPEATS = 5
LOSSES = [2.0, 1.0, 0.5, 0.2, 0.1]  # thresholds of the table
SMOOTH = 3  # logged losses per moving average; each is the mean of 50 steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["gradient", "loss", "speed"])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--device", default="cpu", help="device of the speed measurement")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.figure == "loss" and not given.runs:
        parser.error("loss needs run directories")
    if given.figure == "speed":
        charts, told = speed(given.runs, torch.device(given.device))
    else:
        charts, told = (gradient if given.figure == "gradient" else loss)(given.runs)
    file = given.out / f"why-{given.figure}.svg"
    file.write_text(stacked([svg(chart) for chart in charts]), encoding="utf-8")
    if given.json:
        print(
            json.dumps(
                [{"title": c.title, **{s.name: [[p.x, p.y] for p in s.points] for s in c.series}} for c in charts]
            )
        )
    else:
        print(told)
        print(file)


def as_json(chart: Chart) -> dict[str, object]:
    return {"title": chart.title} | {line.name: [[p.x, p.y] for p in line.points] for line in chart.series}


# -- gradient at the first source token --------------------------------------------------------------------------------


def gradient(runs: Sequence[Path]) -> tuple[list[Chart], str]:
    """Compute |d loss of the last target token / d embedding of the first source token| against length.

    Source and target have the same length. The last target token is the farthest from the first source token: in a
    recurrent model without attention, its information has to pass through every state in between. The figure shows the
    median over random sentences. Untrained encoders are unidirectional here, since in a bidirectional one the first
    token is adjacent to the final state of the backward direction.
    """
    series = []
    for name, model, vocabulary in _models(runs, one_way=True):  # double precision: float32 would underflow
        points = []
        for length in LENGTHS:
            norms = sorted(first_gradients(model.double(), random_batch(length, SENTENCES, vocabulary)))
            quarter = len(norms) // 4
            points.append(Point(length, statistics.median(norms), norms[quarter], norms[-1 - quarter]))
        series.append(Series(name, tuple(points)))
    chart = Chart(
        title=f"How much gradient reaches the first source token, {'after' if runs else 'before'} training",
        x_title="length of source and target (tokens)",
        y_title="norm of the gradient of the last target token's loss, at the first source token",
        series=tuple(series),
        x_log=True,
        y_log=True,
        x_ticks=tuple((n, str(n)) for n in LENGTHS),
        spread="band",
        note=f"Medians of {SENTENCES} sentences of random tokens; bands: the middle half of them."
        + ("" if runs else " Encoders read one way, from the first token on."),
    )
    return [chart], table(chart)


def first_gradients(model: SequenceModel, batch: SeqBatch) -> list[float]:
    """Return, per sentence, the gradient norm of its last token's loss at the embedding of its first source token."""
    vectors: list[torch.Tensor] = []
    hook = model.source_embedding.register_forward_hook(lambda module, given, out: vectors.append(out))
    try:
        logits = model.logits(batch)
    finally:
        hook.remove()
    last = batch.inputs.layout.offsets[1:] - 1
    losses = torch.nn.functional.cross_entropy(logits[last], batch.labels[last], reduction="sum")
    (found,) = torch.autograd.grad(losses, vectors[0])  # independent sentences: this is per sentence
    return found[batch.source.layout.offsets[:-1]].norm(dim=1).tolist()


def random_batch(length: int, count: int, vocabulary: int) -> SeqBatch:
    """Return random sentences with EOS, `length` tokens per side, seeded by the length."""
    generator = torch.Generator().manual_seed(length)
    words = torch.randint(10, vocabulary, (2, count, length - 1), generator=generator).tolist()
    sources, targets = ([[*sentence, EOS] for sentence in side] for side in words)
    return SeqBatch.from_lists(sources, targets, bos=BOS)


def _models(runs: Sequence[Path], one_way: bool = False) -> list[tuple[str, SequenceModel, int]]:
    """Return (name, model, vocabulary size) of the runs, or of untrained models of the ladder recipes."""
    if runs:
        opened = [RunDir(path) for path in runs]
        return [(run.recipe.model.summary(), run.model(), len(run.tokenizers[0])) for run in opened]
    found = []
    for name in RUNGS:
        turned = ["model.bidirectional=false"] if one_way and name != "ladder-transformer" else []
        recipe = load(name, turned)
        torch.manual_seed(1)
        model = build(recipe.model, recipe.text.vocabulary, recipe.text.vocabulary, recipe.text.shared)
        found.append((recipe.model.summary(), model.eval(), recipe.text.vocabulary))
    return found


# -- training loss -----------------------------------------------------------------------------------------------------


def loss(runs: Sequence[Path]) -> tuple[list[Chart], str]:
    """Plot training loss against steps and seconds, and tabulate when each run first reached a given loss."""
    curves = dict(zip(distinct_names(list(runs)), map(_curve, runs), strict=True))
    charts = [
        Chart(
            title=f"Training loss against {what}",
            x_title=unit,
            y_title="training loss (nats per target token)",
            series=tuple(Series.of(n, [p[at] for p in c], [p[2] for p in c]) for n, c in curves.items()),
            y_log=True,
        )
        for at, what, unit in ((0, "steps", "optimiser steps"), (1, "time", "seconds of training"))
    ]
    heads = ["reached", *(f"loss {loss}" for loss in LOSSES)]
    rows = [[name, *(_reached(curve, loss) for loss in LOSSES)] for name, curve in curves.items()]
    return charts, columned(heads, rows, width=110)


def _curve(run: Path) -> list[tuple[int, float, float]]:
    """Return (step, seconds, loss) of a run, with a moving average of the loss."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [facts for facts in map(json.loads, lines) if facts["kind"] == "train"]
    found = []
    for i, facts in enumerate(logged):
        near = [other["loss"] for other in logged[max(0, i - SMOOTH + 1) : i + 1]]
        found.append((facts["step"], facts["seconds"], max(statistics.mean(near), 1e-4)))
    return found


def _reached(curve: Sequence[tuple[int, float, float]], wanted: float) -> str:
    step, seconds = next(((step, seconds) for step, seconds, loss in curve if loss <= wanted), (None, None))
    return "never" if step is None else f"{step:,} steps, {seconds:.0f} s"


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(runs: Sequence[Path], device: torch.device) -> tuple[list[Chart], str]:
    """Measure target tokens per second, forward and backward, against sentence length at a constant batch size."""
    series = []
    for name, model, vocabulary in _models(runs):
        model.to(device).train()
        found = []
        for length in LONGER:
            batch = random_batch(length, BATCH // length, vocabulary).to(device)
            seconds = [_seconds(model, batch) for _ in range(REPEATS + 1)][1:]  # the first is the warm-up
            found.append(BATCH / statistics.median(seconds))
        series.append(Series.of(name, LONGER, found))
    threads = torch.get_num_threads()
    where = (
        f"CPU, {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else torch.cuda.get_device_name(device)
    )
    chart = Chart(
        title="Speed as sentences grow, at a constant batch",
        x_title="length of source and target (tokens)",
        y_title="target tokens per second, forward and backward",
        series=tuple(series),
        x_log=True,
        y_log=True,
        x_ticks=tuple((n, str(n)) for n in LONGER),
        note=f"{BATCH:,} source and {BATCH:,} target tokens per batch, {where}, medians of {REPEATS}.",
    )
    return [chart], table(chart)


def _seconds(model: SequenceModel, batch: SeqBatch) -> float:
    waits = torch.cuda.synchronize if batch.labels.is_cuda else lambda: None
    waits()
    begun = time.perf_counter()
    model(batch).backward()
    waits()
    spent = time.perf_counter() - begun
    model.zero_grad(set_to_none=True)
    return spent


def stacked(pictures: Sequence[str]) -> str:
    """Stack several SVG documents vertically in one."""
    if len(pictures) == 1:
        return pictures[0]
    sizes = [tuple(map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', p).groups())) for p in pictures]  # type: ignore[union-attr]
    width, height = max(w for w, _ in sizes), sum(h + 12 for _, h in sizes) - 12
    parts, top = [], 0.0
    for picture, (_, own) in zip(pictures, sizes, strict=True):
        parts.append(picture.replace("<svg ", f'<svg y="{top:g}" ', 1))
        top += own + 12
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([opening, *parts, "</svg>\n"])


if __name__ == "__main__":
    main()
