"""regard plan"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from regard import devices
from regard.benchmark import matrix_rate
from regard.cli import options
from regard.cli.output import note
from regard.errors import UserError
from regard.files import atomic_write
from regard.planning import HARDWARE, Plan, RankMemory, ScalingPoint, make_plan
from regard.planning.plan import MAX_RANKS, MIN_RANK_TOKENS
from regard.recipes import load
from regard.viz import charts, matplotlib_backend
from regard.viz.charts import Chart, Series
from regard.viz.terminal import capabilities


class Gpu(StrEnum):
    """The devices that the planner knows."""

    H100 = "h100"
    H200 = "h200"
    A100 = "a100"
    V100 = "v100"
    L4 = "l4"
    CPU = "cpu"


GB = 1e9
ROWS = {
    "weights": "weights",
    "optimizer": "optimizer",
    "copies": "bf16 copies",
    "gradients": "gradients",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
    "peak": "at the peak",
}


def plan(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE.toml", help="A built-in recipe (see regard recipes) or a TOML file.")
    ],
    gpus: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="GPUs of a node.")] = 1,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Nodes.")] = 1,
    gpu: Annotated[Gpu, typer.Option(help="The kind of GPU; cpu is this machine.")] = Gpu.H100,
    price: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Price of a GPU for an hour, for the cost.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Mean tokens of a sentence or document. [default: 27 for pairs, the whole context for plain text]",
            show_default=False,
        ),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Use measured speed: what `regard bench RUN --json` printed on such a GPU, for a run of this recipe.",
            show_default=False,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe. Repeatable."),
    ] = None,
    data: options.Data = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw the plot in this .svg or .png file.", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Plan a training before it runs: memory, speed and cost, on one GPU or many.

    No GPU is needed, and for translation and language models no data: a training step runs on tensors without data,
    which shows what it stores, computes and moves. Its time follows from measured rates of matrix multiplications,
    memory and links, as `docs/scale.md` explains; expect errors of some percent in memory and of 10 to 20 % in time.
    The vocabulary is taken to be as large as `text.vocabulary` allows.

    Two ways to use more GPUs are planned. Weak scaling: every GPU computes a batch of the recipe's size, so that a step
    grows with the number of GPUs. Strong scaling: the recipe's step is divided among them.

    Examples:

        regard plan wmt14-en-de-big --gpu h100 --gpus 8 --nodes 16 --price 2.5

        regard plan wikitext2 --set model.size=gpt2-large --gpu l4 --gpus 4

        regard plan mine.toml --gpus 8 --out scaling.svg
    """
    if out is not None and out.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"{out}: the plot can only be written as .svg or .png (it is also shown in the terminal)")
    loaded = load(recipe, options.with_folder(set_, data))
    hardware = HARDWARE[gpu.value]
    if gpu.value == "cpu":
        cpu = torch.device("cpu")
        hardware = replace(hardware, memory=devices.memory(cpu), matmul_rate=matrix_rate(cpu, "fp32"))
    measured = _measured(bench) if bench is not None else None
    if measured is not None:
        hardware = replace(hardware, matmul_rate=measured["matrix_rate"])
    note("planning: a step at several batch sizes, without data")
    how = {"gpus": gpus * nodes, "per_node": gpus, "length": length, "price": price}
    estimate = make_plan(loaded, hardware, **how)  # type: ignore[arg-type]
    if measured is not None:
        one_gpu = estimate.weak_scaling[0].tokens_per_second
        estimate = make_plan(loaded, hardware, speed_up=measured["tokens_per_second"] / one_gpu, **how)  # type: ignore[arg-type]
    chart = _chart(Path(recipe).stem, estimate)
    if out is not None:
        _draw(chart, out)
    if as_json:
        typer.echo(json.dumps(estimate.as_dict()))
    else:
        _print(estimate, chart)


