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
from regard.cli.progress import progress_bar
from regard.errors import UserError
from regard.interpret.explain import Curve, Explanation, Sampling
from regard.interpret.explain import curves as make_curves
from regard.interpret.explain.models import ExplainRequest, MaskingMode, explain_request
from regard.interpret.explain.rise import Numbers
from regard.text.display import visible
from regard.viz import charts, explanation_text, explanations, scene, terminal
from regard.viz.charts import columned


def explain(
    run: options.RunPath,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The input of the model.")],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The output, or the class, to explain. [default: the model's own output]",
            show_default=False,
        ),
    ] = None,
    masks: Annotated[
        int, typer.Option(metavar="N", min=4, help="Maximum number of random masks, each hiding some words.")
    ] = 1000,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--random",
            help="Use all possible masks (up to 12 words), or random ones. [default: all, if --masks allows that]",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Stop as soon as every standard error is at most this. [default: use all masks]",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(metavar="X", help="The probability that a mask keeps a word, from 0.01 to 0.99.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The random seed of the masks.")] = 0,
    how: Annotated[
        options.MaskMethodOption, typer.Option(help="Replace hidden words by the unknown token, or drop them.")
    ] = options.MaskMethodOption.UNKNOWN,
    tokens: Annotated[bool, typer.Option("--tokens", help="Hide tokens instead of whole words.")] = False,
    span: Annotated[int, typer.Option(metavar="N", min=1, help="Hide this many neighbouring words together.")] = 1,
    curves: Annotated[
        bool, typer.Option("--curves", help="Also compute deletion and insertion curves, which test the explanation.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw an .svg file. [default: draw in the terminal]", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")] = False,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Show which input words the output depends on, with the model as a black box (RISE).

    Hides random selections of words, many times, and scores the output each time. The importance of a word is the
    average log-probability of the output when the word is visible, minus the average when it is hidden. This describes
    how the output reacts to hidden words; it does not show how the model reasons.

    Examples:

        regard explain runs/en-es 'this cat is very large'

        regard explain runs/en-es 'this cat is very large' --curves --out cat.svg

        regard explain runs/stories 'Once upon a time' --how drop --json
    """
    options.check_utf8(TEXT=text, **{"--target": target})
    if out is not None and out.suffix.lower() != ".svg":
        raise UserError(f"{out}: the picture can only be written as .svg (without --out it is shown in the terminal)")
    if out is not None and as_json:
        raise UserError("--out draws a picture and --json prints numbers: give only one of them")
    settings = {"masks": masks, "exact": exact, "tolerance": tolerance, "keep": keep, "seed": seed}
    sampling = Sampling(**settings)  # type: ignore[arg-type]
    masking = MaskingMode(how.value, "tokens" if tokens else "words", span)
    request = explain_request(load(run, weights=weights, device=device), text, target=target, masking=masking)
    if request.truncated and not quiet:
        note("regard: warning: the text is longer than the model's maximum and was truncated")
    parts = len(request.box.parts)
    with progress_bar("explaining", 2**parts if sampling.enumerates(parts) else masks, quiet) as progress:
        explanation = request.explain(progress, **settings)
    computed = make_curves(request.box, _orders(request, explanation), seed=seed) if curves else []
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    if out is not None:
        with written(out) as file:
            file.write(_picture(request, explanation, computed))
        note(f"{out}: {request.output}")
    elif as_json:
        typer.echo(_json(text, request, explanation, computed))
    else:
        typer.echo(_terminal(text, request, explanation, computed), nl=False)


def _orders(request: ExplainRequest, explanation: Explanation) -> dict[str, Numbers]:
    """The numbers to sort the parts by: their importance and, if the model has it, its attention."""
    attention = request.attention()
    return {"importance": explanation.overall} | ({} if attention is None else {"attention": attention})


def _picture(request: ExplainRequest, explanation: Explanation, curves: list[Curve]) -> str:
    drawn = explanations.curve_charts(curves, request.score) if curves else []
    return scene.stacked([explanations.scene(explanation), *map(charts.scene, drawn)]).svg()


def _json(text: str, request: ExplainRequest, explanation: Explanation, curves: list[Curve]) -> str:
    entries = [
        {
            "order": curve.name,
            "deletion": curve.deletion.tolist(),
            "insertion": curve.insertion.tolist(),
            "deletion_area": curve.deletion_area,
            "insertion_area": curve.insertion_area,
        }
        for curve in curves
    ]
    head = {"text": text, "output": request.output, **explanation.to_json()}
    return json.dumps(head | ({"curves": entries} if curves else {}), ensure_ascii=False)


def _terminal(text: str, request: ExplainRequest, explanation: Explanation, curves: list[Curve]) -> str:
    """Draw for the terminal: a bar for each word, the matrix of words and outputs, and the areas under the curves."""
    width, colour = terminal.capabilities(sys.stdout)
    hidden = "replaced by the unknown token" if request.masking.how == "unknown" else "dropped"
    calls = f"{explanation.calls} masks"
    error = f"all {calls}, so exact" if explanation.exact else f"{calls}, ± one standard error"
    heading = " ".join(map(visible, f"{text} → {request.output}".split()))
    parts = [
        f"{heading}\n",
        f"Change in the {request.score} by each word ({error}):\n",
        explanation_text.bars(explanation, width=width, colour=colour),
    ]
    if len(explanation.outputs) > 1:
        matrix = explanation_text.matrix(explanation, width=width, colour=colour)
        parts += ["Change in the log-probability of each output:\n", matrix]
    if curves:
        rows = [[c.name, f"{c.deletion_area:.2f}", f"{c.insertion_area:.2f}"] for c in curves]
        heads = ["area under the curve, by", "deletion (lower is better)", "insertion (higher is better)"]
        parts.append(columned(heads, rows, width))
    note = (
        f"This shows how the output depends on the words when some are hidden ({hidden}). It does not show how the "
        "model reasons: with words hidden, a model may behave as it never does on whole texts."
    )
    return "\n".join([*parts, textwrap.fill(note, width) + "\n"])
