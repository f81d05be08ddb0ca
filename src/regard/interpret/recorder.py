"""Listening at a model's taps: what was attended to, what flowed through, and changing either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from regard import taps
from regard.attention.backends import AttentionWeights


@dataclass(frozen=True)
class RecordedAttention:
    """One attention of one forward pass. Nothing is computed until it is asked for."""

    offered: AttentionWeights

    def sentence(self, n: int = 0) -> Tensor:
        """The weights of sentence n without its padding: [H, Q, K]. Rows sum to one (or are zero)."""
        weights = self.offered()[n]
        lengths = self.offered.layout.lengths()
        if lengths is not None:
            weights = weights[..., : lengths[0][n], : lengths[1][n]]
        return weights


class Recorder:
    """Records every tap of a model while its context lasts, and never changes what the model computes.

    >>> with Recorder(model) as seen:                              # doctest: +SKIP
    ...     model.logits(batch)
    >>> seen.attention["decoder.0.cross_attn"].sentence(0).shape        # doctest: +SKIP
    torch.Size([4, 6, 7])

    A tap passed several times (once a decoding step, say) keeps its last value in `attention` and `values`, and all of
    them in `history`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self.attention: dict[str, RecordedAttention] = {}
        self.values: dict[str, Tensor] = {}
        self.history: dict[str, list[RecordedAttention | Tensor]] = {}
        self._listening: AbstractContextManager[None] | None = None

    def _hear(self, module: nn.Module, kind: str, value: taps.Value) -> None:
        name = self._names.get(module)
        if name is None:
            return
        key = f"{name}.{kind}".removeprefix(".")
        kept: RecordedAttention | Tensor
        if isinstance(value, AttentionWeights):
            kept = self.attention[name] = RecordedAttention(value)
        else:
            with torch.no_grad():  # what is offered lazily, gates say, is small enough to be worked out at once
                kept = self.values[key] = (value if isinstance(value, Tensor) else value()).detach()
        self.history.setdefault(key, []).append(kept)

    def __enter__(self) -> Recorder:
        self._listening = taps.listen(self._hear)
        self._listening.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listening is not None:
            self._listening.__exit__(kind, error, trace)


@contextmanager
def intervene(model: nn.Module, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Run a model with other values at its taps: `{"decoder.0.cross_attn.weights": lambda w: w * 0}`.

    Weights come as [..., H, Q, K]; what the function returns takes their place.
    """
    names = {module: name for name, module in model.named_modules()}
    known: set[str] = set()

    def write(module: nn.Module, kind: str, value: Any) -> Tensor | None:
        key = f"{names.get(module, '?')}.{kind}".removeprefix(".")
        known.add(key)
        change = changes.get(key)
        return None if change is None else change(value if isinstance(value, Tensor) else value())

    with taps.listen(write):
        yield
    missed = changes.keys() - known
    if missed:
        raise KeyError(f"no tap {min(missed)!r} was passed; there were: {', '.join(sorted(known))}")
