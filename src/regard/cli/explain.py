"""regard explain"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from regard.api import load
from regard.cli import options
from regard.cli.output import note, written
from regard.cli.progress import counted
from regard.errors import UserError
from regard.interpret.explain import Curve, Explanation, Sampling
from regard.interpret.explain import curves as trace
from regard.interpret.explain.models import ExplainRequest, MaskingMode, ask
from regard.interpret.explain.rise import Numbers
from regard.text.display import visible
from regard.viz import charts, explanation_text, explanations, scene, terminal
from regard.viz.charts import columned


def explain(
    run: options.RunPath,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model reads.")],
    target: Annotated[
        str | None, typer.Option(help="Explain this output (or class) instead of the model's own.", show_default=False)
    ] = None,
    masks: Annotated[int, typer.Option(min=4, help="Ask about at most this many random selections of words.")] = 1000,
    exact: Annotated[
        bool | None,
        typer.Option("--exact/--random", help="All selections, up to 12 words. [default: where they are no more]"),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Stop when every standard error is at most this.", show_default=False)
    ] = None,
    keep: Annotated[float, typer.Option(help="How likely a word is kept, from 0.01 to 0.99.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other selections.")] = 0,
    how: Annotated[
        options.MaskMethodOption, typer.Option(help="Put the unknown token in a hidden word's place, or leave it out.")
    ] = options.MaskMethodOption.unknown,
    pieces: Annotated[bool, typer.Option("--pieces", help="Hide tokens as the model sees them, not words.")] = False,
    span: Annotated[int, typer.Option(min=1, help="Hide this many neighbouring words together.")] = 1,
    curves: Annotated[bool, typer.Option("--curves", help="Deletion and insertion curves as well.")] = False,
    out: Annotated[Path | None, typer.Option(help="An .svg file. None: the terminal.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The numbers as a JSON object.")] = False,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Which words the output depends on, with the model as a black box (RISE).

    Words are hidden at random, many times over; the model's own output (or --target) is scored each time. A word's
    importance is the log-probability of the output with the word, less that without it, on average over what else was
    hidden. This is what the output depended on while words were hidden, not what the model "thought".

    Examples:

        regard explain runs/en-es 'this cat is very large'

        regard explain runs/en-es 'this cat is very large' --curves --out cat.svg

        regard explain runs/stories 'Once upon a time' --how drop --json
    """
    options.readable(TEXT=text, **{"--target": target})
    if out is not None and out.suffix.lower() != ".svg":
        raise UserError(f"{out}: only .svg files can be drawn (without --out it is shown in the terminal)")
    if out is not None and as_json:
        raise UserError("--out draws a picture and --json writes numbers: choose one")
    settings = {"masks": masks, "exact": exact, "tolerance": tolerance, "keep": keep, "seed": seed}
    sampling = Sampling(**settings)  # type: ignore[arg-type]
    hiding = MaskingMode(how.value, "pieces" if pieces else "words", span)
    asked = ask(load(run, weights=weights, device=device), text, target=target, hiding=hiding)
    if asked.cut and not quiet:
        note("regard: warning: the text is longer than the model reads and was cut")
    parts = len(asked.box.parts)
    with counted("asking", 2**parts if sampling.enumerates(parts) else masks, quiet) as progress:
        found = asked.explain(progress, **settings)
    traced = trace(asked.box, _orders(asked, found), seed=seed) if curves else []
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    if out is not None:
        with written(out) as file:
            file.write(_picture(asked, found, traced))
        note(f"{out}: {asked.said}")
    elif as_json:
        typer.echo(_json(text, asked, found, traced))
    else:
        typer.echo(_shown(text, asked, found, traced), nl=False)


def _orders(asked: ExplainRequest, found: Explanation) -> dict[str, Numbers]:
    """By what the parts are put in order: their importance and, where the model has it, its attention."""
    attention = asked.attention()
    return {"importance": found.overall} | ({} if attention is None else {"attention": attention})


def _picture(asked: ExplainRequest, found: Explanation, traced: list[Curve]) -> str:
    curves = explanations.curve_charts(traced, asked.score) if traced else []
    return scene.stacked([explanations.scene(found), *map(charts.scene, curves)]).svg()


def _json(text: str, asked: ExplainRequest, found: Explanation, traced: list[Curve]) -> str:
    entries = [
        {
            "order": curve.name,
            "deletion": curve.deletion.tolist(),
            "insertion": curve.insertion.tolist(),
            "deletion_area": curve.deletion_area,
            "insertion_area": curve.insertion_area,
        }
        for curve in traced
    ]
    head = {"text": text, "output": asked.said, **found.to_json()}
    return json.dumps(head | ({"curves": entries} if traced else {}), ensure_ascii=False)


def _shown(text: str, asked: ExplainRequest, found: Explanation, traced: list[Curve]) -> str:
    """For the terminal: what was said, the words with their bars, the matrix, the areas, and what it all means."""
    width, colour = terminal.capabilities(sys.stdout)
    hidden = "replaced by the unknown token" if asked.hiding.how == "unknown" else "left out"
    sure = f"all {found.calls} selections, so exact" if found.exact else f"{found.calls} calls, ± one standard error"
    clean = " ".join(map(visible, f"{text} → {asked.said}".split()))
    parts = [
        f"{clean}\n",
        f"Change in the {asked.score} by each word ({sure}):\n",
        explanation_text.bars(found, width=width, colour=colour),
    ]
    if len(found.outputs) > 1:
        parts += [
            "Change in the log-probability of each output:\n",
            explanation_text.matrix(found, width=width, colour=colour),
        ]
    if traced:
        rows = [[c.name, f"{c.deletion_area:.2f}", f"{c.insertion_area:.2f}"] for c in traced]
        parts.append(
            columned(["area under the curve, by", "deletion (low is good)", "insertion (high is good)"], rows, width)
        )
    note = (
        f"This is what the output depended on while words were hidden ({hidden}), not what the model “thought”: "
        "a model may answer hidden words in ways it never answers whole texts."
    )
    return "\n".join([*parts, textwrap.fill(note, width) + "\n"])
