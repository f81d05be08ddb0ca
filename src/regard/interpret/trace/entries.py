"""Entries of a trace's header from the values at the taps: attention, residual stream, gates, logit lens.

The numbers themselves go into `Arrays`, by name; the header refers to these names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from regard.decoding.ctc import BLANK, align
from regard.interpret.explain.models import Vocabulary
from regard.interpret.recorder import RecordedAttention
from regard.interpret.rollout import rollout
from regard.interpret.trace.adapter import TraceAdapter
from regard.interpret.trace.forward import ForwardPass, shape_of
from regard.interpret.trace.stats import significant
from regard.interpret.trace.tokens import TokenTexts
from regard.interpret.trace.trace import MAX_FLOAT16, MakeArray, describe_array
from regard.models import SequenceModel
from regard.registry import POSITIONS
from regard.tasks.axes import Axis
from regard.text import EOS

TOP, LAYER_TOP = 10, 5  # most probable tokens listed: of the output, and of each layer
LENS_MULTIPLICATIONS = 2e10  # budget of the logit lens; of a long text only the last positions are computed
GATES = {3: ("input", "forget", "output"), 2: ("reset", "update")}  # LSTM; GRU; in the order of the tap

Entry = dict[str, Any]


@dataclass
class Arrays:
    """The arrays of a trace: a function that computes each, and its shape and data type in a file."""

    made: dict[str, MakeArray] = field(default_factory=dict)
    about: dict[str, Entry] = field(default_factory=dict)

    def add(self, name: str, value: Tensor, dtype: str) -> str:
        self.made[name], self.about[name] = lambda: value.float().cpu().numpy(), describe_array(value.shape, dtype)
        return name

    def add_vectors(self, name: str, value: Tensor) -> str:
        """Add vectors [tokens, D], as float16 if their values are in its range."""
        return self.add(name, value, "float32" if bool((value.abs() > MAX_FLOAT16).any()) else "float16")

    def add_weights(self, name: str, shape: tuple[int, int, int], weights: Callable[[], Tensor]) -> str:
        """Add attention weights [H, Q, K], recomputed at each access: of many heads over a long text they are large."""

        def made() -> np.ndarray:
            with torch.inference_mode():
                values: np.ndarray = weights().float().cpu().numpy()
                return values

        self.made[name], self.about[name] = made, describe_array(shape, "uint8")
        return name

    def add_shares(self, name: str, value: np.ndarray) -> str:
        """Add numbers from 0 to 1, such as the pixels of an image."""
        self.made[name], self.about[name] = lambda: value, describe_array(value.shape, "uint8")
        return name


# -- attention --------------------------------------------------------------------------------------------------------


def axes(now: ForwardPass, arrays: Arrays) -> Entry:
    """Describe the elements of every axis, and what their pictures need."""
    described: Entry = {}
    for name in ("source", "target", "inputs"):
        side = now.sides.side(name)
        shown = side.arrays if isinstance(side, Axis) else {}
        named = {key: arrays.add_shares(f"axes.{name}.{key}", value) for key, value in shown.items()}
        described[name] = side.to_json() | ({"arrays": named} if named else {})
    return described


def attentions(now: ForwardPass, arrays: Arrays) -> list[Entry]:
    """Describe every attention: its part and layer, and the names of its two axes."""
    return [_attention(now, name, attention, arrays) for name, attention in now.recorder.attention.items()]


def weights_of(now: ForwardPass, entry: Entry) -> Callable[[], Tensor]:
    """A function that computes the weights [H, Q, K] of an attention, between the elements of its axes.

    It holds no reference to the model, which the recorder does.
    """
    rows = (now.sides.side(entry[axis]).rows for axis in ("queries", "keys"))
    return partial(now.recorder.attention[entry["name"]].between, *rows)


def _attention(now: ForwardPass, name: str, attention: RecordedAttention, arrays: Arrays) -> Entry:
    part = "cross" if name.endswith("cross_attn") else name.split(".")[0]
    queries, keys = {"cross": ("target", "source"), "encoder": ("source", "source")}.get(part, ("inputs", "inputs"))
    layer = int(number[1]) if (number := re.search(r"\.(\d+)(\.|$)", name)) else 0
    entry: Entry = {
        "name": name,
        "part": part,
        "layer": layer,
        "heads": shape_of(attention)[0],
        "queries": queries,
        "keys": keys,
        "editable": attention.edge_mask is None,
    }
    shape = (entry["heads"], len(now.sides.side(queries)), len(now.sides.side(keys)))
    return entry | {"array": arrays.add_weights(f"{name}.weights", shape, weights_of(now, entry))}


def rollouts(now: ForwardPass, attention: Sequence[Entry], arrays: Arrays) -> list[Entry]:
    """Describe attention rollout through each stack of self-attention, as an attention of one head."""
    entries = []
    has_cross = any(entry["part"] == "cross" for entry in attention)
    for part in ("encoder",) if has_cross else ("encoder", "decoder"):
        layers = [now.recorder.attention[entry["name"]] for entry in attention if entry["part"] == part]
        if not layers:
            continue
        axis = "source" if part == "encoder" else "inputs"
        rows = now.sides.side(axis).rows
        shape = (1, len(now.sides.side(axis)), len(now.sides.side(axis)))
        array = arrays.add_weights(f"{part}.rollout", shape, partial(_rollout, layers, rows))
        about = {"name": f"{part}.rollout", "part": part, "layer": "rollout", "heads": 1, "mask": None}
        entries.append(about | {"queries": axis, "keys": axis, "editable": False, "array": array})
    return entries


def _rollout(layers: Sequence[RecordedAttention], rows: Sequence[int] | None) -> Tensor:
    return rollout(layers, rows)[None]


def mask_number(now: ForwardPass, entry: Entry, masks: list[list[list[int]]]) -> int | None:
    """The index in `masks` of an attention's mask, added if new; None where every query may attend to every key.

    A mask lists, for each query, the allowed keys as ranges [start, stop, start, stop, ...]. Most layers share one.
    """
    rows = (now.sides.side(entry[axis]).rows for axis in ("queries", "keys"))
    allowed = now.recorder.attention[entry["name"]].allowed(*rows)
    if allowed is None or bool(allowed.all()):
        return None
    dense = allowed.to(torch.int8)
    edges = functional.pad(dense, (1, 1)).diff(dim=1).ne(0)  # [Q, K + 1]: where a range begins or ends
    mask = [row.nonzero()[:, 0].tolist() for row in edges.cpu()]
    if mask not in masks:
        masks.append(mask)
    return masks.index(mask)


def vocabulary(tokenizer: Vocabulary) -> list[str]:
    """The texts of all tokens of the output's vocabulary, by id."""
    return list(map(TokenTexts(tokenizer), range(len(tokenizer))))


