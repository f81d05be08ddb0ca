"""regard explain"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from regard.api import load
from regard.cli import options
from regard.cli.groups import grouped
from regard.cli.output import note
from regard.cli.progress import progress_bar
from regard.errors import UserError
from regard.interpret.explain import Curve, Explanation, Sampling
from regard.interpret.explain import curves as make_curves
from regard.interpret.explain.models import explain_request
from regard.interpret.explain.request import ExplainRequest, MaskingMode, Unit
from regard.text.display import visible
from regard.viz import charts, explanation_text, explanations, scene, terminal
from regard.viz.charts import columned
from regard.viz.image_explanations import ImageExplanation
from regard.viz.views.files import PICTURES, save_scene


@dataclass(frozen=True)
class MaskOptions:
    """The random masks, and how many of them."""

    masks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=4,
            help="Maximum number of random masks, each hiding words or parts of an image. [default: 1000, for images "
            "4000]",
            show_default=False,
        ),
    ] = None
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--random",
            help="Use all possible masks (up to 12 words), or random ones. [default: all, if --masks allows that]",
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Stop as soon as every standard error is at most this. [default: use all masks]",
            show_default=False,
        ),
    ] = None
    keep: Annotated[
        float, typer.Option(metavar="X", help="The probability that a mask keeps a word, from 0.01 to 0.99.")
    ] = 0.5
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The random seed of the masks.")] = 0

    def settings(self, usual_masks: int = 1000) -> Sampling:
        """The settings of the estimate; `usual_masks` unless a number was given."""
        masks = usual_masks if self.masks is None else self.masks
        return Sampling(masks, self.keep, self.exact, tolerance=self.tolerance, seed=self.seed)


@dataclass(frozen=True)
class HidingOptions:
    """How parts of the input are hidden."""

    how: Annotated[
        options.MaskMethodOption, typer.Option(help="Replace hidden words by the unknown token, or drop them.")
    ] = options.MaskMethodOption.UNKNOWN
    tokens: Annotated[bool, typer.Option("--tokens", help="Hide tokens instead of whole words.")] = False
    span: Annotated[int, typer.Option(metavar="N", min=1, help="Hide this many neighbouring words together.")] = 1
    fill: Annotated[options.FillOption, typer.Option(help="Images: what hidden pixels become.")] = (
        options.FillOption.GREY
    )
    cells: Annotated[
        int, typer.Option(metavar="N", min=1, help="Images: cells of a mask along the longer side, hidden as one.")
    ] = 7

    def mode(self) -> MaskingMode:
        unit: Unit = "tokens" if self.tokens else "words"
        return MaskingMode(self.how.value, unit, self.span, self.fill.value, self.cells)


@grouped
def explain(
    run: options.RunPath,
    text: Annotated[str, typer.Argument(metavar="INPUT", help="The input of the model: a text, or an image file.")],
    *,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The output, or the class, to explain. [default: the model's own output]",
            show_default=False,
        ),
    ] = None,
    sampling: MaskOptions,
    hiding: HidingOptions,
    curves: Annotated[
        bool, typer.Option("--curves", help="Also compute deletion and insertion curves, which test the explanation.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw an .svg, .png or .pdf file. [default: draw in the terminal]", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")] = False,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Show which input words or pixels the output depends on, with the model as a black box (RISE).

    Hides random selections of words, or random parts of an image, many times, and scores the output each time. The
    importance of a word is the average log-probability of the output when the word is visible, minus the average when
    it is hidden; that of a pixel is the same with the probability of the class. This describes how the output reacts
    to hidden parts; it does not show how the model reasons.

    Examples:

        regard explain runs/en-es 'this cat is very large'

        regard explain runs/en-es 'this cat is very large' --curves --out cat.svg

        regard explain runs/stories 'Once upon a time' --how drop --json

        regard explain runs/cifar10 cat.png --curves --out why-cat.png
    """
    options.check_utf8(INPUT=text, **{"--target": target})
    _check_out(out, as_json)
    sampling.settings()  # refuse invalid ones before loading
    loaded = load(run, weights=weights, device=device)
    request = explain_request(loaded, text, target=target, masking=hiding.mode())
    if request.truncated and not quiet:
        note("regard: warning: the text is longer than the model's maximum and was truncated")
    settings = sampling.settings(request.usual_masks)
    with progress_bar("explaining", request.box.count_masks(settings), quiet) as progress:
        explanation = request.explain(progress, **asdict(settings))
    orders = request.orders(explanation.overall)
    computed = make_curves(request.box, orders, insertion=request.insertion, seed=sampling.seed) if curves else []
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    if out is not None:
        save_scene(_picture(request, explanation, computed), out)
        note(f"{out}: {request.output}")
    elif as_json:
        typer.echo(_json(text, request, explanation, computed))
    else:
        typer.echo(_terminal(text, request, explanation, computed), nl=False)


