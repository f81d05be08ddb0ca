"""`regard evaluate --alignment`: how well attention, and explanations, align words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import typer

from regard import accelerate, devices, tasks
from regard.cli.output import note
from regard.cli.progress import progress_bar
from regard.data.corpora import corpora
from regard.errors import UserError
from regard.interpret.alignments import (
    MIN_WEIGHTS,
    ROW_CHOICES,
    Alignments,
    AttentionView,
    measure,
    measure_explanations,
)
from regard.interpret.cross_attention import NoAttention
from regard.interpret.explain import Sampling
from regard.interpret.explain.models import MaskMethod
from regard.metrics.alignment import Aligned, AlignmentScore, built_in, read_aligned
from regard.models import SequenceModel
from regard.run_dir import RunDir
from regard.viz.charts import columned

ROWS = {
    "predicting": "a word is aligned by the attention of the position that predicts it (its input is the token before)",
    "reading": "a word is aligned by the attention of the position that reads it (it predicts the token after)",
}


@dataclass(frozen=True)
class AlignmentOptions:
    """The options of --alignment; layers and heads count from 1."""

    gold: Path | None
    source: Path | None
    reference: Path | None
    dev: tuple[Path, Path, Path] | None
    swapped: bool
    layer: int | None
    head: int | None
    rows: str | None
    threshold: float | None
    min_weight: str | None = None  # a number, or "auto"
    masks: int | None = None  # for explanations; None: no explanations
    how: str = "unknown"

    @property
    def min_weights(self) -> tuple[float, ...]:
        """The minimum weight of a link; several if it is to be chosen."""
        if self.min_weight == "auto":
            return MIN_WEIGHTS
        return (float(self.min_weight or 0),)


@dataclass(frozen=True)
class AlignmentSet:
    """Sentence pairs with gold links, and how well attention aligns them; None if the model has no cross-attention."""

    name: str
    pairs: list[Aligned]
    alignments: Alignments | None

    def score(self, view: AttentionView) -> AlignmentScore:
        assert self.alignments is not None  # else there is no view
        return self.alignments.scores[view]

    @property
    def sure(self) -> int:
        """The number of sure links."""
        return sum(len(pair.gold.sure) for pair in self.pairs)

    @property
    def possible(self) -> int:
        """The number of sure or possible links."""
        return sum(len(pair.gold.possible) for pair in self.pairs)


def evaluate_alignment(
    run: RunDir, split: str, given: AlignmentOptions, weights: str, device: str, as_json: bool, quiet: bool
) -> None:
    """Score on gold links of files or of the run's built-in corpus; choose the head and rows on development pairs."""
    _check(run, given)
    named_pairs = _pairs(run, split, given, quiet)
    target = devices.pick(device)
    model, sets = run.model(target, weights), []
    accelerate.for_inference(model)
    for name, pairs in named_pairs:
        with progress_bar(f"aligning {name}", len(pairs), quiet) as progress:
            settings: dict[str, Any] = {"threshold": given.threshold, "min_weights": given.min_weights}
            settings |= {"device": target, "progress": progress}
            try:
                alignments: Alignments | None = measure(model, run.tokenizers, run.recipe, pairs, **settings)
            except NoAttention:
                if given.masks is None:
                    raise
                alignments = None
        if alignments is not None and alignments.truncated:
            limit = run.recipe.model.max_positions
            _warn(f"{alignments.truncated} sentences of {name} have more than {limit} tokens and were truncated", quiet)
        sets.append(AlignmentSet(name, pairs, alignments))
    test, dev = sets[-1], sets[0] if len(sets) > 1 else None
    views = _views(test, dev, given)
    explained = _explain(run, model, test, given, quiet)
    (_print_json if as_json else _print)(views, explained, test, dev, given)


def _explain(
    run: RunDir, model: SequenceModel, test: AlignmentSet, given: AlignmentOptions, quiet: bool
) -> AlignmentScore | None:
    """Score the alignment that explanations of the test pairs give; None without --explanations."""
    if given.masks is None:
        return None
    with progress_bar(f"explaining {test.name}", len(test.pairs), quiet) as progress:
        return measure_explanations(
            model,
            run.tokenizers,
            run.recipe,
            test.pairs,
            sampling=Sampling(masks=given.masks),
            how=cast("MaskMethod", given.how),
            threshold=given.threshold,
            progress=progress,
        )