# -- the residual stream ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResidualTrace:
    """The residual stream after one sub-layer: [tokens, D]."""

    name: str
    side: str
    value: Tensor

    @property
    def label(self) -> str:
        return stream_label(self.name)

    def to_json(self, arrays: Arrays) -> Entry:
        array = arrays.add_vectors(f"{self.name}.stream", self.value)
        return {"name": self.name, "side": self.side, "label": self.label, "norms": norms(self.value), "array": array}


def stream_label(name: str) -> str:
    """A readable name for a position in the residual stream.

    >>> stream_label("decoder.0.cross_attn"), stream_label("encoder.1"), stream_label("target_embedding")
    ('block 1 cross-attention', 'layer 2', 'embedding')
    >>> stream_label("encoder.0.conv")  # any other sub-layer by its own name
    'block 1 conv'
    """
    others = {"readout": "readout", "encoder_norm": "final norm"}
    if "embedding" in name or name in others:
        return others.get(name, "embedding")
    _, number, *part = name.split(".")
    if not part:
        return f"layer {int(number) + 1}"
    sublayer = {"self_attn": "attention", "cross_attn": "cross-attention"}.get(part[0], part[0].replace("_", "-"))
    return f"block {int(number) + 1} {sublayer}"


def norms(value: Tensor) -> list[float]:
    """The Euclidean norm of each token's vector."""
    return [significant(norm) for norm in value.float().norm(dim=-1).tolist()]


