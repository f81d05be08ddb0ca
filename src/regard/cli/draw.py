"""regard draw"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regard.api import load
from regard.cli import options
from regard.cli.output import note
from regard.errors import UserError
from regard.interpret import position_study
from regard.interpret.trace import Trace
from regard.run_dir import RunDir
from regard.viz import terminal, views
from regard.viz.views import MapChoice, Picture, files


class ViewOption(StrEnum):
    align = "align"
    maps = "maps"
    heads = "heads"
    walk = "walk"
    gates = "gates"
    positions = "positions"
    curves = "curves"


class PartOption(StrEnum):
    cross = "cross"
    encoder = "encoder"
    decoder = "decoder"


class Theme(StrEnum):
    auto = "auto"
    light = "light"
    dark = "dark"


TEXTLESS = (ViewOption.positions, ViewOption.curves)
READ_BY = {  # which views an option says something to
    "--part": (ViewOption.maps, ViewOption.gates),
    "--layer": (ViewOption.align, ViewOption.maps, ViewOption.gates),
    "--head": (ViewOption.align, ViewOption.maps),
    "--pieces": (ViewOption.align, ViewOption.maps),
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
            metavar="TEXT", help="What the model reads; positions and curves need none.", show_default=False
        ),
    ] = None,
    view: Annotated[
        ViewOption | None,
        typer.Option(metavar="VIEW", help="What to see. [default: the first that the model has of align, maps, gates]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file: .svg, .png or .pdf for the picture, .html for the page with everything in it, .json for the "
            "numbers, .safetensors for all that was recorded. None, or -: the terminal.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Draw this output instead of the model's own.")] = None,
    part: Annotated[
        PartOption | None, typer.Option(help="Whose attention (maps) or gates. [default: the first]")
    ] = None,
    layer: Annotated[int | None, typer.Option(min=1, help="One layer. [default: mean of all; gates: all]")] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="N|mean|best", help="One head, or the best-aligned one (needs gold links). [default: mean]"
        ),
    ] = None,
    pieces: Annotated[
        bool, typer.Option("--pieces", help="Tokens as the model sees them, not joined to words.")
    ] = False,
    kind: Annotated[
        str | None, typer.Option(help="Positions: sinusoidal, learned, index, fraction. [default: the run's]")
    ] = None,
    beside: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Curves: another run in the same charts; may be repeated.")
    ] = None,
    theme: Annotated[
        Theme, typer.Option(help="Of a picture; auto follows the reader's screen, .png is light.")
    ] = Theme.auto,
    weights: options.Weights = "best",
    device: options.Device = "auto",
) -> None:
    """Draw what happens in a model while it reads a text: attention, gates, the way to the next token.

    - **align**: where each output word looked in the source
    - **maps**: one attention of any part
    - **heads**: every head of every layer, small
    - **walk**: from text to the next token, step by step
    - **gates**: what gates let through, token by token
    - **positions**: the vectors that say where a token stands
    - **curves**: how training went

    Attention shows where the model looked, which is not by itself an explanation of what it said.

    Examples:

        regard draw runs/en-es 'this cat is very large'

        regard draw runs/en-es 'this cat is very large' --view heads --out heads.png

        regard draw runs/en-es --view curves --out curves.svg
    """
    path = None if out is None or str(out) == "-" else out
    if path is not None:
        files.checked(path, traced=view not in TEXTLESS)
    options.readable(TEXT=text, **{"--target": target})
    view = ViewOption.maps if view is None and part is not None else view
    given: dict[str, object] = {
        "--part": part,
        "--layer": layer,
        "--head": head,
        "--pieces": pieces or None,
        "--target": target,
    }
    given |= {"--kind": kind, "--beside": beside, "--weights": None if weights == "best" else weights}
    idle = _idle(view, given)
    if idle is not None:
        where = f"on --view {view}" if view is not None else "here"
        raise UserError(f"{idle} has no effect {where}: it is for --view {' and '.join(READ_BY[idle])}")
    if view in TEXTLESS:
        picture = (
            _curves([run, *(beside or [])])
            if view is ViewOption.curves
            else _positions(run, kind, text, weights, device)
        )
        return _show(picture, path, theme)
    if text is None:
        raise UserError("TEXT is missing: what should the model read? (--view curves and positions need none)")
    if not text.strip():
        raise UserError("there is nothing to draw: the sentence is blank")
    choice = _choice(part, layer, head, pieces)
    _show(views.draw(_trace(run, text, target, weights, device), view, choice), path, theme)


def _idle(view: ViewOption | None, given: dict[str, object]) -> str | None:
    """An option that was given and that the view does not read; without a view, one that no view of a text reads."""
    views = {view} if view is not None else set(ViewOption) - set(TEXTLESS)
    return next((name for name, value in given.items() if value is not None and not views & set(READ_BY[name])), None)


def _choice(part: PartOption | None, layer: int | None, head: str | None, pieces: bool) -> MapChoice:
    """People count from 1."""
    if head not in (None, "mean", "best") and not (head.isascii() and head.isdigit() and int(head) > 0):
        raise UserError(f"--head {head}: give a number from 1, mean or best")
    chosen = None if head in (None, "mean") else "best" if head == "best" else int(head) - 1
    return MapChoice(None if part is None else part.value, None if layer is None else layer - 1, chosen, not pieces)  # type: ignore[arg-type]


def _trace(run: Path, text: str, target: str | None, weights: str, device: str) -> Trace:
    trace = load(run, weights=weights, device=device).trace(text, target)
    if trace.header["text"]["cut"]:
        note("regard: warning: the text is longer than the model reads and was cut")
    return trace


def _curves(paths: list[Path]) -> Picture:
    return views.curves([RunDir(path) for path in paths])


def _positions(run: Path, kind: str | None, text: str | None, weights: str, device: str) -> Picture:
    """The run's own positions, or named ones as wide as the run's; as many as the text has tokens."""
    model = load(run, weights=weights, device=device)
    own = getattr(model.run.recipe.model, "positions", None)
    if kind is None and own is None:
        family = model.run.recipe.model.family
        raise UserError(f"{run}: a {family} model reads in order and adds no positions; --kind sinusoidal shows some")
    length = 64 if text is None else max(2, len(model.run.tokenizers[0].encode(text)))
    table = position_study.table(model.module) if kind in (None, "learned") and own == "learned" else None
    study = position_study.study(kind or str(own), length, model.run.recipe.model.width, table=table)
    return views.positions(study, run.name if kind is None else "")


def _show(picture: Picture, path: Path | None, theme: Theme) -> None:
    if path is None:
        width, colour = terminal.capabilities(sys.stdout)
        return typer.echo(picture.text(width=width, colour=colour))
    missing = picture.save(path, theme=theme.value)
    if missing:
        note(f"regard: warning: no font here has {missing}: an .svg leaves that to its reader")
    said = "" if picture.trace is None else f": {picture.trace.header['text']['target']}"
    note(f"{path}{said}")
