"""regard draw"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.cli import options


def draw(
    run: options.RunPath,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The sentence to translate and look into.")],
    out: Annotated[Path | None, typer.Option(help="An .svg file. None: the terminal.", show_default=False)] = None,
    target: Annotated[str | None, typer.Option(help="Draw this translation instead of the model's own.")] = None,
    layer: Annotated[int | None, typer.Option(min=1, help="One decoder layer. [default: mean of all]")] = None,
    head: Annotated[int | None, typer.Option(min=1, help="One head. [default: mean of all]")] = None,
    pieces: Annotated[
        bool, typer.Option("--pieces", help="Tokens as the model sees them, not joined to words.")
    ] = False,
    device: options.Device = "auto",
) -> None:
    """Draw what each output word looked at in the source: the cross-attention of one sentence.

    Attention shows where the model looked, which is not by itself an explanation of what it said.

    Examples:

        regard draw runs/en-es 'this cat is very large'

        regard draw runs/en-es 'this cat is very large' --out cat.svg
    """
    from regard.api import load
    from regard.errors import UserError
    from regard.inside import svg, terminal

    if not text.strip():
        raise UserError("there is nothing to draw: the sentence is blank")
    options.readable(TEXT=text, **{"--target": target})
    if out is not None and out.suffix.lower() != ".svg":
        raise UserError(f"{out}: only .svg files can be drawn (without --out it is drawn in the terminal)")
    model = load(run, device=device)
    if model.run.recipe.data.is_text:
        raise UserError(f"{run} reads plain text: draw shows how a translation looks at its source")
    translator = model.translator()
    (source,), (cut,) = translator.encode([text])
    room = translator.room.target(len(source))
    if target is not None and len(translator.tokenizers[1].encode(target)) >= room:
        raise UserError(f"--target is longer than the {room - 1} tokens that this model can write here")
    translation = model.translate(text) if target is None else model.forced(text, target)
    attention = translation.attention
    layers, heads = attention.weights.shape[:2]
    for name, given, most, what in (("--layer", layer, layers, "decoder layer"), ("--head", head, heads, "head")):
        if given is not None and given > most:
            raise UserError(f"{name} {given}: this model has {most} {what}{'s' if most > 1 else ''}")
    if cut:
        most = translator.room.source
        typer.echo(f"regard: warning: the sentence is longer than {most} tokens and was cut", err=True)
    map = attention.map(layer and layer - 1, head and head - 1, words=not pieces)
    if out is not None:
        with options.written(out) as file:
            file.write(svg.draw(map))
        typer.echo(f"{out}: {translation.text}", err=True)
        return
    width, colour = terminal.capabilities(sys.stdout)
    typer.echo(terminal.draw(map, width=width, colour=colour))
