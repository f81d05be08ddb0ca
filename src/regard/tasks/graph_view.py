"""What a picture of attention over a graph shows, as plain data; and graphs without some of their nodes or edges."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.errors import UserError
from regard.models.graph import GraphBatch
from regard.run_dir import RunDir
from regard.tasks.classes import PredictionTask

MAX_SHOWN = 60  # nodes of a picture


@dataclass(frozen=True)
class GraphView:
    """A batch of one graph and how to draw it.

    `names` are those of all nodes, `shown` the numbers of those to draw, and `positions` [len(shown), 2] where, from 0
    to 1. `focus` is the node that the prediction is about; None: the whole graph. `inside`: names are written inside
    nodes, not below them.
    """

    batch: GraphBatch
    names: tuple[str, ...]
    shown: tuple[int, ...]
    positions: npt.NDArray[np.float64]
    focus: int | None = None
    inside: bool = False

    def without(self, hidden: Sequence[str]) -> GraphView:
        """The same without attention to or from some nodes ("p1"), or along some edges ("p1:p2").

        Every node still attends to itself. A bond is a node between its atoms ("C1-C2") and is hidden with their edge.
        """
        numbers: dict[str, int] = {name: number for number, name in enumerate(self.names)}
        graphs = self.batch.graphs
        kept = torch.ones(len(graphs.senders), dtype=torch.bool)
        for name in hidden:
            ends = [name] if name in numbers else name.split(":")
            for end in ends:
                if end not in numbers:
                    raise UserError(f"--hide {name[:60]}: there is no node {end[:60]!r}; an edge is written A:B")
            one, other = numbers[ends[0]], numbers[ends[-1]]
            bond = {name.replace(":", "-"), "-".join(reversed(ends))} & numbers.keys() if len(ends) == 2 else {name}
            dropped = (graphs.senders == one) & (graphs.receivers == other)
            dropped |= (graphs.senders == other) & (graphs.receivers == one)
            for node in bond:
                dropped |= (graphs.senders == numbers[node]) | (graphs.receivers == numbers[node])
            dropped &= graphs.senders != graphs.receivers
            if len(ends) == 2 and not dropped.any():
                raise UserError(f"--hide {name[:60]}: there is no such edge")
            kept &= ~dropped
        graphs = replace(graphs, senders=graphs.senders[kept], receivers=graphs.receivers[kept])
        return replace(self, batch=replace(self.batch, graphs=graphs))


class GraphViewTask(PredictionTask):
    """A task whose inputs are graphs, or nodes of one, which can be drawn."""

    @abstractmethod
    def view(self, run: RunDir, given: Any) -> GraphView:
        """What a picture of an input shows."""


def rings(distances: Sequence[int]) -> npt.NDArray[np.float64]:
    """Positions [N, 2] from 0 to 1 around a centre: nodes at distance d from it are on circle d.

    >>> rings([0, 1, 1]).round(2).tolist()
    [[0.5, 0.5], [0.5, 0.04], [0.5, 0.96]]
    """
    positions = np.full((len(distances), 2), 0.5)
    for distance in range(1, max(distances, default=0) + 1):
        members = [n for n, d in enumerate(distances) if d == distance]
        for place, n in enumerate(members):
            angle = 2 * np.pi * (place + 0.5 * (distance - 1)) / len(members)
            positions[n] += 0.46 * distance / max(distances) * np.array([np.sin(angle), -np.cos(angle)])
    return positions
