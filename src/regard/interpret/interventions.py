"""Interventions in a forward pass: ablate a head, mask a token, replace an attention row.

An intervention is plain JSON, the same in Python, over HTTP and in a link:

    {"kind": "head", "attention": "decoder.0.cross_attn", "head": 2}         the head's output is zero
    {"kind": "word", "side": "source", "token": 3}                      the token is replaced by the unknown one
    {"kind": "row", "attention": "decoder.0.cross_attn", "head": 2, "query": 4, "weights": [0, 1, 0]}
                                                                        weights of one query; head None: all heads
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional

from regard import taps
from regard.attention.backends import AttentionWeights
from regard.errors import UserError
from regard.text import UNK, Tokenizer

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
class MaskToken:
    """Replace an input token by the unknown token; a word of several tokens takes as many interventions."""

    side: Side
    token: int

    def check(self, shapes: Shapes) -> None:
        """Nothing to check before the text is encoded: `mask_tokens` checks the index."""


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


Intervention = AblateHead | MaskToken | ReplaceRow
KINDS: dict[str, type[AblateHead] | type[MaskToken] | type[ReplaceRow]] = {
    "head": AblateHead,
    "word": MaskToken,
    "row": ReplaceRow,
}


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
    return kind(**fields)


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
    elif name == "side":
        if value not in ("source", "inputs"):
            raise UserError(f"side = {value!r}: must be source or inputs")
    elif isinstance(value, bool) or not (isinstance(value, int) or (name == "head" and value is None)):
        raise UserError(f"{name} = {value!r}: must be a whole number, counted from 0")


def to_json(changes: Sequence[Intervention]) -> list[dict[str, Any]]:
    """Convert interventions to plain JSON."""
    names = {kind: name for name, kind in KINDS.items()}
    entries = [{"kind": names[type(change)], **asdict(change)} for change in changes]
    return [entry | ({"weights": list(entry["weights"])} if "weights" in entry else {}) for entry in entries]


def mask_tokens(
    tokens: Sequence[int], changes: Sequence[Intervention], tokenizer: Tokenizer, sides: Sequence[str]
) -> list[int]:
    """Replace masked tokens of the input by the unknown token; `sides` are the names of the input."""
    masked = list(tokens)
    for change in changes:
        if not isinstance(change, MaskToken):
            continue
        if change.side not in sides:
            raise UserError(f"only tokens of the {sides[0]} can be masked in this model")
        _within("token", change.token, len(tokens), f"the {change.side}")
        token = tokens[change.token]
        if token < tokenizer.first and token != UNK:
            raise UserError(f"token {change.token} is a special token: only words can be masked")
        masked[change.token] = UNK
    return masked


@contextmanager
def apply(model: nn.Module, changes: Sequence[Intervention]) -> Iterator[None]:
    """Ablate heads and replace attention rows while the context lasts; rows only in passes over whole sequences."""
    ablated: dict[str, list[int]] = {}
    rows: dict[str, list[ReplaceRow]] = {}
    for change in changes:
        if isinstance(change, AblateHead):
            ablated.setdefault(change.attention, []).append(change.head)
        elif isinstance(change, ReplaceRow):
            rows.setdefault(change.attention, []).append(change)
    if not ablated and not rows:
        yield
        return
    names = {module: name for name, module in model.named_modules()}

    def write(module: nn.Module, kind: str, value: taps.Value) -> Tensor | None:
        name = names.get(module, "")
        if kind == "heads" and name in ablated and isinstance(value, Tensor):  # [..., H, D]
            heads = value.clone()
            heads[..., ablated[name], :] = 0.0
            return heads
        if kind == "weights" and name in rows and isinstance(value, AttentionWeights):
            return _replace_rows(value, rows[name])
        return None

    with taps.listen(write):
        yield


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
