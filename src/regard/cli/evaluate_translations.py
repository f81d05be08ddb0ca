"""`regard evaluate` for translations: those of a run, or those in a file."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from regard import devices
from regard.api import load
from regard.cli import decoders
from regard.cli.groups import LoadOptions, PairFileOptions, ScoreOptions
from regard.cli.held_out import aligned_lines
from regard.cli.output import written
from regard.cli.progress import progress_bar
from regard.data.lines import read_lines
from regard.errors import UserError
from regard.evaluation import TextScores, moses_tokenize, moses_tokenized_bleu, score_texts


@dataclass(frozen=True)
class OutputOptions:
    """Files of translations."""

    outputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Score these translations against --reference, without a RUN."),
    ] = None
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the translations to this file.")] = None


def evaluate_files(files: PairFileOptions, texts: OutputOptions, scoring: ScoreOptions, as_json: bool) -> None:
    """Print the scores of translations in a file against references in another one."""
    if texts.outputs is None or files.reference is None:
        raise UserError("give a RUN, or --outputs with --reference")
    if files.source is not None:
        raise UserError("--source has no effect with --outputs, which needs only --reference")
    with ExitStack() as stack:
        saved = None if texts.save is None else stack.enter_context(written(texts.save))
        hypotheses, references = aligned_lines(texts.outputs, files.reference)
        if saved is not None:
            saved.writelines(line + "\n" for line in hypotheses)
    _score(hypotheses, references, None, scoring, as_json)


def evaluate_translations(
    runs: list[Path],
    pairs: list[tuple[str, str]],
    loading: LoadOptions,
    scoring: ScoreOptions,
    save: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Translate the sources of held-out pairs with a run or an ensemble, and print the scores."""
    with ExitStack() as stack:  # the file is opened before translating, so that a wrong path fails at once
        saved = None if save is None else stack.enter_context(written(save))
        model = load(*runs, **loading.settings())
        stack.enter_context(devices.held_memory(model.device))
        logprobs, _ = model.score_pairs(pairs)
        tokens = sum(len(line) for line in logprobs)
        perplexity = math.exp(min(-sum(map(sum, logprobs)) / max(tokens, 1), 80))
        with progress_bar("translating", len(pairs), quiet) as progress:
            translate = decoders.translator(model, scoring.decoding())
            answers = translate([source for source, _ in pairs], progress=progress)
        hypotheses = [answer.texts[0] for answer in answers]
        if saved is not None:
            saved.writelines(line + "\n" for line in hypotheses)
    _score(hypotheses, [target for _, target in pairs], perplexity, scoring, as_json)


def _score(
    hypotheses: list[str], references: list[str], perplexity: float | None, scoring: ScoreOptions, as_json: bool
) -> None:
    scores = score_texts(hypotheses, references, lowercase=scoring.lowercase)
    moses, tokenized = scoring.moses, None
    if moses is not None:
        given = scoring.moses_reference
        moses_references = moses_tokenize(references, language=moses) if given is None else list(read_lines(given))
        tokenized = moses_tokenized_bleu(hypotheses, moses_references, language=moses)
    _print(scores, perplexity, tokenized, as_json)


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
        typer.echo(f"perplexity  {perplexity:6.3f}   per target token, EOS included")
    if tokenized is not None:
        typer.echo(f"Moses BLEU  {tokenized[0]:6.2f}   {tokenized[1]}")
