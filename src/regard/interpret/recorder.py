"""Recording and replacing values at a model's taps: attention weights, residual streams, gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from regard import taps
from regard.attention.backends import AttentionWeights
from regard.attention.edges import EdgeMask


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

    @property
    def edge_mask(self) -> EdgeMask | None:
        """The edges, if positions are nodes that attend along the edges of a graph."""
        mask = self.offered.allowed.sparse
        return mask if isinstance(mask, EdgeMask) else None

    def edge_weights(self) -> Tensor:
        """The weights of the edges of `edge_mask`, [E, H]; those to one receiver sum to one."""
        mask = self.edge_mask
        assert mask is not None
        q, k = (x.transpose(1, 2).flatten(0, 1) for x in (self.offered.query, self.offered.key))
        return mask.softmax(self.offered.score.on_edges(q, k, *reversed(mask.cells)))

    def between(self, queries: Sequence[int] | None, keys: Sequence[int] | None) -> Tensor:
        """The weights [H, Q, K] between some positions of the first sentence; None: between all.

        Of a graph no table of all its nodes is made.
        """
        if self.edge_mask is None or queries is None or keys is None:
            weights = self.sentence(0)
            return weights if queries is None or keys is None else weights[:, list(queries)][:, :, list(keys)]
        (rows, columns), chosen = _chosen_edges(self.edge_mask, queries, keys)
        weights = self.edge_weights()[chosen]
        table = weights.new_zeros(weights.shape[1], len(queries), len(keys))
        table[:, rows, columns] = weights.T
        return table

    def allowed(self, queries: Sequence[int] | None, keys: Sequence[int] | None) -> Tensor | None:
        """The mask of these positions, [Q, K]: True where one may attend to another; None: all may attend to all."""
        if self.edge_mask is None or queries is None or keys is None:
            q, k = self.offered.query.shape[-2], self.offered.key.shape[-2]
            table = self.offered.allowed.to_dense(q, k, self.offered.query.device)
            table = None if table is None else table.expand(1, 1, q, k)[0, 0]
            return table if table is None or queries is None or keys is None else table[list(queries)][:, list(keys)]
        cells, _ = _chosen_edges(self.edge_mask, queries, keys)
        table = torch.zeros(len(queries), len(keys), dtype=torch.bool)
        table[cells] = True
        return table


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


def _chosen_edges(mask: EdgeMask, queries: Sequence[int], keys: Sequence[int]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The edges between some nodes: cells of a table of these nodes, and numbers [E'] of the edges."""
    nodes = int(mask.receivers.max()) + 1
    index = mask.receivers.new_full((2, nodes), -1)
    for row, chosen in enumerate((queries, keys)):
        index[row, list(chosen)] = torch.arange(len(chosen), device=index.device)
    rows, columns = index[0][mask.receivers], index[1][mask.senders]
    edges = ((rows >= 0) & (columns >= 0)).nonzero()[:, 0]
    return (rows[edges], columns[edges]), edges


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
