"""regard evaluate"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from regard.api import load
from regard.cli import decoders, options
from regard.cli.evaluate_alignment import AlignmentOptions, evaluate_alignment
from regard.cli.evaluate_text import evaluate_text
from regard.cli.output import written
from regard.cli.progress import counted
from regard.data.corpora import held_out, read_lines
from regard.errors import UserError
from regard.evaluation import TextScores, moses_tokenize, moses_tokenized_bleu, score_texts
from regard.recipes.schema import DataSettings
from regard.run_dir import RunDir

MASKS = 200  # of an explanation: hundreds of sentences are explained, and single links need no error bars


def evaluate(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run directory; or use --outputs.")] = None,
    others: options.With = None,
    split: Annotated[str, typer.Option(help="Which held-out pairs: test, valid, or a built-in corpus's own.")] = "test",
    source: Annotated[Path | None, typer.Option(help="Instead of a split: a file of source sentences ...")] = None,
    reference: Annotated[Path | None, typer.Option(help="... and of reference translations.")] = None,
    text: Annotated[Path | None, typer.Option(help="Runs on text: score this file instead of a split.")] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Runs on text: move the window by so many tokens. [default: half the context]"),
    ] = None,
    outputs: Annotated[Path | None, typer.Option(help="Score these translations; no model is run.")] = None,
    save: Annotated[Path | None, typer.Option(help="Also write the translations to this file.")] = None,
    data: options.Data = None,
    beam: options.Beam = None,
    length_penalty: options.LengthPenalty = None,
    lowercase: options.Lowercase = False,
    moses: options.Moses = None,
    moses_reference: options.MosesReference = None,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Score the links between words that attention draws.")
    ] = False,
    gold: Annotated[
        Path | None,
        typer.Option(help="For --alignment: gold links of --source and --reference. [default: the corpus's own]"),
    ] = None,
    dev: Annotated[
        tuple[Path, Path, Path] | None,
        typer.Option(metavar="GOLD SOURCE REFERENCE", help="For --gold: files to choose head and rows on."),
    ] = None,
    swapped: Annotated[
        bool, typer.Option("--swapped", help="For --gold: the target's position comes first in a link.")
    ] = False,
    layer: Annotated[
        int | None, typer.Option(min=1, help="For --alignment: one decoder layer. [default: a table]")
    ] = None,
    head: Annotated[int | None, typer.Option(min=1, help="For --alignment: one head of it. [default: mean]")] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="predicting|reading",
            help="For --alignment: which decoder row speaks for a word. [default: chosen on the development pairs]",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="For --alignment: link all words of at least this weight. [default: the weightiest alone]"),
    ] = None,
    least: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHT|auto",
            help="For --alignment: no link for a word whose weightiest has less; auto: chosen on development pairs.",
        ),
    ] = None,
    explanations: Annotated[
        bool, typer.Option("--explanations", help="For --alignment: also the links that explanations (RISE) draw.")
    ] = False,
    masks: Annotated[
        int | None, typer.Option(min=4, help="For --explanations: ask with so many words hidden. [default: 200]")
    ] = None,
    how: Annotated[
        options.MaskMethodOption | None,
        typer.Option(help="For --explanations: how words are hidden. [default: unknown]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Score a run on held-out pairs or held-out text, or a file of translations against references.

    BLEU and chrF are sacreBLEU's, printed with the signature that makes them comparable; exact is the share of
    sentences that are right to the letter; perplexity is of the reference, a token of this run's vocabulary.

    A run on plain text has a perplexity and bits per byte. Text longer than the model's context is read in windows that
    overlap: every token is scored once, with at least context - stride tokens before it (but for those at the start).
    A run that fills in gaps has an accuracy.

    --alignment force-decodes the references and holds what the decoder looked at against gold links: alignment error
    rate, precision and recall (Och and Ney 2003). Gold files are Pharaoh's (0-0 1-2, from 0) or NAACL 2003's (sentence,
    two positions, S or P, from 1); words are what stands between spaces. --explanations holds against them what the
    references depend on, too: the model is asked about every source with words hidden, which takes a while.

    Examples:

        regard evaluate runs/en-es

        regard evaluate runs/en-es --split shapes

        regard evaluate runs/en-es --alignment

        regard evaluate runs/seed-1 --with runs/seed-2

        regard evaluate runs/stories --stride 16

        regard evaluate --outputs out.txt --reference ref.txt
    """
    together = {"with": others or None}
    if alignment:
        _idle("with --alignment", **together)
        _idle("with --alignment", text=text, stride=stride, outputs=outputs, save=save, data=data, beam=beam)
        _idle("with --alignment", length_penalty=length_penalty, lowercase=lowercase or None)
        _idle("with --alignment", moses=moses, moses_reference=moses_reference, precision=_other(precision))
        if run is None:
            raise UserError("--alignment needs a RUN whose attention is looked at")
        if not explanations:
            _idle("without --explanations", masks=masks, how=how)
        asked = (masks or MASKS) if explanations else None
        given = AlignmentOptions(
            gold, source, reference, dev, swapped, layer, head, rows, threshold, least, asked, how or "unknown"
        )
        evaluate_alignment(RunDir(run), split, given, weights, device, as_json, quiet)
        return
    _idle("without --alignment", gold=gold, dev=dev, swapped=swapped or None)
    _idle("without --alignment", layer=layer, head=head, rows=rows, threshold=threshold, least=least)
    _idle("without --alignment", explanations=explanations or None, masks=masks, how=how)
    if run is not None and (settings := _data(run, data)).is_text:
        where = "for a run that was trained on plain text"
        _idle(where, source=source, reference=reference, outputs=outputs, save=save, beam=beam)
        _idle(where, length_penalty=length_penalty, lowercase=lowercase or None, **together)
        _idle(where, moses=moses, moses_reference=moses_reference, precision=_other(precision))
        evaluate_text(RunDir(run), settings, split, text, stride, weights, device, as_json, quiet)
        return
    _idle("but for a run that was trained on plain text", text=text, stride=stride)
    with ExitStack() as stack:
        saved = (
            stack.enter_context(written(save)) if save is not None else None
        )  # opened first: a wrong path fails at once
        perplexity = None
        if run is None:
            _idle("without a RUN", **together, weights=None if weights == "best" else weights)
            hypotheses, references = _files(outputs, source, reference)
        elif outputs is not None:
            raise UserError("give a RUN, or --outputs with --reference, but not both")
        else:
            pairs = held_out_pairs(run, split, source, reference, data)
            references = [target for _, target in pairs]
            changed = options.changed(beam=beam, length_penalty=length_penalty)
            hypotheses, perplexity = _translate(
                [run, *(others or [])], pairs, weights, device, precision, quiet, changed
            )
        if saved is not None:
            saved.writelines(line + "\n" for line in hypotheses)
    scores = score_texts(hypotheses, references, lowercase=lowercase)
    tokenized = None
    if moses is not None:
        made = (
            moses_tokenize(references, language=moses) if moses_reference is None else list(read_lines(moses_reference))
        )
        tokenized = moses_tokenized_bleu(hypotheses, made, language=moses)
    if run is not None and RunDir(run).recipe.classifies:
        _print_classes(scores, as_json)
    else:
        _print(scores, perplexity, tokenized, as_json)


