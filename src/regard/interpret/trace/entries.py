"""What was heard in a pass, described for a header: attention, the residual stream, gates, what each layer would say.

The numbers themselves go into `Arrays`, by name; the header says which name belongs to what.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from regard.interpret.recorder import RecordedAttention
from regard.interpret.trace.forward import ForwardPass, shape_of
from regard.interpret.trace.stats import significant
from regard.interpret.trace.tasks import TraceTask
from regard.interpret.trace.tokens import Spelling
from regard.interpret.trace.trace import LARGEST_HALF, Made, described
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.registry import POSITIONS
from regard.text import Tokenizer

TOP, LAYER_TOP = 10, 5  # likeliest tokens listed: of the output, and of each layer
READ_OFF = 2e10  # multiplications spent on what each layer would say; of a long text only the last tokens are asked
GATES = {3: ("input", "forget", "output"), 2: ("reset", "update")}  # of an LSTM, of a GRU, in the order of the tap

Entry = dict[str, Any]


@dataclass
class Arrays:
    """The arrays of a trace: how each is made when it is asked for, and how it is carried."""

    made: dict[str, Made] = field(default_factory=dict)
    about: dict[str, Entry] = field(default_factory=dict)

    def add(self, name: str, value: Tensor, dtype: str) -> str:
        self.made[name], self.about[name] = lambda: value.float().cpu().numpy(), described(value.shape, dtype)
        return name

    def add_vectors(self, name: str, value: Tensor) -> str:
        """Vectors [tokens, D], as float16 if that can hold them."""
        return self.add(name, value, "float32" if bool((value.abs() > LARGEST_HALF).any()) else "float16")

    def add_weights(self, name: str, attended: RecordedAttention) -> str:
        """Attention weights [H, Q, K], computed anew each time: of many heads over a long text they are large."""

        def made() -> np.ndarray:
            with torch.inference_mode():
                found: np.ndarray = attended.sentence(0).float().cpu().numpy()
                return found

        self.made[name], self.about[name] = made, described(shape_of(attended), "uint8")
        return name


# -- attention --------------------------------------------------------------------------------------------------------


def attentions(now: ForwardPass, arrays: Arrays) -> list[Entry]:
    """Every attention: whose it is, and which tokens stand on its two axes."""
    return [_attention(name, attended, arrays) for name, attended in now.seen.attention.items()]


def _attention(name: str, attended: RecordedAttention, arrays: Arrays) -> Entry:
    part = "cross" if name.endswith("cross_attn") else name.split(".")[0]
    queries, keys = {"cross": ("target", "source"), "encoder": ("source", "source")}.get(part, ("inputs", "inputs"))
    layer = int(number[1]) if (number := re.search(r"\.(\d+)\.", name)) else 0
    return {
        "name": name,
        "part": part,
        "layer": layer,
        "heads": shape_of(attended)[0],
        "queries": queries,
        "keys": keys,
        "array": arrays.add_weights(f"{name}.weights", attended),
    }


def mask_number(attended: RecordedAttention, masks: list[list[list[int]]]) -> int | None:
    """Which of `masks` an attention has; None where every query sees every key. A new one is added.

    A mask is, for each query, the keys it sees as [start, stop, start, stop, ...]; most layers share one.
    """
    _, queries, keys = shape_of(attended)
    allowed = attended.offered.allowed.to_dense(queries, keys, attended.offered.query.device)
    if allowed is None or bool(allowed.all()):
        return None
    seen = allowed.expand(1, 1, queries, keys)[0, 0].to(torch.int8)
    edges = functional.pad(seen, (1, 1)).diff(dim=1).ne(0)  # [Q, K + 1]: where a range begins or ends
    found = [row.nonzero()[:, 0].tolist() for row in edges.cpu()]
    if found not in masks:
        masks.append(found)
    return masks.index(found)


def vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Every token of the output's vocabulary, by id, as it stands inside a text."""
    return list(map(Spelling(tokenizer), range(len(tokenizer))))


# -- the residual stream ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResidualTrace:
    """What flows between the parts of a model, after one of them: [tokens, D]."""

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
    """What to call a place in the stream.

    >>> stream_label("decoder.0.cross_attn"), stream_label("encoder.1"), stream_label("target_embedding")
    ('block 1 cross-attention', 'layer 2', 'embedding')
    """
    named = {"readout": "readout", "encoder_norm": "final norm"}
    if "embedding" in name or name in named:
        return named.get(name, "embedding")
    _, number, *part = name.split(".")
    if not part:
        return f"layer {int(number) + 1}"
    what = {"self_attn": "attention", "cross_attn": "cross-attention", "feed_forward": "feed-forward"}[part[0]]
    return f"block {int(number) + 1} {what}"


def norms(value: Tensor) -> list[float]:
    """The length of each token's vector."""
    return [significant(norm) for norm in value.float().norm(dim=-1).tolist()]


def _gathered(now: ForwardPass, kind: str) -> dict[str, Tensor]:
    """What was heard at taps of one kind, by module, in the order of the pass.

    Where source and target share one row (GPT), their embeddings are one, laid end to end.
    """
    found: dict[str, list[Tensor]] = {}
    for key, values in now.seen.history.items():
        *path, tap = key.split(".")
        if tap == kind:
            joined = now.sides.joined and path and "embedding" in path[0]
            name = "embedding" if joined else ".".join(path)
            found.setdefault(name, []).extend(value for value in values if isinstance(value, Tensor))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _side(now: ForwardPass, name: str) -> str:
    """Whose tokens a module sees."""
    return "inputs" if now.sides.joined or name.startswith(("decoder", "target_embedding", "readout")) else "source"


