"""The choice of an attention map of a trace: part, layer (or the mean), head (or the mean, or the best-aligned one)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from regard.errors import UserError
from regard.interpret.trace import Trace
from regard.viz.maps import Map

Entry = Mapping[str, Any]  # of a trace's header
PARTS = {"cross": "Cross-attention", "encoder": "Encoder self-attention", "decoder": "Decoder self-attention"}


@dataclass(frozen=True)
class MapChoice:
    """Layers and heads count from 0; None is the mean over all. `words`: subwords are merged into words."""

    part: str | None = None
    layer: int | None = None
    head: int | Literal["best"] | None = None
    words: bool = True


def parts(trace: Trace) -> list[str]:
    """Return the parts of the model that have attention, cross-attention first."""
    present = {entry["part"] for entry in trace.header["attention"]}
    return [part for part in PARTS if part in present]


def part_title(trace: Trace, part: str) -> str:
    """Return the title of a part's attention; the name of the part is left out if there is no other."""
    return "Self-attention" if parts(trace) == [part] and part != "cross" else PARTS[part]


def chosen(trace: Trace, choice: MapChoice) -> tuple[list[Entry], MapChoice]:
    """Return the attentions to average, and the choice with its part (and for "best" its layer and head) resolved.

    A layer or head that does not exist raises a `UserError`; its message counts from 1, like the command line.
    """
    part = choice.part or parts(trace)[0]
    entries = [entry for entry in trace.header["attention"] if entry["part"] == part]
    if not entries:
        raise UserError(f"--part {part}: this model has attention in its {' and '.join(parts(trace))}")
    choice = replace(choice, part=part)
    layer = {"cross": "decoder layer", "encoder": "encoder layer", "decoder": "decoder layer"}[part]
    given = ((choice.layer, "--layer", len(entries), layer), (choice.head, "--head", int(entries[0]["heads"]), "head"))
    for number, option, most, what in given:
        if isinstance(number, int) and number >= most:
            raise UserError(f"{option} {number + 1}: this model has {most} {what}{'s' if most > 1 else ''}")
    if choice.head == "best":
        choice = _best(trace, entries, choice)
    return [entries[choice.layer]] if choice.layer is not None else entries, choice


def _best(trace: Trace, entries: Sequence[Entry], choice: MapChoice) -> MapChoice:
    gold = trace.header["gold"]
    if choice.part != "cross" or not gold:
        why = "applies to cross-attention" if choice.part != "cross" else "needs a sentence with a gold alignment"
        raise UserError(f"--head best {why}: give the number of a head, or leave it out for the mean")
    errors = [
        (error, layer, head)
        for layer, entry in enumerate(entries)
        for head, error in enumerate(gold["aer"][entry["name"]])
        if choice.layer in (None, layer)
    ]
    _, layer, head = min(errors)
    return replace(choice, layer=layer, head=head)


def weights(trace: Trace, entries: Sequence[Entry], head: int | None) -> np.ndarray:
    """Return the mean over the attentions, of one head or of all, [Q, K]; reads one layer at a time to save memory."""
    total: np.ndarray | float = 0.0
    for entry in entries:
        layer = trace.array(entry["array"])  # [H, Q, K]
        total = total + (layer.mean(0, dtype=np.float64) if head is None else layer[head].astype(np.float64))
    return np.asarray(total) / len(entries)


def map_of(trace: Trace, choice: MapChoice) -> tuple[Map, list[tuple[int, int]], MapChoice]:
    """Return the map, the cells of the gold alignment, and the resolved choice."""
    entries, choice = chosen(trace, choice)
    head = choice.head if isinstance(choice.head, int) else None
    sides = [trace.header["tokens"][entries[0][axis]] for axis in ("queries", "keys")]
    queries, keys = (tuple(str(token["text"]) for token in side) for side in sides)
    averaged = weights(trace, entries, head).clip(0.0, 1.0)
    map = Map(averaged, queries, keys, _title(trace, entries, choice))
    words = [groups(side) if choice.words else [[i] for i in range(len(side))] for side in sides]
    links = _links(trace, sides, words) if choice.part == "cross" else []
    return map.merged(*words) if choice.words else map, links, choice


def groups(tokens: Sequence[Entry]) -> list[list[int]]:
    """Return the token positions of each word, in order.

    A special token is a word of its own, and no word mixes given and generated tokens.
    """
    words: list[list[int]] = []
    for i, token in enumerate(tokens):
        if words and token["word"] >= 0 and all(tokens[i - 1][key] == token[key] for key in ("word", "given")):
            words[-1].append(i)
        else:
            words.append([i])
    return words


def _links(
    trace: Trace, sides: Sequence[Sequence[Entry]], words: Sequence[Sequence[Sequence[int]]]
) -> list[tuple[int, int]]:
    """Return the gold links, which are between words, as cells of the map."""
    if not trace.header["gold"]:
        return []
    rows, columns = (
        [side[positions[0]]["word"] for positions in grouped] for side, grouped in zip(sides, words, strict=True)
    )
    gold = {(target, source) for target, source in trace.header["gold"]["links"]}
    return [(r, c) for r, j in enumerate(rows) for c, i in enumerate(columns) if (j, i) in gold]


def _title(trace: Trace, entries: Sequence[Entry], choice: MapChoice) -> str:
    part = choice.part or ""
    layers = sum(entry["part"] == part for entry in trace.header["attention"])
    heads = int(entries[0]["heads"])
    which = f"mean of {layers} layers" if len(entries) > 1 else f"layer {(choice.layer or 0) + 1} of {layers}"
    whose = f"head {choice.head + 1} of {heads}" if isinstance(choice.head, int) else f"mean of {heads} heads"
    title = f"{part_title(trace, part)}, {which}, {whose if heads > 1 else 'head 1 of 1'}"
    error = _error(trace, entries, choice)
    return title if error is None else f"{title}: AER {error:.1f} %"


def _error(trace: Trace, entries: Sequence[Entry], choice: MapChoice) -> float | None:
    """Return the alignment error rate of the map, if there is a gold alignment."""
    gold = trace.header["gold"]
    if not gold or choice.part != "cross":
        return None
    if len(entries) == 1:
        name = entries[0]["name"]
        return float(gold["aer"][name][choice.head] if isinstance(choice.head, int) else gold["mean"][name])
    return float(gold["all"]) if choice.head is None else None