def _check(run: RunDir, given: AlignmentOptions) -> None:
    task = tasks.of(run.recipe)
    if task.trace is None or not task.trace.has_alignment:
        raise UserError(f"{run.path}: --alignment is for translation; this run was trained for {task.name}")
    if given.rows is not None and given.rows not in ROWS:
        raise UserError(f"--rows {given.rows}: must be one of {', '.join(ROWS)}")
    if given.head is not None and given.layer is None:
        raise UserError("--head needs --layer")
    if given.threshold is not None and not 0 < given.threshold <= 1:
        raise UserError(f"--threshold {given.threshold}: must be above 0 and at most 1")
    if given.min_weight is not None:
        _check_min_weight(given)
    files = {"--gold": given.gold, "--source": given.source, "--reference": given.reference}
    missing = [name for name, file in files.items() if file is None]
    if missing and len(missing) < len(files):
        raise UserError(f"--gold, --source and --reference must be given together: {' and '.join(missing)} is missing")
    if given.gold is None and (given.dev is not None or given.swapped):
        raise UserError("--dev and --swapped need --gold, --source and --reference")


def _check_min_weight(given: AlignmentOptions) -> None:
    if given.threshold is not None:
        raise UserError("give either --threshold or --min-weight, not both")
    if given.min_weight == "auto":
        if given.gold is not None and given.dev is None:
            raise UserError("--min-weight auto is chosen on development pairs: give --dev")
        return
    try:
        valid = 0 <= float(given.min_weight or 0) <= 1
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"--min-weight {given.min_weight}: must be auto, or from 0 to 1")


def _pairs(run: RunDir, split: str, given: AlignmentOptions, quiet: bool) -> list[tuple[str, list[Aligned]]]:
    """Name and pairs of the development set, if there is one, and of the test set."""

    def read(gold: Path, source: Path, reference: Path) -> tuple[str, list[Aligned]]:
        warn = partial(_warn, quiet=quiet)
        return gold.name, read_aligned(gold, source, reference, swapped=given.swapped, warn=warn)

    if given.gold is not None and given.source is not None and given.reference is not None:
        dev = [] if given.dev is None else [read(*given.dev)]
        return [*dev, read(given.gold, given.source, given.reference)]
    names = list(dict.fromkeys(corpus.corpus for corpus in corpora(run.recipe.data) if corpus.corpus is not None))
    if len(names) != 1:
        raise UserError(f"{run.path} has no built-in gold alignments: give --gold, --source and --reference")
    if split == "valid":
        raise UserError("--split valid: the head is chosen on these pairs; score another split")
    return [(f"{names[0]} {part}", built_in(names[0], part)) for part in ("valid", split)]


def _warn(text: str, quiet: bool) -> None:
    if not quiet:
        note(f"regard: warning: {text}")


def _views(test: AlignmentSet, dev: AlignmentSet | None, given: AlignmentOptions) -> list[tuple[str, AttentionView]]:
    """The rows of the table: the view of --layer and --head; or the best head, the mean of each layer, of all."""
    if test.alignments is None:
        return []
    possible_rows = ROW_CHOICES if given.rows is None else tuple(rows for rows in ROW_CHOICES if rows == given.rows)

    def best(*heads_of_layers: tuple[int | None, int | None]) -> AttentionView:
        candidates = [
            AttentionView(layer, head, rows, weight)
            for layer, head in heads_of_layers
            for rows in possible_rows
            for weight in given.min_weights
        ]
        return candidates[0] if dev is None or dev.alignments is None else dev.alignments.best(candidates)

    layers, heads = test.alignments.layers, test.alignments.heads
    if given.layer is not None:
        _exists("--layer", given.layer, layers, "decoder layer with cross-attention")
        _exists("--head", given.head, heads, "head")
        return [("chosen", best((given.layer - 1, None if given.head is None else given.head - 1)))]
    if layers * heads == 1:
        return [("the only head", best((0, 0)))]
    views = []
    if dev is not None:
        views.append(("best head", best(*((layer, head) for layer in range(layers) for head in range(heads)))))
    if heads > 1:
        views += [("mean of a layer", best((layer, None))) for layer in range(layers)]
    else:
        views += [("a layer", best((layer, 0))) for layer in range(layers)]
    return [*views, ("mean of all", best((None, None)))] if layers > 1 else views


def _exists(option: str, number: int | None, count: int, what: str) -> None:
    if number is not None and number > count:
        raise UserError(f"{option} {number}: this model has {count} {what}{'s' if count > 1 else ''}")


