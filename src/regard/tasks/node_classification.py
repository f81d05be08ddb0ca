"""Classification of the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from regard.data.corpora import locate
from regard.data.graphs import NodeGraph, WholeGraph, pack_graphs, read_graph
from regard.data.stream import BatchStream
from regard.errors import UserError
from regard.models.graph import GraphBatch
from regard.packed import Batch
from regard.registry import CORPORA, TASKS
from regard.run_dir import RunDir
from regard.tasks.axes import EXAMPLES
from regard.tasks.base import Dataset, TraceSpec
from regard.tasks.classes import ClassTask, InputBatch
from regard.tasks.graph_axes import MAX_SHOWN, GraphInspectableTask, GraphInspection, node_axis, rings


@dataclass(frozen=True)
class GraphDataset(Dataset):
    """A graph in memory, and the nodes to train on."""

    graph: NodeGraph
    nodes: list[tuple[int, str]]

    @property
    def digest(self) -> str:
        return self.graph.digest


@TASKS.register("node-classification")
class NodeClassificationTask(ClassTask, GraphInspectableTask):
    """Trains on the nodes of one graph whose class is given; every step reads the whole graph.

    An example is the number of a node and the name of its class. Held-out nodes are part of the graph in training;
    their classes are not.
    """

    name = "node-classification"
    about = "name the class of a node of a graph"
    data = "graph"
    usage = "NODE"
    builtin_usage = "'test 1'"
    targets = "nodes"
    verbs = frozenset({"predict", "evaluate", "look", "draw", "explain"})
    has_source = False
    trace = TraceSpec("predict")

    @cached_property
    def graph(self) -> NodeGraph:
        data = self.recipe.data
        if data.graph is not None:
            return read_graph(locate(data.graph, data.folder))
        graph: NodeGraph = CORPORA[data.corpus or ""].graph()
        return graph

    @property
    def members(self) -> str:
        return "nodes"

    def check_files(self, resumed: bool) -> list[str]:
        _ = self.graph
        return []

    def held_out(self, split: str) -> list[tuple[int, str]]:
        if split not in self.graph.splits:
            raise UserError(f"the graph has no split {split!r}; it has {', '.join(self.graph.splits) or 'none'}")
        return [(int(node), self.graph.classes[self.graph.labels[node]]) for node in self.graph.splits[split]]

    def digest(self, examples: Sequence[Any]) -> str:
        return self.graph.digest

    def class_names(self) -> list[str]:
        return list(self.graph.classes)

    def feature_names(self) -> list[str]:
        return list(self.graph.feature_names)

    def dataset(
        self,
        run: RunDir,
        progress: Callable[[str, int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> GraphDataset:
        return GraphDataset(self.graph, self.held_out("train"))

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        assert isinstance(dataset, GraphDataset)
        nodes, names = zip(*dataset.nodes, strict=True)
        (whole,) = self.batches(run, nodes, self.class_ids(run, names, "the graph"))
        assert isinstance(whole.batch, GraphBatch)
        return WholeGraph(whole.batch)

    def describe(self, run: RunDir, dataset: Dataset, static: bool) -> list[str]:
        graph = self.graph
        size = f"{len(graph.nodes):,} nodes, {len(graph.edges):,} edges, {len(graph.feature_names):,} features"
        return [f"data: a graph of {size}; training nodes: {len(self.held_out('train')):,}"]

    def describe_batch(self, run: RunDir, batch: Batch) -> list[dict[str, Any]]:
        assert isinstance(batch, GraphBatch) and batch.nodes is not None
        return [
            {"node": self.graph.nodes[node], "class": run.classes[label]}
            for node, label in zip(batch.nodes.tolist(), batch.labels.tolist(), strict=True)
        ]

    def batches(self, run: RunDir, inputs: Sequence[Any], labels: Sequence[int] | None = None) -> Iterator[InputBatch]:
        nodes = torch.tensor(list(inputs), dtype=torch.long)
        class_ids = torch.zeros_like(nodes) if labels is None else torch.tensor(labels)
        yield InputBatch(list(range(len(inputs))), GraphBatch(self._packed(run), class_ids, nodes))

    def _packed(self, run: RunDir) -> Any:
        """The graph as tensors, whose features must be those of the run."""
        if tuple(run.features) != self.graph.feature_names:
            raise UserError(f"the features of the graph are not those that {run.path} was trained with")
        return self._tensors

    @cached_property
    def _tensors(self) -> Any:
        return pack_graphs([self.graph])

    def read_input(self, argument: str) -> int:
        if argument not in self.graph.number:
            last = self.graph.nodes[-1]
            raise UserError(f"there is no node {argument[:60]!r}: the nodes are {self.graph.nodes[0]} to {last}")
        return self.graph.number[argument]

    def inspect(self, run: RunDir, given: Any) -> GraphInspection:
        """The node in the middle, its neighbours, and theirs, up to `MAX_SHOWN` nodes."""
        (only,) = self.batches(run, [given])
        assert isinstance(only.batch, GraphBatch)
        neighbours: dict[int, set[int]] = {}
        for one, other in self.graph.edges.tolist():
            neighbours.setdefault(one, set()).add(other)
            neighbours.setdefault(other, set()).add(one)
        distances, frontier = {given: 0}, [given]
        for distance in (1, 2):
            found = dict.fromkeys(n for node in frontier for n in sorted(neighbours.get(node, ())))
            frontier = [n for n in found if n not in distances]  # the neighbours of one node are next to each other
            distances |= dict.fromkeys(frontier[: MAX_SHOWN - len(distances)], distance)
        shown = tuple(distances)
        names = [self.graph.nodes[node] for node in shown]
        return GraphInspection(
            only.batch, node_axis(only.batch, names, shown, rings([*distances.values()]), given, inside=False)
        )

    def examples(self) -> list[str]:
        split = "test" if "test" in self.graph.splits else "train"
        return [self.graph.nodes[node] for node, _ in self.held_out(split)[:EXAMPLES]]

    def input_list(self, given: Any) -> tuple[list[Any], bool]:
        single = isinstance(given, str)
        return [self.read_input(str(node)) for node in ([given] if single else given)], single

    def show_input(self, index: int, given: Any) -> str:
        return f"node {self.graph.nodes[given]}"
