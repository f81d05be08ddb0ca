"""Interventions in a forward pass: ablate a head, hide an element of the input or an edge, replace an attention row.

An intervention is plain JSON, the same in Python, over HTTP and in a link:

    {"kind": "head", "attention": "decoder.0.cross_attn", "head": 2}    the head's output is zero
    {"kind": "hide", "side": "source", "element": 3}                    the model does without this element (below)
    {"kind": "edge", "side": "source", "ends": [3, 5]}                  two nodes of a graph do not attend to each other
    {"kind": "row", "attention": "decoder.0.cross_attn", "head": 2, "query": 4, "weights": [0, 1, 0]}
                                                                        weights of one query; head None: all heads

A hidden token becomes the unknown token, a hidden patch grey; the features of a hidden frame of sound become 0, their
mean. Nothing attends to a hidden step, or to or from a hidden node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard import taps
from regard.attention.backends import AttentionWeights
from regard.errors import UserError
from regard.tasks.axes import Hidden

MAX_WEIGHT = 1e6  # before normalisation

Side = Literal["source", "inputs"]
Shapes = Mapping[str, tuple[int, int, int]]  # by attention: heads, queries, keys


@dataclass(frozen=True)
class AblateHead:
    """Set the output of a head to zero."""

    attention: str
    head: int

    def check(self, shapes: Shapes) -> None:
        heads, _, _ = _shape(self.attention, shapes)
        _within("head", self.head, heads, self.attention)


@dataclass(frozen=True)
class HideElement:
    """Do without an element of the input; a word of several tokens takes as many interventions."""

    side: Side
    element: int

    def check(self, shapes: Shapes) -> None:
        """Nothing to check before the input is read: `hidden_elements` checks the index."""


@dataclass(frozen=True)
class HideEdge:
    """Do without the edge between two nodes of a graph, in both directions."""

    side: Side
    ends: tuple[int, int]

    def check(self, shapes: Shapes) -> None:
        """Nothing to check before the input is read: `hidden_elements` checks the indices."""


@dataclass(frozen=True)
class ReplaceRow:
    """Replace the attention weights of one query, in one head or in all; they are normalised to sum to one.

    The other rows of that attention keep their weights, also the later steps of a recurrent decoder.
    """

    attention: str
    head: int | None
    query: int
    weights: tuple[float, ...]

    def check(self, shapes: Shapes) -> None:
        heads, queries, keys = _shape(self.attention, shapes)
        if self.head is not None:
            _within("head", self.head, heads, self.attention)
        _within("query", self.query, queries, self.attention)
        if len(self.weights) != keys:
            raise UserError(f"{len(self.weights)} weights for the {keys} keys of {self.attention}")


@dataclass(frozen=True)
class MaskKeys:
    """Let no position outside a group attend to the positions in it. Made by adapters, not from JSON."""

    groups: tuple[tuple[int, ...], ...]


Intervention = AblateHead | HideElement | HideEdge | ReplaceRow
Applied = Intervention | MaskKeys
KINDS: dict[str, Any] = {"head": AblateHead, "hide": HideElement, "edge": HideEdge, "row": ReplaceRow}


def parse(changes: Sequence[Mapping[str, Any] | Intervention]) -> tuple[Intervention, ...]:
    """Parse interventions from JSON; an invalid one is an error that says why."""
    return tuple(change if isinstance(change, Intervention) else _parse(change) for change in changes)


def _parse(change: Mapping[str, Any]) -> Intervention:
    if not isinstance(change, Mapping) or change.get("kind") not in list(KINDS):  # a list: the kind may be unhashable
        raise UserError(f"a change is one of {', '.join(KINDS)}, not {change!r}")
    fields = {name: value for name, value in change.items() if name != "kind"}
    kind = KINDS[change["kind"]]
    expected = kind.__dataclass_fields__.keys()
    if fields.keys() != expected:
        raise UserError(f"a change of kind {change['kind']!r} has {', '.join(expected)}, not {', '.join(fields)}")
    for name, value in fields.items():
        _check_field(name, value)
    if "weights" in fields:
        fields["weights"] = tuple(float(weight) for weight in fields["weights"])
    if "ends" in fields:
        fields["ends"] = tuple(fields["ends"])
    made: Intervention = kind(**fields)
    return made


def _check_field(name: str, value: Any) -> None:
    """Check the value of a field; a name means the same in every kind of intervention."""
    if name == "weights":
        valid = isinstance(value, list | tuple) and all(
            isinstance(weight, int | float) and 0 <= weight <= MAX_WEIGHT for weight in value
        )
        if not valid or sum(value) <= 0:
            raise UserError("the weights of a row must be numbers from 0 to a million, and not all of them 0")
    elif name == "attention":
        if not isinstance(value, str):
            raise UserError(f"attention = {value!r}: must be the name of an attention, such as decoder.0.cross_attn")
    elif name == "ends":
        if not (isinstance(value, list | tuple) and len(value) == 2 and all(type(end) is int for end in value)):
            raise UserError(f"ends = {value!r}: must be two whole numbers, counted from 0")
    elif name == "side":
        if value not in ("source", "inputs"):
            raise UserError(f"side = {value!r}: must be source or inputs")
    elif isinstance(value, bool) or not (isinstance(value, int) or (name == "head" and value is None)):
        raise UserError(f"{name} = {value!r}: must be a whole number, counted from 0")


def hiding(header: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The interventions that hide parts of the input of a trace, by their names in its header.

    A name is the label of an element, a word, the number of a step, a stretch of sound in seconds ("0.2-0.5") or, in a
    graph, an edge "A:B".
    """
    side = header["model"]["input"]
    axis = header["axes"][side]
    changes: list[dict[str, Any]] = []
    for name in names:
        ends = name.split(":") if axis["kind"] == "nodes" else []
        if len(ends) == 2:
            numbers = [_named(axis, end, name)[0] for end in ends]
            changes.append({"kind": "edge", "side": side, "ends": numbers})
        else:
            changes += [{"kind": "hide", "side": side, "element": n} for n in _named(axis, name, name)]
    return changes