def _measured(path: Path) -> dict[str, float]:
    """The training speed in a file that `regard bench --json` wrote."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))["training"]
        return {name: float(entry[name]) for name in ("matrix_rate", "tokens_per_second")}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is not what `regard bench RUN --json` prints for a run with training data") from error


def _draw(chart: Chart, out: Path) -> None:
    if out.suffix.lower() == ".svg":
        content = charts.svg(chart).encode()
    else:
        content, _ = matplotlib_backend.draw(charts.scene(chart), "png", theme="light")
    with atomic_write(out.resolve()) as temporary:
        temporary.write_bytes(content)


def _chart(name: str, plan: Plan) -> Chart:
    """Throughput against the number of GPUs, with the ideal line."""
    one_gpu = plan.weak_scaling[0].tokens_per_second
    counts = [point.gpus for point in plan.weak_scaling]
    series = [Series.of("ideal", counts, [one_gpu * count for count in counts])]
    for label, points in (("weak scaling", plan.weak_scaling), ("strong scaling", plan.strong_scaling)):
        series.append(Series.of(label, [p.gpus for p in points], [p.tokens_per_second for p in points]))
    ticks = tuple((float(count), f"{count:,}") for count in counts)
    return Chart(
        title=f"{name} on {plan.hardware.name}, planned",
        x_title="GPUs",
        y_title="target tokens per second",
        series=tuple(series),
        x_log=True,
        y_log=True,
        x_ticks=ticks,
        note="Weak scaling: every GPU has a batch of the recipe's size. Strong scaling: the recipe's step is divided.",
    )


def _print(plan: Plan, chart: Chart) -> None:
    width, colour = capabilities(sys.stdout)
    device, chosen = plan.hardware, plan.chosen
    nodes = -(-plan.gpus // plan.per_node)
    where = f"{plan.gpus} x {device.name}" + (f" in {nodes} nodes" if nodes > 1 else "")
    typer.echo(f"{plan.parameters:,} parameters; {where}; training step: {plan.backend}\n")
    typer.echo(charts.columned(*memory_rows(plan.memory), width=max(width, 80)))
    usable = device.memory / GB
    for each in plan.memory:
        fits = f"fits into {usable:,.0f} GB" if each.fits else f"does not fit into {usable:,.0f} GB"
        most = f"training.batch_tokens up to {each.largest_batch:,}" if each.largest_batch else "no batch fits"
        typer.echo(f"{each.scheme}: {fits}; {most}")
    seconds = plan.weak_scaling[0].seconds
    typer.echo(
        f"\none step on one device: {plan.flops / 1e12:,.1f} TFLOP, {plan.targets:,.0f} target tokens, "
        f"{1000 * seconds:,.1f} ms: {plan.flops / seconds / 1e12:,.0f} TFLOP/s"
    )
    typer.echo(f"on {chosen.gpus}: {summary(chosen)}\n")
    for title, points in (
        ("weak scaling: every GPU has a batch of the recipe's size", plan.weak_scaling),
        (
            f"strong scaling: the recipe's step is divided, down to {MIN_RANK_TOKENS} tokens for a GPU",
            plan.strong_scaling,
        ),
    ):
        typer.echo(title)
        typer.echo(charts.columned(*scaling_rows(points), width=max(width, 80)))
    typer.echo(charts.terminal(chart, width=width, colour=colour))
    typer.echo(scaling_limits(plan))
    if chosen.gpus > 1:
        typer.echo(
            f"for {chosen.gpus} GPUs: --set training.accumulate={chosen.accumulate}; a step then has "
            f"{chosen.accumulate * chosen.batch_tokens:,} target tokens, and may need another learning rate"
        )
        typer.echo("plans for several GPUs were not compared with measurements of this package: see docs/scale.md")


def scaling_limits(plan: Plan) -> str:
    """Up to how many GPUs scaling pays, in a sentence."""
    end = ", the most that are planned," if plan.weak_scaling_limit >= MAX_RANKS else ""
    return (
        f"scaling pays (80 % of the speed per GPU) up to {plan.weak_scaling_limit:,} GPUs{end} with larger steps "
        f"(weak scaling), and up to {plan.strong_scaling_limit:,} if the recipe's step is divided (strong scaling)"
    )


def summary(point: ScalingPoint) -> str:
    """One number of GPUs in a line."""
    cost = "" if point.cost is None else f", {point.cost:,.2f} in the currency of --price"
    return (
        f"{point.scheme}, {1000 * point.seconds:,.1f} ms per step, {point.tokens_per_second:,.0f} target tokens/s, "
        f"{point.hours:,.2f} hours{cost}"
    )


def memory_rows(memory: list[RankMemory]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of memory."""
    rows = [[label, *(f"{getattr(each, name) / GB:,.2f}" for each in memory)] for name, label in ROWS.items()]
    return ["GB on each GPU", *(each.scheme for each in memory)], rows


def scaling_rows(points: list[ScalingPoint]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a table of scaling."""
    priced = any(point.cost is not None for point in points)
    heads = ["GPUs", "with", "batch", "ms/step", "waiting", "MB sent", "tokens/s", "efficiency", "hours"]
    rows: list[list[Any]] = []
    for p in points:
        numbers = [
            f"{1000 * p.seconds:,.1f}",
            f"{p.waiting:.1%}",
            f"{p.sent / 1e6:,.0f}",
            f"{p.tokens_per_second:,.0f}",
        ]
        row = [f"{p.gpus:,}", p.scheme, f"{p.batch_tokens:,}", *numbers, f"{p.efficiency:.0%}", f"{p.hours:,.2f}"]
        rows.append(row + ([f"{p.cost:,.{2 if p.cost < 100 else 0}f}"] if p.cost is not None else []))
    return heads + (["cost"] if priced else []), rows
