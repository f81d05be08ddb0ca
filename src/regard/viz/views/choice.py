"""The choice of an attention map of a trace: part, layer (or the mean), head (or the mean, or the best-aligned one)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from regard.errors import UserError
from regard.interpret.trace import Trace
from regard.viz.maps import Map

Entry = Mapping[str, Any]  # an attention entry of a trace's header
PARTS = {"cross": "Cross-attention", "encoder": "Encoder self-attention", "decoder": "Decoder self-attention"}


@dataclass(frozen=True)
class MapChoice:
    """Layers and heads count from 0; None is the mean over all. "rollout" is attention through all layers.

    `words`: subwords are merged into words, and the tokens of a step into the step.
    """

    part: str | None = None
    layer: int | Literal["rollout"] | None = None
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
    if choice.layer == "rollout":
        return _rollout(trace, choice)
    layer = {"cross": "decoder layer", "encoder": "encoder layer", "decoder": "decoder layer"}[part]
    _check_number("--layer", choice.layer, len(entries), layer)
    selected = entries if choice.layer is None else [entries[choice.layer]]
    _check_number("--head", choice.head, min(int(entry["heads"]) for entry in selected), "head")
    if choice.head == "best":
        choice = _best(trace, entries, choice)
    return [entries[choice.layer]] if isinstance(choice.layer, int) else entries, choice


def _check_number(option: str, number: int | str | None, most: int, what: str) -> None:
    if isinstance(number, int) and number >= most:
        raise UserError(f"{option} {number + 1}: this model has {most} {what}{'s' if most > 1 else ''}")


def _rollout(trace: Trace, choice: MapChoice) -> tuple[list[Entry], MapChoice]:
    entries = [entry for entry in trace.header["rollout"] if entry["part"] == choice.part]
    if not entries:
        raise UserError(f"--layer rollout: there is none through the {PARTS[choice.part or ''].lower()} of this model")
    if choice.head is not None:
        raise UserError("--layer rollout is the mean of all heads: leave out --head")
    return entries, choice


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
    axes = [trace.header["axes"][entries[0][axis]] for axis in ("queries", "keys")]
    sides = [axis["elements"] for axis in axes]
    queries, keys = (_texts(axis, choice.words) for axis in axes)
    averaged = weights(trace, entries, head).clip(0.0, 1.0)
    named = any(axis["kind"] != "tokens" for axis in axes)
    map = Map(averaged, queries, keys, _title(trace, entries, choice), named=named)
    words = [groups(side) if choice.words else [[i] for i in range(len(side))] for side in sides]
    links = _links(trace, sides, words) if choice.part == "cross" else []
    reading = [element.get("predicts", True) for element in sides[0]]
    return map.merged(words[0], words[1], reading) if choice.words else map, links, choice


def _texts(axis: Entry, merged: bool) -> tuple[str, ...]:
    """Return the texts of elements, which are joined where elements are merged; else their labels."""
    key = "text" if merged or axis["kind"] == "tokens" else "label"
    return tuple(str(element[key]) for element in axis["elements"])


def groups(tokens: Sequence[Entry]) -> list[list[int]]:
    """Return the token positions of each word, in order.

    A special token is a word of its own, and no word mixes given and generated tokens.
    """
    words: list[list[int]] = []
    for i, token in enumerate(tokens):
        if words and token["group"] >= 0 and all(tokens[i - 1][key] == token[key] for key in ("group", "given")):
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
        [side[positions[0]]["group"] for positions in grouped] for side, grouped in zip(sides, words, strict=True)
    )
    gold = {(target, source) for target, source in trace.header["gold"]["links"]}
    return [(r, c) for r, j in enumerate(rows) for c, i in enumerate(columns) if (j, i) in gold]


def _title(trace: Trace, entries: Sequence[Entry], choice: MapChoice) -> str:
    part = choice.part or ""
    layers = sum(entry["part"] == part for entry in trace.header["attention"])
    heads = int(entries[0]["heads"])
    if choice.layer == "rollout":
        return f"{part_title(trace, part)}, rollout through {layers} layer{'s' if layers > 1 else ''}"
    which = f"mean of {layers} layers" if len(entries) > 1 else f"layer {(choice.layer or 0) + 1} of {layers}"
    same = all(entry["heads"] == heads for entry in entries)
    mean = f"mean of {heads} heads" if same else "mean of all heads"
    whose = f"head {choice.head + 1} of {heads}" if isinstance(choice.head, int) else mean
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