def _check_out(out: Path | None, as_json: bool) -> None:
    if out is not None and out.suffix.lower() not in PICTURES:
        raise UserError(
            f"{out}: the name of the picture must end in {', '.join(PICTURES)} (without --out: the terminal)"
        )
    if out is not None and as_json:
        raise UserError("--out draws a picture and --json prints numbers: give only one of them")


def _picture(request: ExplainRequest, explanation: Explanation, curves: list[Curve]) -> scene.Scene:
    drawn = explanations.curve_charts(curves, request.score) if curves else []
    return scene.stacked([_first_scene(request, explanation), *map(charts.scene, drawn)])


def _first_scene(request: ExplainRequest, explanation: Explanation) -> scene.Scene:
    if request.image is None:
        return explanations.scene(explanation)
    return ImageExplanation(explanation, request.image, request.output).scene()


def _json(text: str, request: ExplainRequest, explanation: Explanation, curves: list[Curve]) -> str:
    entries = [
        {
            "order": curve.name,
            "counts": curve.counts.tolist(),
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
    """Draw for the terminal: bars and a matrix, or maps over an image; and the areas under the curves."""
    width, colour = terminal.capabilities(sys.stdout)
    heading = " ".join(map(visible, f"{text} → {request.output}".split()))
    words = _words if request.image is None else _pixels
    parts = [f"{heading}\n", *words(request, explanation, width, colour)]
    if curves:
        rows = [[c.name, f"{c.deletion_area:.2f}", f"{c.insertion_area:.2f}"] for c in curves]
        heads = ["area under the curve, by", "deletion (lower is better)", "insertion (higher is better)"]
        parts.append(columned(heads, rows, width))
    hidden = "replaced by the unknown token" if request.masking.how == "unknown" else "dropped"
    names = ("words", hidden, "texts") if request.image is None else ("pixels", request.masking.fill, "images")
    note = (
        f"This shows how the output depends on the {names[0]} when some are hidden ({names[1]}). It does not show how "
        f"the model reasons: with {names[0]} hidden, a model may behave as it never does on whole {names[2]}."
    )
    return "\n".join([*parts, textwrap.fill(note, width) + "\n"])


def _words(request: ExplainRequest, explanation: Explanation, width: int, colour: terminal.Colour) -> list[str]:
    """A bar for each word, and the matrix of words and outputs."""
    calls = f"{explanation.calls} masks"
    error = f"all {calls}, so exact" if explanation.exact else f"{calls}, ± one standard error"
    bars = explanation_text.bars(explanation, width=width, colour=colour)
    parts = [f"Change in the {request.score} by each word ({error}):\n", bars]
    if len(explanation.outputs) > 1:
        matrix = explanation_text.matrix(explanation, width=width, colour=colour)
        parts += ["Change in the log-probability of each output:\n", matrix]
    return parts


def _pixels(request: ExplainRequest, explanation: Explanation, width: int, colour: terminal.Colour) -> list[str]:
    """The maps of the importance of pixels."""
    drawn = ImageExplanation(explanation, request.image, request.output).text(width=width, colour=colour)
    error = f"{explanation.calls} masks, standard errors up to {explanation.overall_error.max():.3f}"
    return [f"Change in the {request.score} by each pixel ({error}):\n", drawn]
