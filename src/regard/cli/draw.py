"""regard draw"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regard import tasks
from regard.api import load
from regard.cli import options
from regard.cli.output import note
from regard.errors import UserError
from regard.interpret import position_study
from regard.interpret.edge_attention import edge_attention
from regard.interpret.trace import Trace
from regard.run_dir import RunDir
from regard.tasks.graph_view import GraphViewTask
from regard.viz import terminal, views
from regard.viz.views import MapChoice, Picture, files


class ViewOption(StrEnum):
    """The views that --view can name."""

    align = "align"
    maps = "maps"
    heads = "heads"
    walk = "walk"
    gates = "gates"
    positions = "positions"
    curves = "curves"
    graph = "graph"


class PartOption(StrEnum):
    """The parts of a model that --part can name."""

    cross = "cross"
    encoder = "encoder"
    decoder = "decoder"


class Theme(StrEnum):
    """The colours of a picture."""

    auto = "auto"
    light = "light"
    dark = "dark"


TEXTLESS = (ViewOption.positions, ViewOption.curves)
VIEWS_WITH = {  # the views in which an option has an effect
    "--part": (ViewOption.maps, ViewOption.gates),
    "--layer": (ViewOption.align, ViewOption.maps, ViewOption.gates, ViewOption.graph),
    "--head": (ViewOption.align, ViewOption.maps, ViewOption.graph),
    "--hide": (ViewOption.graph,),
    "--tokens": (ViewOption.align, ViewOption.maps),
    "--target": (ViewOption.align, ViewOption.maps, ViewOption.heads, ViewOption.walk, ViewOption.gates),
    "--kind": (ViewOption.positions,),
    "--beside": (ViewOption.curves,),
    "--weights": tuple(view for view in ViewOption if view is not ViewOption.curves),
}


def draw(
    run: options.RunPath,
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT",
            help="The input of the model: a text, a node of a graph, a molecule as SMILES. The views positions and "
            "curves need none.",
            show_default=False,
        ),
    ] = None,
    view: Annotated[
        ViewOption | None,
        typer.Option(
            "--view",
            metavar="VIEW",
            help="What to draw, see above. [default: the first of align, maps, gates that the model has]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a file: .svg, .png or .pdf for the picture, .html for an interactive page, .json for the "
            "numbers, .safetensors for all recorded tensors. [default: draw in the terminal]",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The output to draw. [default: the model's own output]")
    ] = None,
    part: Annotated[
        PartOption | None,
        typer.Option(help="Views maps and gates: the part of the model. [default: the first that it has]"),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Draw one layer. [default: the mean of all; view gates: all]")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="N|mean|best",
            help="Draw one head; best is the head that aligns words best, if gold alignments are built in. "
            "[default: mean]",
        ),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show tokens instead of whole words.")] = False,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="View positions: sinusoidal, learned, index or fraction. [default: those of the run]",
        ),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="View curves: another run in the same charts. Repeatable."),
    ] = None,
    hide: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE|A:B", help="View graph: predict without this node, or without the edge A:B. Repeatable."
        ),
    ] = None,
    theme: Annotated[
        Theme,
        typer.Option(help="The colours of a file; auto follows the viewer's settings (.png and .pdf are light)."),
    ] = Theme.auto,
    weights: options.Weights = "best",
    device: options.Device = "auto",
) -> None:
    """Draw what happens inside a model: attention, gates, the path to the next token.

    - **align**: which source words each output word attends to
    - **maps**: the attention weights of one part of the model
    - **heads**: every head of every layer, side by side
    - **walk**: from the text to the next token, step by step
    - **gates**: the gates of a recurrent model, token by token
    - **positions**: the position vectors
    - **curves**: training and validation over time
    - **graph**: models of graphs: the edges around a node, or a molecule, weighted by attention

    Attention shows where the model looked; that alone does not explain its output.

    Examples:

        regard draw runs/en-es 'this cat is very large'

        regard draw runs/en-es 'this cat is very large' --view heads --out heads.png

        regard draw runs/en-es --view curves --out curves.svg
    """
    path = None if out is None or str(out) == "-" else out
    if path is not None:
        files.checked(path, traced=view not in TEXTLESS)
    options.check_utf8(TEXT=text, **{"--target": target})
    view = ViewOption.maps if view is None and part is not None else view
    if view is None and isinstance(tasks.of(RunDir(run).recipe), GraphViewTask):
        view = ViewOption.graph
    given: dict[str, object] = {
        "--part": part,
        "--layer": layer,
        "--head": head,
        "--tokens": tokens or None,
        "--target": target,
    }
    given |= {
        "--kind": kind,
        "--beside": beside,
        "--hide": hide or None,
        "--weights": None if weights == "best" else weights,
    }
    unused = _without_effect(view, given)
    if unused is not None:
        where = f"on --view {view}" if view is not None else "without --view"
        raise UserError(f"{unused} has no effect {where}: it is for --view {' and '.join(VIEWS_WITH[unused])}")
    if view in TEXTLESS:
        picture = (
            _curves([run, *(beside or [])])
            if view is ViewOption.curves
            else _positions(run, kind, text, weights, device)
        )
        return _show(picture, path, theme)
    if text is None:
        raise UserError("TEXT is missing: give the text that the model reads (--view curves and positions need none)")
    if not text.strip():
        raise UserError("TEXT is blank: there is nothing to draw")
    choice = _choice(part, layer, head, tokens)
    if view is ViewOption.graph:
        if choice.head == "best":
            raise UserError("--head best is for alignments: --view graph takes a number or mean")
        loaded = load(run, weights=weights, device=device)
        found = edge_attention(loaded, text, choice.layer, choice.head, hide or [])
        return _show(views.graph(found, text), path, theme)
    _show(views.draw(_trace(run, text, target, weights, device), view, choice), path, theme)


def _without_effect(view: ViewOption | None, given: dict[str, object]) -> str | None:
    """The first given option that has no effect in the view; without a view, in no view of a text."""
    views = {view} if view is not None else set(ViewOption) - set(TEXTLESS)
    return next(
        (name for name, value in given.items() if value is not None and not views & set(VIEWS_WITH[name])), None
    )


def _choice(part: PartOption | None, layer: int | None, head: str | None, tokens: bool) -> MapChoice:
    """Parse --head, and count layers and heads from 0."""
    if head not in (None, "mean", "best") and not (head.isascii() and head.isdigit() and int(head) > 0):
        raise UserError(f"--head {head}: must be a number from 1, mean or best")
    chosen = None if head in (None, "mean") else "best" if head == "best" else int(head) - 1
    return MapChoice(None if part is None else part.value, None if layer is None else layer - 1, chosen, not tokens)  # type: ignore[arg-type]


def _trace(run: Path, text: str, target: str | None, weights: str, device: str) -> Trace:
    trace = load(run, weights=weights, device=device).trace(text, target)
    if trace.header["text"]["cut"]:
        note("regard: warning: the text is longer than the model's maximum and was truncated")
    return trace


def _curves(paths: list[Path]) -> Picture:
    return views.curves([RunDir(path) for path in paths])


def _positions(run: Path, kind: str | None, text: str | None, weights: str, device: str) -> Picture:
    """Draw the positions of the run, or those of another kind with the same width; as many as the text has tokens."""
    model = load(run, weights=weights, device=device)
    used = getattr(model.run.recipe.model, "positions", None)
    if kind is None and used is None:
        raise UserError(f"{run}: this model adds no positions; --kind sinusoidal shows those of other models")
    length = 64 if text is None else max(2, len(model.run.tokenizers[0].encode(text)))
    table = position_study.table(model.module) if kind in (None, "learned") and used == "learned" else None
    study = position_study.study(kind or str(used), length, model.run.recipe.model.width, table=table)
    return views.positions(study, run.name if kind is None else "")


def _show(picture: Picture, path: Path | None, theme: Theme) -> None:
    if path is None:
        width, colour = terminal.capabilities(sys.stdout)
        return typer.echo(picture.text(width=width, colour=colour))
    missing = picture.save(path, theme=theme.value)
    if missing:
        note(f"regard: warning: no installed font has {missing}; an .svg file uses the fonts of its viewer")
    output = "" if picture.trace is None else f": {picture.trace.header['text']['target']}"
    note(f"{path}{output}")