def _files(outputs: Path | None, source: Path | None, reference: Path | None) -> tuple[list[str], list[str]]:
    if outputs is None or reference is None:
        raise UserError("give a RUN, or --outputs with --reference")
    if source is not None:
        raise UserError("--source is for a RUN to translate; --outputs needs --reference only")
    return _aligned(outputs, reference)


def _aligned(one: Path, other: Path) -> tuple[list[str], list[str]]:
    left, right = list(read_lines(one)), list(read_lines(other))
    if len(left) != len(right):
        raise UserError(f"not line-aligned: {one} has {len(left)} lines, {other} has {len(right)}")
    if not left:
        raise UserError(f"no lines to score: {one} is empty")
    return left, right


def _data(run: Path, folder: Path | None) -> DataSettings:
    """The run's data settings, its files looked up in the folder of --data."""
    settings = RunDir(run).recipe.data
    found = options.folder(folder)
    return settings if found is None else settings.model_copy(update={"folder": str(found)})


def _idle(where: str, **given: object) -> None:
    """An option that was given and would change nothing is a mistake."""
    for name in options.changed(**given):
        raise UserError(f"--{name.replace('_', '-')} has no effect {where}")


def _other(precision: str) -> str | None:
    """A precision that is not the usual one."""
    return None if precision == "auto" else precision


def held_out_pairs(
    run: Path, split: str, source: Path | None, reference: Path | None, data: Path | None
) -> list[tuple[str, str]]:
    if (source is None) != (reference is None):
        raise UserError("--source and --reference go together")
    if source is not None and reference is not None:
        return list(zip(*_aligned(source, reference), strict=True))
    return held_out(_data(run, data), split)


def _translate(
    runs: list[Path],
    pairs: list[tuple[str, str]],
    weights: str,
    device: str,
    precision: str,
    quiet: bool,
    settings: dict[str, object],
) -> tuple[list[str], float]:
    model = load(*runs, weights=weights, device=device, precision=precision)
    logprobs, _ = model.score_pairs(pairs)
    tokens = sum(len(line) for line in logprobs)
    perplexity = math.exp(min(-sum(map(sum, logprobs)) / max(tokens, 1), 80))
    with counted("translating", len(pairs), quiet) as progress:
        answers = decoders.translator(model, settings)([source for source, _ in pairs], progress=progress)
    return [answer.texts[0] for answer in answers], perplexity


def _print_classes(scores: TextScores, as_json: bool) -> None:
    """Of a classifier: how many texts got their class. BLEU has nothing to say of single words."""
    if as_json:
        typer.echo(json.dumps({"lines": scores.lines, "accuracy": scores.exact}))
    else:
        typer.echo(f"accuracy    {scores.exact:6.2f} % of {scores.lines:,} texts")


def _print(scores: TextScores, perplexity: float | None, tokenized: tuple[float, str] | None, as_json: bool) -> None:
    if as_json:
        entry = {
            "lines": scores.lines,
            "bleu": scores.bleu,
            "bleu_signature": scores.bleu_signature,
            "chrf": scores.chrf,
            "chrf_signature": scores.chrf_signature,
            "exact": scores.exact,
            "perplexity": perplexity,
        }
        if tokenized is not None:
            entry |= {"moses_bleu": tokenized[0], "moses_bleu_signature": tokenized[1]}
        typer.echo(json.dumps(entry))
        return
    typer.echo(f"BLEU        {scores.bleu:6.2f}   {scores.bleu_signature}")
    typer.echo(f"chrF        {scores.chrf:6.2f}   {scores.chrf_signature}")
    typer.echo(f"exact       {scores.exact:6.2f} % of {scores.lines:,} sentences")
    if perplexity is not None:
        typer.echo(f"perplexity  {perplexity:6.3f}   a target token, the end mark counted")
    if tokenized is not None:
        typer.echo(f"Moses BLEU  {tokenized[0]:6.2f}   {tokenized[1]}")
