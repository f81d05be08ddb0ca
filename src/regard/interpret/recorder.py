"""Recording and replacing values at a model's taps: attention weights, residual streams, gates."""

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
    """One attention of one forward pass; its weights are computed on access."""

    offered: AttentionWeights

    def sentence(self, n: int = 0) -> Tensor:
        """The weights of sentence n without its padding: [H, Q, K]. Rows sum to one (or are zero)."""
        weights = self.offered()[n]
        lengths = self.offered.layout.lengths()
        if lengths is not None:
            weights = weights[..., : lengths[0][n], : lengths[1][n]]
        return weights


class Recorder:
    """A context that records every tap of a model, without changing the model's results.

    >>> with Recorder(model) as seen:                              # doctest: +SKIP
    ...     model.logits(batch)
    >>> seen.attention["decoder.0.cross_attn"].sentence(0).shape        # doctest: +SKIP
    torch.Size([4, 6, 7])

    For a tap that is reached several times (such as once per decoding step), `attention` and `values` hold the last
    value, and `history` all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self.attention: dict[str, RecordedAttention] = {}
        self.values: dict[str, Tensor] = {}
        self.history: dict[str, list[RecordedAttention | Tensor]] = {}
        self._context: AbstractContextManager[None] | None = None

    def _record(self, module: nn.Module, kind: str, value: taps.Value) -> None:
        name = self._names.get(module)
        if name is None:
            return
        key = f"{name}.{kind}".removeprefix(".")
        recorded: RecordedAttention | Tensor
        if isinstance(value, AttentionWeights):
            recorded = self.attention[name] = RecordedAttention(value)
        else:
            with torch.no_grad():  # values offered as functions, such as gates, are small enough to compute at once
                recorded = self.values[key] = (value if isinstance(value, Tensor) else value()).detach()
        self.history.setdefault(key, []).append(recorded)

    def __enter__(self) -> Recorder:
        self._context = taps.listen(self._record)
        self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._context is not None:
            self._context.__exit__(kind, error, trace)


@contextmanager
def intervene(model: nn.Module, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Replace values at a model's taps: `{"decoder.0.cross_attn.weights": lambda w: w * 0}`.

    Each function receives a value (attention weights as [..., H, Q, K]) and returns its replacement.
    """
    names = {module: name for name, module in model.named_modules()}
    reached: set[str] = set()

    def write(module: nn.Module, kind: str, value: Any) -> Tensor | None:
        key = f"{names.get(module, '?')}.{kind}".removeprefix(".")
        reached.add(key)
        change = changes.get(key)
        return None if change is None else change(value if isinstance(value, Tensor) else value())

    with taps.listen(write):
        yield
    missed = changes.keys() - reached
    if missed:
        raise KeyError(f"no tap {min(missed)!r} was reached; there were: {', '.join(sorted(reached))}")
