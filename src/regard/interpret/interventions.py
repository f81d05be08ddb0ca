"""Changes to a run of a model: a head switched off, a word hidden, an attention row replaced; and what they change.

A change is plain JSON, the same in Python, over HTTP and in a link:

    {"kind": "head", "attention": "decoder.0.cross_attn", "head": 2}         the head's output is zero
    {"kind": "word", "side": "source", "token": 3}                      the token is replaced by the unknown one
    {"kind": "row", "attention": "decoder.0.cross_attn", "head": 2, "query": 4, "weights": [0, 1, 0]}
                                                                        what one query looks at; head None: all heads
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

LARGEST_WEIGHT = 1e6  # before they are made to sum to one

Side = Literal["source", "inputs"]
Shapes = Mapping[str, tuple[int, int, int]]  # by attention: heads, queries, keys


@dataclass(frozen=True)
class AblateHead:
    """A head whose output is zero."""

    attention: str
    head: int

    def check(self, shapes: Shapes) -> None:
        heads, _, _ = _shape(self.attention, shapes)
        _within("head", self.head, heads, self.attention)


@dataclass(frozen=True)
class MaskToken:
    """A token of what the model reads that is replaced by the unknown one; a word of several takes as many changes."""

    side: Side
    token: int

    def check(self, shapes: Shapes) -> None:
        """Whether the token is there is seen when the text is read."""


@dataclass(frozen=True)
class ReplaceRow:
    """What one query looks at, in one head or in all of them; the weights are made to sum to one.

    The other rows of that attention stay as they were, also those that a recurrent decoder would have come to later.
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
            raise UserError(f"{len(self.weights)} weights for the {keys} tokens that {self.attention} can look at")


Intervention = AblateHead | MaskToken | ReplaceRow
KINDS: dict[str, type[AblateHead] | type[MaskToken] | type[ReplaceRow]] = {
    "head": AblateHead,
    "word": MaskToken,
    "row": ReplaceRow,
}


def parse(changes: Sequence[Mapping[str, Any] | Intervention]) -> tuple[Intervention, ...]:
    """Changes from their JSON; one that is none is an error that says why."""
    return tuple(change if isinstance(change, Intervention) else _parsed(change) for change in changes)


def _parsed(change: Mapping[str, Any]) -> Intervention:
    if not isinstance(change, Mapping) or change.get("kind") not in list(KINDS):  # by ==: it may be anything
        raise UserError(f"a change is one of {', '.join(KINDS)}, not {change!r}")
    fields = {name: value for name, value in change.items() if name != "kind"}
    made = KINDS[change["kind"]]
    wanted = made.__dataclass_fields__.keys()
    if fields.keys() != wanted:
        raise UserError(f"a change of kind {change['kind']!r} has {', '.join(wanted)}; found {', '.join(fields)}")
    for name, value in fields.items():
        _check_field(name, value)
    if "weights" in fields:
        fields["weights"] = tuple(float(weight) for weight in fields["weights"])
    return made(**fields)


def _check_field(name: str, value: Any) -> None:
    """The value of one field, by its name, which means the same in every kind of change."""
    if name == "weights":
        numbers = isinstance(value, list | tuple) and all(
            isinstance(one, int | float) and 0 <= one <= LARGEST_WEIGHT for one in value
        )
        if not numbers or sum(value) <= 0:
            raise UserError("the weights of a row are numbers of at least 0 (and at most a million), not all of them 0")
    elif name == "attention":
        if not isinstance(value, str):
            raise UserError(f"attention = {value!r}: the name of an attention, such as decoder.0.cross_attn")
    elif name == "side":
        if value not in ("source", "inputs"):
            raise UserError(f"side = {value!r}: source or inputs")
    elif isinstance(value, bool) or not (isinstance(value, int) or (name == "head" and value is None)):
        raise UserError(f"{name} = {value!r}: a whole number, counted from 0")


def to_json(changes: Sequence[Intervention]) -> list[dict[str, Any]]:
    """The changes as plain JSON."""
    names = {made: kind for kind, made in KINDS.items()}
    plain = [{"kind": names[type(change)], **asdict(change)} for change in changes]
    return [one | ({"weights": list(one["weights"])} if "weights" in one else {}) for one in plain]


def hidden(
    tokens: Sequence[int], changes: Sequence[Intervention], tokenizer: Tokenizer, sides: Sequence[str]
) -> list[int]:
    """What the model reads with some tokens unknown to it; `sides` are the names that this text goes by."""
    found = list(tokens)
    for change in changes:
        if not isinstance(change, MaskToken):
            continue
        if change.side not in sides:
            raise UserError(f"this model reads its {sides[0]}: only words of that can be hidden")
        _within("token", change.token, len(tokens), f"the {change.side}")
        token = tokens[change.token]
        if token < tokenizer.first and token != UNK:
            raise UserError(f"token {change.token} is a mark: only words can be hidden")
        found[change.token] = UNK
    return found


@contextmanager
def applied(model: nn.Module, changes: Sequence[Intervention]) -> Iterator[None]:
    """Run a model with heads off and rows replaced, in a pass over whole sentences or (heads) step by step."""
    off: dict[str, list[int]] = {}
    rows: dict[str, list[ReplaceRow]] = {}
    for change in changes:
        if isinstance(change, AblateHead):
            off.setdefault(change.attention, []).append(change.head)
        elif isinstance(change, ReplaceRow):
            rows.setdefault(change.attention, []).append(change)
    if not off and not rows:
        yield
        return
    names = {module: name for name, module in model.named_modules()}

    def write(module: nn.Module, kind: str, value: taps.Value) -> Tensor | None:
        name = names.get(module, "")
        if kind == "heads" and name in off and isinstance(value, Tensor):  # [..., H, D]
            silent = value.clone()
            silent[..., off[name], :] = 0.0
            return silent
        if kind == "weights" and name in rows and isinstance(value, AttentionWeights):
            return _replaced(value, rows[name])
        return None

    with taps.listen(write):
        yield


def _replaced(offered: AttentionWeights, rows: Sequence[ReplaceRow]) -> Tensor:
    """[1, H, Q, K] the weights of one sentence with some rows replaced; what may not be seen stays unseen."""
    weights = offered().clone()
    allowed = offered.allowed.to_dense(weights.shape[-2], weights.shape[-1], weights.device)
    for row in rows:
        if row.query >= weights.shape[-2]:
            continue  # an output that has not come to this position
        given = row.weights[: weights.shape[-1]]
        wanted = functional.pad(weights.new_tensor(given), (0, weights.shape[-1] - len(given)))  # of another length
        if allowed is not None:
            may = allowed.expand(weights.shape)[0, 0, row.query]
            wanted = wanted.where(may, 0.0)
        if not bool(wanted.sum() > 0):
            raise UserError(f"query {row.query} of {row.attention} may not look at any of the tokens it is sent to")
        heads = slice(None) if row.head is None else row.head
        weights[0, heads, row.query] = wanted / wanted.sum()
    return weights


def _shape(attention: str, shapes: Shapes) -> tuple[int, int, int]:
    if attention not in shapes:
        known = f"there are {', '.join(shapes)}" if shapes else "this model has none"
        raise UserError(f"there is no attention {attention!r}: {known}")
    return shapes[attention]


def _within(what: str, number: int, count: int, where: str) -> None:
    if not 0 <= number < count:
        raise UserError(f"there is no {what} {number} in {where}: it has {count}, counted from 0")
