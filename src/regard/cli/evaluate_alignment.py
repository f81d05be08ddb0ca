"""What `regard evaluate --alignment` does: how well a model's attention, and explanations of it, align words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import typer

from regard import accelerate, devices
from regard.cli.output import note
from regard.cli.progress import counted
from regard.data.corpora import corpora
from regard.errors import UserError
from regard.interpret.alignments import (
    LEASTS,
    SPEAKING,
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
    "predicting": "the row that predicts a word speaks for it (it reads what comes before)",
    "reading": "the row that reads a word speaks for it (it predicts what comes next)",
}


@dataclass(frozen=True)
class AlignmentOptions:
    """The options of --alignment as they were given; layers and heads count from 1."""

    gold: Path | None
    source: Path | None
    reference: Path | None
    dev: tuple[Path, Path, Path] | None
    swapped: bool
    layer: int | None
    head: int | None
    rows: str | None
    threshold: float | None
    least: str | None = None  # a weight, or "auto"
    masks: int | None = None  # of explanations; None: no explanations
    how: str = "unknown"

    @property
    def leasts(self) -> tuple[float, ...]:
        """What a link has to weigh at least; several: to be chosen among."""
        if self.least == "auto":
            return LEASTS
        return (float(self.least or 0),)


@dataclass(frozen=True)
class AlignmentSet:
    """Sentence pairs with gold links, what to call them, and what attention made of them, if there is any."""

    name: str
    pairs: list[Aligned]
    found: Alignments | None

    def score(self, view: AttentionView) -> AlignmentScore:
        assert self.found is not None  # or there would be no view
        return self.found.scores[view]

    @property
    def sure(self) -> int:
        return sum(len(pair.gold.sure) for pair in self.pairs)

    @property
    def possible(self) -> int:
        return sum(len(pair.gold.possible) for pair in self.pairs)


def evaluate_alignment(
    run: RunDir, split: str, given: AlignmentOptions, weights: str, device: str, as_json: bool, quiet: bool
) -> None:
    """Measure on the gold links of files or of the run's built-in corpus; what is open is chosen on other pairs."""
    _check(run, given)
    named = _pairs(run, split, given, quiet)
    place = devices.pick(device)
    model, parts = run.model(place, weights), []
    accelerate.for_inference(model)
    for name, pairs in named:
        with counted(f"aligning {name}", len(pairs), quiet) as progress:
            settings: dict[str, Any] = {"threshold": given.threshold, "leasts": given.leasts}
            settings |= {"device": place, "progress": progress}
            try:
                found = measure(model, run.tokenizers, run.recipe, pairs, **settings)
            except NoAttention:
                if given.masks is None:
                    raise
                found = None
        if found is not None and found.cut:
            most = run.recipe.model.max_positions
            _warn(f"{found.cut} sentences of {name} are longer than {most} tokens and were cut there", quiet)
        parts.append(AlignmentSet(name, pairs, found))
    test, dev = parts[-1], parts[0] if len(parts) > 1 else None
    lines = _lines(test, dev, given)
    explained = _explain(run, model, test, given, quiet)
    (_print_json if as_json else _print)(lines, explained, test, dev, given)


def _explain(
    run: RunDir, model: SequenceModel, test: AlignmentSet, given: AlignmentOptions, quiet: bool
) -> AlignmentScore | None:
    """MaskMethod well explanations align the pairs that are reported, if that was asked for."""
    if given.masks is None:
        return None
    with counted(f"explaining {test.name}", len(test.pairs), quiet) as progress:
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
    if run.recipe.data.is_text:
        raise UserError(f"{run.path} was trained on plain text: it has no source to align words with")
    if given.rows is not None and given.rows not in ROWS:
        raise UserError(f"--rows {given.rows}: must be one of {', '.join(ROWS)}")
    if given.head is not None and given.layer is None:
        raise UserError("--head needs --layer: a head belongs to a layer")
    if given.threshold is not None and not 0 < given.threshold <= 1:
        raise UserError(f"--threshold {given.threshold}: must be above 0 and at most 1")
    if given.least is not None:
        _check_least(given)
    files = {"--gold": given.gold, "--source": given.source, "--reference": given.reference}
    missing = [name for name, file in files.items() if file is None]
    if missing and len(missing) < len(files):
        raise UserError(f"--gold, --source and --reference go together: {' and '.join(missing)} is missing")
    if given.gold is None and (given.dev is not None or given.swapped):
        raise UserError("--dev and --swapped go with the files of --gold, --source and --reference")