def _values(now: ForwardPass, tap: str) -> dict[str, Tensor]:
    """The values at all taps of one kind by module, in the order of the pass.

    Where source and target are one sequence (GPT), their embeddings are concatenated.
    """
    parts: dict[str, list[Tensor]] = {}
    for key, values in now.recorder.history.items():
        *path, kind = key.split(".")
        if kind == tap:
            joined = now.sides.joined and path and "embedding" in path[0]
            name = "embedding" if joined else ".".join(path)
            parts.setdefault(name, []).extend(value for value in values if isinstance(value, Tensor))
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def _side(now: ForwardPass, name: str) -> str:
    """The token side that a module works on."""
    return "inputs" if now.sides.joined or name.startswith(("decoder", "target_embedding", "readout")) else "source"


def streams(now: ForwardPass) -> list[ResidualTrace]:
    """The residual stream after every addition, in the order of the pass."""
    return [
        ResidualTrace(name.replace("_residual", "") or "encoder_norm", _side(now, name), _elements(now, name, value))
        for name, value in _values(now, "stream").items()
    ]


def _elements(now: ForwardPass, name: str, value: Tensor) -> Tensor:
    """The rows of a value [T, D] of a module that are elements of its axis."""
    rows = now.sides.side(_side(now, name)).rows
    return value if rows is None else value[list(rows)]


def embeddings(now: ForwardPass, positions: str, arrays: Arrays) -> Iterator[Entry]:
    """Describe token embeddings and position embeddings before they are added."""
    position_vectors = _values(now, "positions")
    streams = _values(now, "stream")
    for name, tokens in _values(now, "tokens").items():
        if name not in streams:
            continue  # patches, nodes and steps, which have no stages of their own
        added = POSITIONS[positions].adds_vectors
        yield {
            "name": name,
            "side": _side(now, name),
            "stream": f"{name}.stream",
            "tokens": arrays.add_vectors(f"{name}.tokens", tokens),
            "positions": arrays.add_vectors(f"{name}.positions", position_vectors[name]) if added else None,
            "token_norms": norms(tokens),
            "position_norms": norms(position_vectors[name]) if added else None,
        }


# -- output -----------------------------------------------------------------------------------------------------------


def output_streams(adapter: TraceAdapter, streams: Sequence[ResidualTrace]) -> list[ResidualTrace]:
    """The streams that the logit lens applies to; of a recurrent model only the readout."""
    if not adapter.has_lens:
        return []
    side = "source" if adapter.encoder_only else "inputs"
    of_side = [stream for stream in streams if stream.side == side and stream.name != "encoder_norm"]
    return [stream for stream in streams if stream.name == "readout"] or of_side


def describe_layer(stream: ResidualTrace) -> Entry:
    """Describe a stream that the logit lens applies to."""
    return {"name": stream.name, "label": stream.label, "side": "inputs"}


@dataclass(frozen=True)
class LogitLens:
    """The logit lens: the output layer applied to the residual stream after each of some layers.

    Of a very long text only the last positions are computed; the lists of the others are empty. It holds no reference
    to the model, which is passed at each call.
    """

    tokenizer: Vocabulary
    all_positions: bool  # whether the output layer needs all positions at once
    streams: Sequence[ResidualTrace]
    batch: Any
    rows: int  # number of rows of logits
    vocabulary: int

    def __call__(self, module: SequenceModel) -> list[Entry]:
        texts = TokenTexts(self.tokenizer)
        cost = sum(stream.value.shape[-1] for stream in self.streams) * self.vocabulary
        budget = max(1, int(LENS_MULTIPLICATIONS / max(1, cost)))
        count = self.rows if self.all_positions else min(self.rows, budget)
        skipped: list[list[Entry]] = [[] for _ in range(self.rows - count)]
        entries = []
        with torch.inference_mode():
            for stream in self.streams:
                value = stream.value if self.all_positions else stream.value[-count:]
                top = most_probable(module.logit_lens(value, self.batch), LAYER_TOP, texts)
                entries.append(describe_layer(stream) | {"top": skipped + top})
        return entries


