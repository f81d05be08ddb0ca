"""Graphs as axes of attention, and graphs without some of their nodes or edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.errors import UserError
from regard.models.graph import GraphBatch
from regard.tasks.axes import Axis, Hidden, InspectableTask, Inspection, element

MAX_SHOWN = 60  # nodes of a picture


@dataclass(frozen=True, eq=False)
class GraphInspection(Inspection):
    """A batch of one graph. `bonds` are nodes that stand for the edge between two others, by these two."""

    bonds: Mapping[tuple[int, int], int] = field(default_factory=dict)


def node_axis(
    batch: GraphBatch,
    names: Sequence[str],
    shown: Sequence[int],
    positions: npt.NDArray[np.float64],
    focus: int | None = None,
    **about: Any,
) -> Axis:
    """The nodes `shown` of a graph, with their names and positions [len(shown), 2] from 0 to 1.

    `focus` is the node that the prediction is about; None: the whole graph.
    """
    number, graphs = {node: n for n, node in enumerate(shown)}, batch.graphs
    index = torch.tensor(list(shown))
    both = torch.isin(graphs.senders, index) & torch.isin(graphs.receivers, index) & (graphs.senders < graphs.receivers)
    pairs = zip(graphs.senders[both].tolist(), graphs.receivers[both].tolist(), strict=True)
    edges = sorted({(number[a], number[b]) for a, b in pairs})
    elements = [
        element(name, n, predicts=focus in (None, node), at=[round(x, 4), round(y, 4)])
        for n, (node, name, (x, y)) in enumerate(zip(shown, names, positions.tolist(), strict=True))
    ]
    about |= {"edges": [list(edge) for edge in edges], "focus": None if focus is None else number[focus]}
    return Axis("nodes", elements, about, rows=tuple(shown))


class GraphInspectableTask(InspectableTask):
    """A task whose inputs are graphs, or nodes of one."""

    def hide(self, inspection: Inspection, hidden: Hidden) -> Inspection:
        """Remove attention to and from nodes, and along edges; every node still attends to itself."""
        assert isinstance(inspection, GraphInspection)
        axis, graphs = inspection.axis, inspection.content.graphs
        assert axis.rows is not None
        nodes = [axis.rows[n] for n in hidden.elements]
        dropped = torch.zeros_like(graphs.senders, dtype=torch.bool)
        for a, b in hidden.edges:
            one, other = axis.rows[a], axis.rows[b]
            edge = (graphs.senders == one) & (graphs.receivers == other)
            edge |= (graphs.senders == other) & (graphs.receivers == one)
            if one == other or not edge.any():
                names = " and ".join(axis.elements[n]["label"] for n in (a, b))
                raise UserError(f"there is no edge between {names}")
            dropped |= edge
            nodes += [bond for ends, bond in inspection.bonds.items() if {*ends} == {one, other}]
        touched = torch.tensor(nodes, dtype=torch.long)
        dropped |= torch.isin(graphs.senders, touched) | torch.isin(graphs.receivers, touched)
        kept = ~dropped | (graphs.senders == graphs.receivers)
        graphs = replace(graphs, senders=graphs.senders[kept], receivers=graphs.receivers[kept])
        return replace(inspection, content=replace(inspection.content, graphs=graphs))


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