def streams(now: ForwardPass) -> list[ResidualTrace]:
    """The stream after every addition, in the order of the pass."""
    found = _gathered(now, "stream")
    return [
        ResidualTrace(name.replace("_residual", "") or "encoder_norm", _side(now, name), value)
        for name, value in found.items()
    ]


def embeddings(now: ForwardPass, positions: str, arrays: Arrays) -> Iterator[Entry]:
    """What the tokens are and where they stand, before they are added up; where a model offers both."""
    places = _gathered(now, "positions")
    for name, tokens in _gathered(now, "tokens").items():
        added = POSITIONS[positions].adds_vectors
        yield {
            "name": name,
            "side": _side(now, name),
            "stream": f"{name}.stream",
            "tokens": arrays.add_vectors(f"{name}.tokens", tokens),
            "positions": arrays.add_vectors(f"{name}.positions", places[name]) if added else None,
            "token_norms": norms(tokens),
            "position_norms": norms(places[name]) if added else None,
        }


# -- what is said -----------------------------------------------------------------------------------------------------


def speaking(task: TraceTask, found: Sequence[ResidualTrace]) -> list[ResidualTrace]:
    """The places of the stream that lead to the output. Of a recurrent model only the readout speaks."""
    side = "source" if is_whole(task) else "inputs"
    led = [stream for stream in found if stream.side == side and stream.name != "encoder_norm"]
    return [stream for stream in found if stream.name == "readout"] or led


def is_whole(task: TraceTask) -> bool:
    """Whether a text is read as a whole, and answered about."""
    return task.kind in ("fill", "classify")


def named(stream: ResidualTrace) -> Entry:
    """A place where the model could stop."""
    return {"name": stream.name, "label": stream.label, "side": "inputs"}


@dataclass(frozen=True)
class Lens:
    """What the model would say if it stopped at each of some places of the stream: its own last layer reads them.

    Of a very long text only the last tokens are asked; the others' lists are empty. It holds no model (nor a task,
    which has one): whoever calls it gives the model.
    """

    tokenizer: Tokenizer
    whole: bool  # whether all tokens are answered about at once
    streams: Sequence[ResidualTrace]
    batch: SeqBatch
    rows: int  # of the logits
    vocabulary: int

    def __call__(self, module: SequenceModel) -> list[Entry]:
        spelling = Spelling(self.tokenizer)
        cost = sum(stream.value.shape[-1] for stream in self.streams) * self.vocabulary
        asked = self.rows if self.whole else min(self.rows, max(1, int(READ_OFF / max(1, cost))))
        silent: list[list[Entry]] = [[] for _ in range(self.rows - asked)]
        entries = []
        with torch.inference_mode():
            for stream in self.streams:
                logits = module.logit_lens(stream.value if self.whole else stream.value[-asked:], self.batch)
                entries.append(named(stream) | {"top": silent + likeliest(logits, LAYER_TOP, spelling)})
        return entries


def likeliest(logits: Tensor, count: int, spelling: Spelling) -> list[list[Entry]]:
    """The likeliest tokens of every row of logits [T, V], whether or not a search may write them."""
    best = logits.float().softmax(-1).topk(min(count, logits.shape[-1]))
    return [
        [{"id": token, "piece": spelling(token), "p": significant(p)} for token, p in zip(ids, ps, strict=True)]
        for ids, ps in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def output(task: TraceTask, now: ForwardPass, arrays: Arrays) -> Entry:
    """The probability of each target token, the likeliest ones beside it, and all logits."""
    return {
        **probabilities(task, now),
        "top": likeliest(now.logits, TOP, Spelling(task.target)),
        "logits": arrays.add("output.logits", now.logits, "float32"),
        "forbidden": list(task.forbidden()),
    }


def probabilities(task: TraceTask, one: ForwardPass) -> Entry:
    """Of the target tokens, in the order they stand; none of a token that the output's vocabulary does not have."""
    logp = one.logp(task.target)
    return {
        "p": [None if value is None else significant(math.exp(value)) for value in logp],
        "logp": [None if value is None else significant(value) for value in logp],
    }


# -- gates ------------------------------------------------------------------------------------------------------------


def gates(now: ForwardPass, arrays: Arrays) -> Iterator[Entry]:
    """Recurrent gates by kind, gates of feed-forward layers (as they multiply: after the SiLU), and over channels."""
    for key, value in now.seen.values.items():
        name, _, tap = key.rpartition(".")
        side = _side(now, name)
        if tap == "gates":  # [1, L, 3 or 2, D]
            for kind, gate in zip(GATES[value.shape[2]], value[0].unbind(1), strict=True):
                yield _gate(arrays.add(f"{name}.{kind}", gate, "uint8"), kind, side)
        elif tap == "gate" and name.endswith("feed_forward"):
            yield _gate(arrays.add_vectors(f"{name}.gate", functional.silu(value.float())), "feed-forward", side)
        elif tap == "gate":  # one a sentence, the same for each of its tokens
            spread = value.expand(len(getattr(now.sides, side)), -1)
            yield _gate(arrays.add(f"{name}.gate", spread, "uint8"), "channels", side)


def _gate(name: str, kind: str, side: str) -> Entry:
    return {"name": name, "kind": kind, "side": side, "array": name}