def _describe(view: AttentionView, alignments: Alignments | None) -> str:
    """Such as `layer 2, head 3, weight >= 0.4`."""
    assert alignments is not None  # else there is no view
    minimum = f", weight >= {view.min_weight:g}" if view.min_weight else ""
    if view.layer is None:
        return f"{alignments.layers} layers, mean of {alignments.heads * alignments.layers} heads{minimum}"
    layer = f"layer {view.layer + 1}"
    if alignments.heads > 1:
        layer += f", mean of {alignments.heads} heads" if view.head is None else f", head {view.head + 1}"
    return layer + minimum


def _print(
    views: list[tuple[str, AttentionView]],
    explained: AlignmentScore | None,
    test: AlignmentSet,
    dev: AlignmentSet | None,
    given: AlignmentOptions,
) -> None:
    heads = ["attention", "", "rows", "AER", "precision", "recall", *(["dev AER"] if dev is not None else [])]
    rows = []
    for name, view in views:
        figures = [*_figures(test.score(view)), *([] if dev is None else [f"{dev.score(view).aer:.2f}"])]
        rows.append([name, _describe(view, test.alignments), view.rows, *figures])
    if explained is not None:
        figures = [*_figures(explained), *([] if dev is None else [""])]
        rows.append(["explanations", f"RISE, at most {given.masks} masks", "", *figures])
    typer.echo(columned(heads, rows, width=120, left=3), nl=False)
    possible = f", {test.possible:,} sure or possible" if test.possible > test.sure else ""
    typer.echo(f"{test.name}: {len(test.pairs):,} sentences, {test.sure:,} sure links{possible}")
    for line in _rules(views, explained, given):
        typer.echo(line)
    if views:
        typer.echo(_choice(views, dev, given))


def _figures(score: AlignmentScore) -> list[str]:
    return [f"{figure:.2f}" for figure in (score.aer, score.precision, score.recall)]


def _rules(
    views: list[tuple[str, AttentionView]], explained: AlignmentScore | None, given: AlignmentOptions
) -> Iterator[str]:
    """Yield sentences that say when two words are linked."""
    if any(view.min_weight for _, view in views):
        yield (
            "A target word is linked with the source word of the largest attention weight, or with none if that is "
            "below the minimum; EOS is not a word."
        )
    elif views and given.threshold is None:
        yield "A target word is linked with the source word of the largest attention weight; EOS is not a word."
    elif views:
        yield f"A target word is linked with all source words of at least {given.threshold:g} of its attention."
    for kind in dict.fromkeys(view.rows for _, view in views):
        yield f"{kind}: {ROWS[kind]}"
    if explained is not None:
        how = {"unknown": "replaced by the unknown token", "drop": "dropped"}[given.how]
        least = (
            "" if given.threshold is None else f" (with all that contribute at least {given.threshold:g} of the total)"
        )
        yield (
            f"explanations: random source words are {how}; a target word is linked with the source word that raises "
            f"its probability most{least}"
        )


def _choice(views: list[tuple[str, AttentionView]], dev: AlignmentSet | None, given: AlignmentOptions) -> str:
    """Say what was chosen on the development pairs."""
    chosen = ["the best head"] if any(name == "best head" for name, _ in views) else []
    chosen += ["the rows"] if given.rows is None else []
    chosen += ["the minimum weight"] if given.min_weight == "auto" else []
    if dev is None:
        return "Without --dev nothing is chosen, so the table has no best head."
    if not chosen:
        return f"Nothing was chosen on {dev.name}."
    what = " and ".join([", ".join(chosen[:-1]), chosen[-1]] if chosen[1:] else chosen)
    return f"Chosen by AER on {dev.name} ({len(dev.pairs):,} sentences): {what}."


def _print_json(
    views: list[tuple[str, AttentionView]],
    explained: AlignmentScore | None,
    test: AlignmentSet,
    dev: AlignmentSet | None,
    given: AlignmentOptions,
) -> None:
    entries: list[dict[str, Any]] = []
    for name, view in views:
        layer, head = (None if number is None else number + 1 for number in (view.layer, view.head))
        entry: dict[str, Any] = {"attention": name, "layer": layer, "head": head}
        entry |= {"rows": view.rows, "min_weight": view.min_weight, **asdict(test.score(view))}
        entries.append(entry | ({} if dev is None else {"dev_aer": dev.score(view).aer}))
    about = {"pairs": test.name, "sentences": len(test.pairs), "chosen_on": None if dev is None else dev.name}
    alignments = test.alignments
    about |= {"layers": alignments.layers if alignments else 0, "heads": alignments.heads if alignments else 0}
    about |= {"threshold": given.threshold, "possible": test.possible}
    if explained is not None:
        about["explanations"] = {"masks": given.masks, "how": given.how, **asdict(explained)}
    typer.echo(json.dumps({**about, "lines": entries}))
