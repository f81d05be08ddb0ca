"""regard evaluate, for captions"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from regard.cli import decoders
from regard.cli.output import written
from regard.cli.progress import progress_bar
from regard.evaluation import TextScores, score_texts
from regard.models.ensemble import Ensemble
from regard.runs import LoadedRun
from regard.tasks.aligner import AttentionView
from regard.tasks.captioning import CaptioningTask
from regard.tasks.regions import RegionShares, region_shares

CONTENT = ("size", "colour", "shape")  # words by which the best head is chosen
MEAN = AttentionView()


def evaluate_captions(
    loaded: LoadedRun,
    examples: Sequence[tuple[Any, str]],
    settings: dict[str, object],
    save: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the scores of captions of held-out images; if regions are known, also the attention inside them."""
    task, references = loaded.feature_task(), [text for _, text in examples]
    assert isinstance(task, CaptioningTask)
    with progress_bar("describing", len(examples), quiet) as progress:
        answers = decoders.writer(loaded, settings)([task.features(given) for given, _ in examples], progress=progress)
    outputs = [answer.texts[0] for answer in answers]
    if save is not None:
        with written(save) as file:
            file.writelines(f"{text}\n" for text in outputs)
    scores, shares = score_texts(outputs, references), _regions(loaded, task, examples)
    best = None
    if shares is not None and (chosen := _regions(loaded, task, task.held_out("valid"))) is not None:
        best = chosen.best_head(CONTENT)
    _print(scores, _perplexity(loaded, task, examples), shares, best, as_json)


def _perplexity(loaded: LoadedRun, task: CaptioningTask, examples: Sequence[tuple[Any, str]]) -> float:
    total = targets = 0.0
    with torch.inference_mode():
        for _, batch in task.batches(loaded.run, examples):
            total, targets = total + loaded.module(batch.to(loaded.device)).item(), targets + batch.num_targets
    return math.exp(min(total / max(targets, 1), 80))


def _regions(loaded: LoadedRun, task: CaptioningTask, examples: Sequence[tuple[Any, str]]) -> RegionShares | None:
    known = [(example, regions) for example in examples if (regions := task.word_regions(*example)) is not None]
    if not known or isinstance(loaded.module, Ensemble):
        return None
    return region_shares(task, loaded.run, loaded.module, known, loaded.device)


def _print(
    scores: TextScores, perplexity: float, shares: RegionShares | None, best: AttentionView | None, as_json: bool
) -> None:
    if as_json:
        entry: dict[str, Any] = {"images": scores.lines, "bleu": scores.bleu, "bleu_signature": scores.bleu_signature}
        entry |= {"chrf": scores.chrf, "chrf_signature": scores.chrf_signature, "exact": scores.exact}
        entry |= {"perplexity": perplexity, "attention": None if shares is None else _shares_json(shares, best)}
        return typer.echo(json.dumps(entry))
    typer.echo(f"BLEU        {scores.bleu:6.2f}   {scores.bleu_signature}")
    typer.echo(f"chrF        {scores.chrf:6.2f}   {scores.chrf_signature}")
    typer.echo(f"exact       {scores.exact:6.2f} % of {scores.lines:,} captions")
    typer.echo(f"perplexity  {perplexity:6.3f}   per token of the captions, EOS included")
    if shares is None:
        return None
    typer.echo("\nShare of cross-attention inside the region that a word speaks of:")
    heading = (
        "" if best is None else f"  best head (layer {_number(best.layer)}, head {_number(best.head)}, {best.rows})"
    )
    typer.echo(f"{'word':10} {'all heads':>9} {'chance':>9}{heading}")
    for role in (*shares.inside, ""):
        roles = [role] if role else []
        column = "" if best is None else f" {shares.share(best, roles):9.1f} %"
        line = f"{role or 'all words':10} {shares.share(MEAN, roles):7.1f} % {shares.by_chance(roles):7.1f} %{column}"
        typer.echo(line)
    return None


def _number(index: int | None) -> str:
    return "" if index is None else str(index + 1)


def _shares_json(shares: RegionShares, best: AttentionView | None) -> dict[str, Any]:
    """The shares by role, of the mean of all heads and of the best one."""
    table = {}
    for role in (*shares.inside, "all"):
        roles = [] if role == "all" else [role]
        table[role] = {"all_heads": shares.share(MEAN, roles), "chance": shares.by_chance(roles)}
        if best is not None:
            table[role]["best_head"] = shares.share(best, roles)
    head = None if best is None else {"layer": best.layer, "head": best.head, "rows": best.rows}
    return {"best_head": head, "words": table}