def most_probable(logits: Tensor, count: int, texts: TokenTexts) -> list[list[Entry]]:
    """The most probable tokens of every row of logits [T, V], those that a search never writes included."""
    best = logits.float().softmax(-1).topk(min(count, logits.shape[-1]))
    return [
        [{"id": token, "text": texts(token), "p": significant(p)} for token, p in zip(ids, ps, strict=True)]
        for ids, ps in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def output(adapter: TraceAdapter, now: ForwardPass, arrays: Arrays) -> Entry:
    """Describe the probability of each target token, the most probable tokens there, and all logits."""
    described = probabilities(adapter, now)
    return described | {
        "top": [] if described["numbers"] else most_probable(now.logits, TOP, TokenTexts(adapter.outputs)),
        "logits": arrays.add("output.logits", now.logits, "float32"),
        "forbidden": list(adapter.forbidden()),
    }


def probabilities(adapter: TraceAdapter, one: ForwardPass) -> Entry:
    """The probabilities of the target tokens in order; None for a token of another vocabulary than the output's.

    Of a model that predicts numbers, these.
    """
    logp, numbers = one.logp(adapter.outputs), adapter.numbers(one.logits)
    return {
        "numbers": None if numbers is None else [[significant(number) for number in row] for row in numbers],
        "p": [None if value is None else significant(math.exp(value)) for value in logp],
        "logp": [None if value is None else significant(value) for value in logp],
    }


def ctc(now: ForwardPass, arrays: Arrays) -> Entry | None:
    """Describe the probability of the blank, then of each token of the output, in every frame: [1 + T, frames].

    `starts` are the frames where the tokens begin on the most likely path; empty if the text has none. None: the model
    has no CTC.
    """
    logits = now.recorder.values.get("ctc")
    if logits is None:
        return None
    tokens = [token for token in now.output.tokens if token != EOS]
    log_probs = logits.float().log_softmax(-1)
    try:
        starts = align(log_probs, tokens)
    except ValueError:  # more tokens than there are frames
        starts = []
    return {"array": arrays.add("output.ctc", log_probs[:, [BLANK, *tokens]].T.exp(), "uint8"), "starts": starts}


# -- gates ------------------------------------------------------------------------------------------------------------


def gates(now: ForwardPass, arrays: Arrays) -> Iterator[Entry]:
    """Describe gates: recurrent ones by kind, those of feed-forward layers (after the SiLU), and of channels."""
    for key, value in now.recorder.values.items():
        name, _, tap = key.rpartition(".")
        side = _side(now, name)
        if tap == "gates":  # [1, L, 3 or 2, D]
            for kind, gate in zip(GATES[value.shape[2]], value[0].unbind(1), strict=True):
                yield _gate(arrays.add(f"{name}.{kind}", gate, "uint8"), kind, side)
        elif tap == "gate" and name.endswith("feed_forward"):
            yield _gate(arrays.add_vectors(f"{name}.gate", functional.silu(value.float())), "feed-forward", side)
        elif tap == "gate":  # one per sentence, repeated for each of its tokens
            repeated = value.expand(len(getattr(now.sides, side)), -1)
            yield _gate(arrays.add(f"{name}.gate", repeated, "uint8"), "channels", side)


def _gate(name: str, kind: str, side: str) -> Entry:
    return {"name": name, "kind": kind, "side": side, "array": name}