def _named(axis: Mapping[str, Any], name: str, given: str) -> list[int]:
    """The numbers of the elements with a name; `given` is the argument that has it."""
    elements = [element for element in axis["elements"] if element["given"]]
    stretch = re.fullmatch(r"([0-9.]+)-([0-9.]+)", name) if axis["kind"] == "frames" else None
    if stretch is not None:
        begin, end = float(stretch[1]), float(stretch[2])
        found = [n for n, one in enumerate(elements) if one["time"][0] < end and one["time"][1] > begin]
    else:
        words: dict[int, str] = {}
        for element in elements:
            words[element["group"]] = words.get(element["group"], "") + element["text"]
        spelt = [{one["label"], words[one["group"]].strip(), words[one["group"]].split(" ")[0]} for one in elements]
        found = [n for n, one in enumerate(elements) if not one["special"] and name in spelt[n]]
    if not found:
        labels = [one["label"] for one in elements if not one["special"]]
        some = ", ".join(dict.fromkeys([*labels[:3], *labels[-1:]]))
        raise UserError(f"--hide {given[:60]}: there is no {name[:60]!r} in the input; there are {some}")
    return found


def to_json(changes: Sequence[Intervention]) -> list[dict[str, Any]]:
    """Convert interventions to plain JSON."""
    names = {kind: name for name, kind in KINDS.items()}
    entries = [{"kind": names[type(change)], **asdict(change)} for change in changes]
    return [{name: list(v) if isinstance(v, tuple) else v for name, v in entry.items()} for entry in entries]


def hidden_elements(changes: Sequence[Intervention], sides: Sequence[str], count: int) -> Hidden:
    """The elements that interventions hide of an input of `count` elements; `sides` are the names of its axis."""
    elements: list[int] = []
    edges: list[tuple[int, int]] = []
    for change in changes:
        if not isinstance(change, HideElement | HideEdge):
            continue
        if change.side not in sides:
            raise UserError(f"only elements of the {sides[0]} can be hidden in this model")
        for number in (change.element,) if isinstance(change, HideElement) else change.ends:
            _within("element", number, count, f"the {change.side}")
        if isinstance(change, HideElement):
            elements.append(change.element)
        else:
            edges.append(change.ends)
    return Hidden(tuple(elements), tuple(edges))


@contextmanager
def apply(model: nn.Module, changes: Sequence[Applied]) -> Iterator[None]:
    """Ablate heads, mask keys and replace attention rows while the context lasts.

    Keys and rows only in passes over whole sequences.
    """
    ablated: dict[str, list[int]] = {}
    rows: dict[str, list[ReplaceRow]] = {}
    unseen = [group for change in changes if isinstance(change, MaskKeys) for group in change.groups]
    for change in changes:
        if isinstance(change, AblateHead):
            ablated.setdefault(change.attention, []).append(change.head)
        elif isinstance(change, ReplaceRow):
            rows.setdefault(change.attention, []).append(change)
    if not ablated and not rows and not unseen:
        yield
        return
    names = {module: name for name, module in model.named_modules()}

    def write(module: nn.Module, kind: str, value: taps.Value) -> Tensor | None:
        name = names.get(module, "")
        if kind == "heads" and name in ablated and isinstance(value, Tensor):  # [..., H, D]
            heads = value.clone()
            heads[..., ablated[name], :] = 0.0
            return heads
        if kind == "weights" and isinstance(value, AttentionWeights) and (name in rows or unseen):
            if unseen:
                value = value.replaced(_mask_keys(value(), unseen))
            return _replace_rows(value, rows.get(name, ()))
        return None

    with taps.listen(write):
        yield


def _mask_keys(weights: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Take the weight [1, H, Q, K] on each group from the queries outside it; rows still sum to one."""
    weights = weights.clone()
    for group in groups:
        inside = weights[..., list(group), :].clone()
        weights[..., list(group)] = 0.0
        weights[..., list(group), :] = inside
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _replace_rows(offered: AttentionWeights, rows: Sequence[ReplaceRow]) -> Tensor:
    """Replace rows of the weights [1, H, Q, K] of one sentence; masked keys keep zero weight."""
    weights = offered().clone()
    allowed = offered.allowed.to_dense(weights.shape[-2], weights.shape[-1], weights.device)
    for row in rows:
        if row.query >= weights.shape[-2]:
            continue  # an output that is shorter than this position
        values = row.weights[: weights.shape[-1]]
        replacement = functional.pad(weights.new_tensor(values), (0, weights.shape[-1] - len(values)))
        if allowed is not None:
            replacement = replacement.where(allowed.expand(weights.shape)[0, 0, row.query], 0.0)
        if not bool(replacement.sum() > 0):
            raise UserError(f"query {row.query} of {row.attention} may not attend to any of the given tokens")
        heads = slice(None) if row.head is None else row.head
        weights[0, heads, row.query] = replacement / replacement.sum()
    return weights


def _shape(attention: str, shapes: Shapes) -> tuple[int, int, int]:
    if attention not in shapes:
        names = f"there are {', '.join(shapes)}" if shapes else "this model has none"
        raise UserError(f"there is no attention {attention!r}: {names}")
    return shapes[attention]


def _within(name: str, number: int, count: int, where: str) -> None:
    if not 0 <= number < count:
        raise UserError(f"there is no {name} {number} in {where}: it has {count}, counted from 0")