def _check_least(given: AlignmentOptions) -> None:
    if given.threshold is not None:
        raise UserError("--threshold says already what a link has to weigh: leave --least out")
    if given.least == "auto":
        if given.gold is not None and given.dev is None:
            raise UserError("--least auto is chosen on development pairs: give --dev")
        return
    try:
        good = 0 <= float(given.least or 0) <= 1
    except ValueError:
        good = False
    if not good:
        raise UserError(f"--least {given.least}: must be auto, or from 0 to 1")


def _pairs(run: RunDir, split: str, given: AlignmentOptions, quiet: bool) -> list[tuple[str, list[Aligned]]]:
    """The pairs that views are chosen on, if any, and last those that are reported; each with a name."""

    def read(gold: Path, source: Path, reference: Path) -> tuple[str, list[Aligned]]:
        warn = partial(_warn, quiet=quiet)
        return gold.name, read_aligned(gold, source, reference, swapped=given.swapped, warn=warn)

    if given.gold is not None and given.source is not None and given.reference is not None:
        dev = [] if given.dev is None else [read(*given.dev)]
        return [*dev, read(given.gold, given.source, given.reference)]
    names = list(dict.fromkeys(corpus.corpus for corpus in corpora(run.recipe.data) if corpus.corpus is not None))
    if len(names) != 1:
        raise UserError(f"{run.path} has no built-in gold links: give --gold, --source and --reference")
    if split == "valid":
        raise UserError("--split valid: heads are chosen on these pairs, so they are not reported")
    return [(f"{names[0]} {part}", built_in(names[0], part)) for part in ("valid", split)]


def _warn(text: str, quiet: bool) -> None:
    if not quiet:
        note(f"regard: warning: {text}")


def _lines(test: AlignmentSet, dev: AlignmentSet | None, given: AlignmentOptions) -> list[tuple[str, AttentionView]]:
    """What the table shows: the view that was asked for; or the best head, each layer's mean, the mean of all."""
    if test.found is None:
        return []
    open_rows = SPEAKING if given.rows is None else tuple(rows for rows in SPEAKING if rows == given.rows)

    def settled(*whose: tuple[int | None, int | None]) -> AttentionView:
        candidates = [
            AttentionView(layer, head, rows, least)
            for layer, head in whose
            for rows in open_rows
            for least in given.leasts
        ]
        return candidates[0] if dev is None or dev.found is None else dev.found.best(candidates)

    layers, heads = test.found.layers, test.found.heads
    if given.layer is not None:
        _exists("--layer", given.layer, layers, "decoder layer that looks at the source")
        _exists("--head", given.head, heads, "head")
        return [("asked for", settled((given.layer - 1, None if given.head is None else given.head - 1)))]
    if layers * heads == 1:
        return [("the only head", settled((0, 0)))]
    lines = []
    if dev is not None:
        lines.append(("best head", settled(*((layer, head) for layer in range(layers) for head in range(heads)))))
    if heads > 1:
        lines += [("mean of a layer", settled((layer, None))) for layer in range(layers)]
    else:
        lines += [("a layer", settled((layer, 0))) for layer in range(layers)]
    return [*lines, ("mean of all", settled((None, None)))] if layers > 1 else lines


def _exists(option: str, number: int | None, most: int, what: str) -> None:
    if number is not None and number > most:
        raise UserError(f"{option} {number}: this model has {most} {what}{'s' if most > 1 else ''}")


def _called(view: AttentionView, found: Alignments | None) -> str:
    """Such as `layer 2, head 3, from 0.4 on`."""
    assert found is not None  # or there would be no view
    loud = f", from {view.least:g} on" if view.least else ""
    if view.layer is None:
        return f"{found.layers} layers, mean of {found.heads * found.layers} heads{loud}"
    layer = f"layer {view.layer + 1}"
    if found.heads > 1:
        layer += f", mean of {found.heads} heads" if view.head is None else f", head {view.head + 1}"
    return layer + loud


