"""regard align"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated

import typer

from regard import accelerate, devices, tasks
from regard.cli import options
from regard.cli.align_gold import GoldOptions, print_scores
from regard.cli.inputs import Input
from regard.cli.output import note, text_output, written
from regard.cli.progress import progress_bar
from regard.errors import UserError
from regard.metrics.symmetrise import METHODS, pharaoh
from regard.run_dir import RunDir
from regard.tasks.aligner import Aligner, AttentionView, TwoWayAligner, guided_view

DEFAULT_METHOD = "grow-diagonal-and"


def align(
    run: options.RunPath,
    source: Annotated[
        Path | None, typer.Argument(metavar="SOURCE", help="A file of sources, one a line (plain, .gz, .xz or .zst).")
    ] = None,
    target: Annotated[
        Path | None, typer.Argument(metavar="TARGET", help="Their translations, the same number of lines.")
    ] = None,
    reverse: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="A run of the reverse direction, whose links are combined with those of RUN. [default: the attention "
            "of RUN is also read from the side of the source]",
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help=f"How both directions are combined: {', '.join(METHODS)}.")
    ] = DEFAULT_METHOD,
    layer: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Use this decoder layer of RUN. [default: chosen, see above]", show_default=False
        ),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With --layer: use this head. [default: the mean]", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file. [default: standard output]"),
    ] = None,
    gold: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Print scores against these gold links of SOURCE and TARGET, not links."),
    ] = None,
    dev: Annotated[
        tuple[Path, Path, Path] | None,
        typer.Option(
            metavar="GOLD SOURCE TARGET", help="With --gold: choose layer and head by AER on these.", show_default=False
        ),
    ] = None,
    swapped: Annotated[
        bool, typer.Option("--swapped", help="With --gold: in the gold files the target position comes first.")
    ] = False,
    explanations: Annotated[
        int | None,
        typer.Option(
            metavar="MASKS",
            min=1,
            help="With gold links: also score the alignment that explanations (RISE) give, with this many masks.",
            show_default=False,
        ),
    ] = None,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Link the words of sentence pairs by cross-attention, or score such links against gold ones.

    Writes a line of links for each pair in Pharaoh format: 0-0 1-2, source word and target word, from 0. Words are what
    white space separates. Each target word is linked with the source word that it attends to most, each source word in
    the same way by the reverse direction, and both are combined. Layer and head are those of guided alignment
    (training.guided_alignment); else those by which both directions agree best on the first 500 pairs.

    With --gold: alignment error rate (AER), precision and recall (Och and Ney 2003) of both directions and of every
    method. Gold files are in Pharaoh format or in that of the NAACL 2003 shared task. Without SOURCE and TARGET, the
    gold links are those of the built-in corpus that RUN was trained on.

    Examples:

        regard align runs/en-fr corpus.en corpus.fr --reverse runs/fr-en --output links.txt

        regard align runs/en-fr test.en test.fr --reverse runs/fr-en --gold test.wa --dev dev.wa dev.en dev.fr

        regard align runs/en-es
    """
    _check(run, reverse, method, source, target, head, layer)
    given = GoldOptions(gold, source, target, dev, swapped, explanations, as_json, quiet)
    forward = _aligner(run, device, weights)
    backward = None if reverse is None else _aligner(reverse, device)
    view = None if layer is None else _view(forward, layer, head)
    if gold is not None or source is None or target is None:
        options.refuse("with gold links", output=output)
        print_scores(forward, backward, run, view, given)
        return
    options.refuse("without --gold", dev=dev, swapped=swapped or None, explanations=explanations)
    options.refuse("without --gold", json=as_json or None)
    _write_links(forward, backward, view, (source, target), method, output, quiet)


def _check(
    run: Path,
    reverse: Path | None,
    method: str,
    source: Path | None,
    target: Path | None,
    head: int | None,
    layer: int | None,
) -> None:
    if method not in METHODS:
        raise UserError(f"--method {method}: must be one of {', '.join(METHODS)}")
    if head is not None and layer is None:
        raise UserError("--head needs --layer")
    if (source is None) != (target is None):
        raise UserError("TARGET is missing: give a file of sources and one of their translations")
    for path in (run, reverse):
        if path is not None:
            tasks.of(RunDir(path).recipe).require_verb("align", path)


def _view(aligner: Aligner, layer: int, head: int | None) -> AttentionView:
    """The view of --layer and --head, which must exist."""
    attentions = [module for name, module in aligner.model.named_modules() if name.endswith("cross_attn")]
    for option, number, count, what in (
        ("--layer", layer, len(attentions), "decoder layer"),
        ("--head", head or 1, getattr(attentions[0], "heads", 1) if attentions else 1, "head"),
    ):
        if number > count:
            raise UserError(f"{option} {number}: this model has {count} {what}{'' if count == 1 else 's'}")
    return AttentionView(layer - 1, None if head is None else head - 1, "reading")


def _aligner(path: Path, device: str, weights: str = "best") -> Aligner:
    run = RunDir(path)
    model = run.model(devices.pick(device), weights)
    accelerate.for_inference(model)
    return Aligner(model, run.tokenizers, run.recipe)


def _write_links(
    forward: Aligner,
    backward: Aligner | None,
    view: AttentionView | None,
    paths: tuple[Path, Path],
    method: str,
    output: Path | None,
    quiet: bool,
) -> None:
    """Read pairs in chunks and write the links of each before the next is read: n lines in, n lines out."""
    inputs = Input(file=paths[0]), Input(file=paths[1])
    chunks = _pairs(paths, *inputs)
    first = next(chunks, [])
    aligner = TwoWayAligner.choose(forward, backward, first)
    if view is not None:
        aligner = replace(aligner, view=view)
    if not quiet and guided_view(forward.recipe) is None and view is None:
        note(f"regard: links from {describe(aligner.view)}, by which both directions agree best")
    with progress_bar("aligning", inputs[0].count, quiet) as progress:

        def lines() -> Iterator[str]:
            for chunk in chain([first], chunks):
                yield from (pharaoh(links) + "\n" for links in aligner(chunk, method, progress))

        if output is None:
            out = text_output()
            for line in lines():
                out.write(line)
            out.flush()
        else:
            with written(output) as file:
                file.writelines(lines())


def _pairs(paths: tuple[Path, Path], sources: Input, targets: Input) -> Iterator[list[tuple[str, str]]]:
    """Chunks of line-aligned pairs."""
    for left, right in zip_longest(sources.chunks(), targets.chunks()):
        if left is None or right is None or len(left.lines) != len(right.lines):
            for rest in (sources, targets):
                for _ in rest.chunks():
                    pass  # to count the lines
            raise UserError(f"not line-aligned: {paths[0]} has {sources.done:,} lines, {paths[1]} has {targets.done:,}")
        yield list(zip(left.texts, right.texts, strict=True))


def describe(view: AttentionView) -> str:
    """Describe a view: `layer 2, head 3, of the position that reads a word`."""
    if view.layer is None:
        where = "the mean of all heads"
    else:
        where = f"layer {view.layer + 1}, {'mean of its heads' if view.head is None else f'head {view.head + 1}'}"
    return f"{where}, of the position {'that reads' if view.rows == 'reading' else 'that predicts'} a word"
