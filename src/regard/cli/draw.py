"""regard draw"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regard import tasks
from regard.api import Model, load
from regard.cli import options
from regard.cli.output import note
from regard.errors import UserError
from regard.interpret import position_study
from regard.interpret.interventions import hiding
from regard.interpret.trace import Trace
from regard.run_dir import RunDir
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
    overlay = "overlay"


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
DRAWN = tuple(view for view in ViewOption if view not in TEXTLESS)  # views of an input
VIEWS_WITH = {  # the views in which an option has an effect
    "--part": (ViewOption.overlay, ViewOption.maps, ViewOption.gates),
    "--layer": (ViewOption.overlay, ViewOption.align, ViewOption.maps, ViewOption.gates),
    "--head": (ViewOption.overlay, ViewOption.align, ViewOption.maps),
    "--at": (ViewOption.overlay,),
    "--hide": DRAWN,
    "--tokens": (ViewOption.overlay, ViewOption.align, ViewOption.maps),
    "--target": DRAWN,
    "--kind": (ViewOption.positions,),
    "--beside": (ViewOption.curves,),
    "--weights": (*DRAWN, ViewOption.positions),
}


def draw(
    run: options.RunPath,
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT",
            help="The input of the model: a text, an image file or `test 3`, an episode (`key-door seed 3`), a node of "
            "a graph, a molecule as SMILES, a sound file. The views positions and curves need none.",
            show_default=False,
        ),
    ] = None,
    view: Annotated[
        ViewOption | None,
        typer.Option(
            "--view",
            metavar="VIEW",
            help="What to draw, see above. [default: the first of overlay, align, maps, gates that the model has]",
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
        typer.Option(help="Views overlay, maps and gates: the part of the model. [default: the first that it has]"),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            metavar="N|mean|rollout",
            help="Draw one layer, or attention rollout through all layers. [default: the mean of all; view gates: all]",
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="N|mean|best",
            help="Draw one head; best is the head that aligns words best, if gold alignments are built in. "
            "[default: mean]",
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="ELEMENT",
            help="View overlay: the attention of this patch (row,column), step, node or word. [default: of the output]",
        ),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show tokens instead of whole words or steps.")] = False,
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
            metavar="ELEMENT",
            help="Without this word, patch (row,column), step, stretch of sound (0.2-0.5 s), node or edge (A:B). "
            "Repeatable.",
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

    - **overlay**: attention over an image, a recording, the frames of an episode, or the edges of a graph
    - **align**: which source words each output word attends to
    - **maps**: the attention weights of one part of the model
    - **heads**: every head of every layer, side by side
    - **walk**: from the text to the next token, step by step
    - **gates**: the gates of a recurrent model, token by token
    - **positions**: the position vectors
    - **curves**: training and validation over time

    Attention weights show what the model attended to; they alone do not explain its output.

    Examples:

        regard draw runs/en-es 'this cat is very large'

        regard draw runs/en-es 'this cat is very large' --view heads --out heads.png

        regard draw runs/shapes 'test 3' --layer rollout --hide 2,3 --out rollout.svg

        regard draw runs/en-es --view curves --out curves.svg
    """
    path = None if out is None or str(out) == "-" else out
    if path is not None:
        files.checked(path, traced=view not in TEXTLESS)
    options.check_utf8(TEXT=text, **{"--target": target})
    RunDir(run)  # a run that does not exist is the first mistake to report
    view = ViewOption.maps if view is None and part is not None else view
    given: dict[str, object] = {
        "--part": part,
        "--layer": layer,
        "--head": head,
        "--at": at,
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
        reads = tasks.of(RunDir(run).recipe).example_usage
        raise UserError(
            f"TEXT is missing: give what the model reads, such as {reads} (not with --view curves, positions)"
        )
    if not text.strip():
        raise UserError("TEXT is blank: there is nothing to draw")
    choice = _choice(part, layer, head, tokens)
    trace = _trace(load(run, weights=weights, device=device), text, target, hide or [])
    _show(views.draw(trace, view, choice, at=at), path, theme)


def _without_effect(view: ViewOption | None, given: dict[str, object]) -> str | None:
    """The first given option that has no effect in the view; without a view, in no view of a text."""
    views = {view} if view is not None else set(ViewOption) - set(TEXTLESS)
    return next(
        (name for name, value in given.items() if value is not None and not views & set(VIEWS_WITH[name])), None
    )


def _choice(part: PartOption | None, layer: str | None, head: str | None, tokens: bool) -> MapChoice:
    """Parse --layer and --head, and count both from 0."""
    layers, heads = (_number("--layer", layer, ("mean", "rollout")), _number("--head", head, ("mean", "best")))
    return MapChoice(None if part is None else part.value, layers, heads, not tokens)  # type: ignore[arg-type]


def _number(option: str, given: str | None, names: tuple[str, str]) -> int | str | None:
    """A number from 1 as one from 0, the second of the names as it is, and None for the first one."""
    if given in (None, names[0]):
        return None
    if given == names[1]:
        return given
    if given is None or not (given.isascii() and given.isdigit() and int(given) > 0):
        raise UserError(f"{option} {given}: must be a number from 1, {names[0]} or {names[1]}")
    return int(given) - 1


def _trace(model: Model, text: str, target: str | None, hide: list[str]) -> Trace:
    model.task.require_verb("draw", model.run.path)
    trace = model.trace(text, target)
    if trace.header["text"]["cut"]:
        note("regard: warning: the text is longer than the model's maximum and was truncated")
    return model.trace(text, target, hiding(trace.header, hide)) if hide else trace


def _curves(paths: list[Path]) -> Picture:
    return views.curves([RunDir(path) for path in paths])


def _positions(run: Path, kind: str | None, text: str | None, weights: str, device: str) -> Picture:
    """Draw the positions of the run, or those of another kind with the same width; as many as the text has tokens."""
    model = load(run, weights=weights, device=device)
    used = getattr(model.run.recipe.model, "positions", None)
    if kind is None and used is None:
        raise UserError(f"{run}: this model adds no positions; --kind sinusoidal shows those of other models")
    length = (
        64 if text is None or not model.recipe.data.has_tokens else max(2, len(model.run.tokenizers[0].encode(text)))
    )
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