def _print(
    lines: list[tuple[str, AttentionView]],
    explained: AlignmentScore | None,
    test: AlignmentSet,
    dev: AlignmentSet | None,
    given: AlignmentOptions,
) -> None:
    heads = ["attention", "", "rows", "AER", "precision", "recall", *(["dev AER"] if dev is not None else [])]
    rows = []
    for name, view in lines:
        figures = [*_figures(test.score(view)), *([] if dev is None else [f"{dev.score(view).aer:.2f}"])]
        rows.append([name, _called(view, test.found), view.rows, *figures])
    if explained is not None:
        figures = [*_figures(explained), *([] if dev is None else [""])]
        rows.append(["explanations", f"RISE, {given.masks} masks at most", "", *figures])
    typer.echo(columned(heads, rows, width=120, left=3), nl=False)
    doubtful = f", {test.possible:,} sure or possible" if test.possible > test.sure else ""
    typer.echo(f"{test.name}: {len(test.pairs):,} sentences, {test.sure:,} sure links{doubtful}")
    for line in _rules(lines, explained, given):
        typer.echo(line)
    if lines:
        typer.echo(_choice(lines, dev, given))


def _figures(score: AlignmentScore) -> list[str]:
    return [f"{figure:.2f}" for figure in (score.aer, score.precision, score.recall)]


def _rules(
    lines: list[tuple[str, AttentionView]], explained: AlignmentScore | None, given: AlignmentOptions
) -> Iterator[str]:
    """What makes a link."""
    if any(view.least for _, view in lines):
        yield (
            "A target word is linked with the source word that it looks at most, or with none where it gives that less "
            "of its attention than is said; end marks are no words."
        )
    elif lines and given.threshold is None:
        yield "A target word is linked with the source word that it looks at most; end marks are no words."
    elif lines:
        yield f"A target word is linked with all source words of at least {given.threshold:g} of its attention."
    for kind in dict.fromkeys(view.rows for _, view in lines):
        yield f"{kind}: {ROWS[kind]}"
    if explained is not None:
        how = {"unknown": "replaced by the unknown token", "drop": "left out"}[given.how]
        least = "" if given.threshold is None else f" (all of at least {given.threshold:g} of what speaks for it)"
        yield (
            f"explanations: source words are {how} at random, and a target word is linked with the source word that "
            f"raises its probability most{least}"
        )


def _choice(lines: list[tuple[str, AttentionView]], dev: AlignmentSet | None, given: AlignmentOptions) -> str:
    """What was chosen, and on what."""
    chosen = ["the best head"] if any(name == "best head" for name, _ in lines) else []
    chosen += ["which rows speak"] if given.rows is None else []
    chosen += ["what a link weighs at least"] if given.least == "auto" else []
    if dev is None:
        return "No --dev: nothing was chosen, so no head is called the best."
    if not chosen:
        return f"Nothing was chosen on {dev.name}."
    what = " and ".join([", ".join(chosen[:-1]), chosen[-1]] if chosen[1:] else chosen)
    return f"Chosen by AER on {dev.name} ({len(dev.pairs):,} sentences): {what}."


def _print_json(
    lines: list[tuple[str, AttentionView]],
    explained: AlignmentScore | None,
    test: AlignmentSet,
    dev: AlignmentSet | None,
    given: AlignmentOptions,
) -> None:
    entries: list[dict[str, Any]] = []
    for name, view in lines:
        layer, head = (None if number is None else number + 1 for number in (view.layer, view.head))
        entry: dict[str, Any] = {"attention": name, "layer": layer, "head": head}
        entry |= {"rows": view.rows, "least": view.least, **asdict(test.score(view))}
        entries.append(entry | ({} if dev is None else {"dev_aer": dev.score(view).aer}))
    about = {"pairs": test.name, "sentences": len(test.pairs), "chosen_on": None if dev is None else dev.name}
    found = test.found
    about |= {"layers": found.layers if found else 0, "heads": found.heads if found else 0}
    about |= {"threshold": given.threshold, "possible": test.possible}
    if explained is not None:
        about["explanations"] = {"masks": given.masks, "how": given.how, **asdict(explained)}
    typer.echo(json.dumps({**about, "lines": entries}))
