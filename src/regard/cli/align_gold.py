"""`regard align --gold`: how well attention, and explanations, align words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from regard.cli.output import note
from regard.cli.progress import progress_bar
from regard.data.corpora import corpora
from regard.errors import UserError
from regard.interpret.alignments import measure, measure_explanations
from regard.interpret.explain import Sampling
from regard.metrics.alignment import Aligned, AlignmentScore, built_in, read_aligned, score_links, swap
from regard.metrics.symmetrise import METHODS
from regard.tasks.aligner import Aligner, AttentionView, NoAttention, TwoWayAligner, guided_view
from regard.viz.charts import columned


@dataclass(frozen=True)
class GoldOptions:
    """The options of `regard align` about gold links."""

    gold: Path | None
    source: Path | None
    target: Path | None
    dev: tuple[Path, Path, Path] | None
    swapped: bool
    masks: int | None  # for explanations; None: no explanations
    as_json: bool
    quiet: bool


@dataclass(frozen=True)
class Scored:
    """A row of the table: links, the attention that they come from, and their scores."""

    name: str
    view: AttentionView | None
    test: AlignmentScore
    dev: AlignmentScore | None = None


def print_scores(
    forward: Aligner, backward: Aligner | None, run: Path, view: AttentionView | None, given: GoldOptions
) -> None:
    """Score both directions and all ways to combine them; choose views on development pairs, if there are any."""
    named = _gold_pairs(run, forward, given)
    (test_name, test), dev = named[-1], named[0][1] if len(named) > 1 else None
    try:
        aligner = _choose(forward, backward, view, test if dev is None else dev, dev is not None)
        rows = _scores(aligner, test, dev, given.quiet)
    except NoAttention:
        if given.masks is None:
            raise
        rows = []
    if given.masks is not None:
        with progress_bar(f"explaining {test_name}", len(test), given.quiet) as progress:
            score = measure_explanations(forward, test, Sampling(masks=given.masks), progress)
        rows.append(Scored("explanations", None, score))
    chosen_on = None if dev is None else named[0][0]
    (_print_json if given.as_json else _print)(rows, test_name, test, chosen_on)


def _gold_pairs(run: Path, aligner: Aligner, given: GoldOptions) -> list[tuple[str, list[Aligned]]]:
    """Name and pairs of the development set, if there is one, and of the test set."""
    if given.source is not None and given.target is not None and given.gold is not None:
        files = [*([] if given.dev is None else [given.dev]), (given.gold, given.source, given.target)]
        warn = partial(_warn, quiet=given.quiet)
        return [(gold.name, read_aligned(gold, *sides, swapped=given.swapped, warn=warn)) for gold, *sides in files]
    if given.gold is not None or given.dev is not None or given.swapped:
        raise UserError("gold links need the files that they belong to: regard align RUN SOURCE TARGET --gold FILE")
    names = list(dict.fromkeys(corpus.corpus for corpus in corpora(aligner.recipe.data) if corpus.corpus is not None))
    if len(names) != 1:
        raise UserError(f"{run} has no built-in gold alignments: give SOURCE, TARGET and --gold")
    return [(f"{names[0]} {split}", built_in(names[0], split)) for split in ("valid", "test")]


def _warn(text: str, quiet: bool) -> None:
    if not quiet:
        note(f"regard: warning: {text}")


def _choose(
    forward: Aligner, backward: Aligner | None, view: AttentionView | None, pairs: list[Aligned], by_gold: bool
) -> TwoWayAligner:
    """The views of both directions: given, guided, the best by gold links, or those that agree best."""
    if not by_gold:
        chosen = TwoWayAligner.choose(forward, backward, _texts(pairs))
        return chosen if view is None else TwoWayAligner(forward, view, backward, chosen.reverse_view)
    other = None if backward is None else guided_view(backward.recipe) or _best_view(backward, swap(pairs))
    return TwoWayAligner(forward, view or guided_view(forward.recipe) or _best_view(forward, pairs), backward, other)


def _best_view(aligner: Aligner, pairs: list[Aligned]) -> AttentionView:
    alignments = measure(aligner, pairs)
    return alignments.best(alignments.scores)


def _texts(pairs: Sequence[Aligned]) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in pairs]


def _scores(aligner: TwoWayAligner, test: list[Aligned], dev: list[Aligned] | None, quiet: bool) -> list[Scored]:
    scores = []
    for pairs in (test, dev or []):
        with progress_bar("aligning", len(pairs), quiet) as progress:
            found = list(aligner.directions(_texts(pairs), progress))
        gold = [pair.gold for pair in pairs]
        scores.append({name: score_links([join(*both) for both in found], gold) for name, join in METHODS.items()})
    views = {"forward": aligner.view, "reverse": aligner.reverse_view or aligner.view}
    names = sorted(METHODS, key=lambda name: name not in views)
    return [Scored(name, views.get(name), scores[0][name], scores[1][name] if dev else None) for name in names]


def _print(rows: list[Scored], name: str, pairs: list[Aligned], chosen_on: str | None) -> None:
    heads = ["links", "attention", "rows", "AER", "precision", "recall", *(["dev AER"] if chosen_on else [])]
    lines = []
    for row in rows:
        figures = [f"{figure:.2f}" for figure in (row.test.aer, row.test.precision, row.test.recall)]
        figures += [] if not chosen_on else ["" if row.dev is None else f"{row.dev.aer:.2f}"]
        lines.append([row.name, _where(row.view), "" if row.view is None else row.view.rows, *figures])
    typer.echo(columned(heads, lines, width=120, left=3), nl=False)
    sure, possible = sum(len(pair.gold.sure) for pair in pairs), sum(len(pair.gold.possible) for pair in pairs)
    more = f", {possible:,} sure or possible" if possible > sure else ""
    typer.echo(f"{name}: {len(pairs):,} sentences, {sure:,} sure links{more}")
    how = f"by AER on {chosen_on}" if chosen_on else "by the agreement of both directions"
    typer.echo(f"Layers and heads that are neither given nor guided were chosen {how}.")


def _where(view: AttentionView | None) -> str:
    if view is None:
        return ""
    if view.layer is None:
        return "mean of all heads"
    return f"layer {view.layer + 1}, {'mean of heads' if view.head is None else f'head {view.head + 1}'}"


def _print_json(rows: list[Scored], name: str, pairs: list[Aligned], chosen_on: str | None) -> None:
    entries: list[dict[str, Any]] = []
    for row in rows:
        view = row.view or AttentionView()
        layer, head = (None if number is None else number + 1 for number in (view.layer, view.head))
        where = {} if row.view is None else {"layer": layer, "head": head, "rows": view.rows}
        entry = {"links": row.name, **where, "score": asdict(row.test)}
        entries.append(entry | ({} if row.dev is None else {"dev_aer": row.dev.aer}))
    typer.echo(json.dumps({"pairs": name, "sentences": len(pairs), "chosen_on": chosen_on, "lines": entries}))
