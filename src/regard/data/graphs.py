"""Graphs whose nodes have features and classes: .npz files, folders of TSV files, and a built-in graph.

An .npz file holds `edges` [E, 2], undirected; `features` [N, F], or a sparse table as `feature_rows` and
`feature_columns` (and `feature_values`, else ones) with `shape` (N, F); `labels` [N], -1 where the class is not known;
and the nodes of each split, `train`, `valid` and `test`. `class_names`, `feature_names` and `node_names` are optional.

A folder holds nodes.tsv, with the columns node, class, split and features (words, or word:number, between spaces), and
edges.tsv, with the columns source and target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.data.lines import read_lines
from regard.data.stream import PlannedBatches, generator
from regard.errors import UserError, first_line
from regard.models.graph import GraphBatch, PackedGraphs
from regard.packed import PackedLayout
from regard.registry import CORPORA

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
SPLITS = ("train", "valid", "test")
UNKNOWN = -1  # the label of a node whose class is not known


@dataclass(frozen=True)
class NodeGraph:
    """N nodes with sparse features, undirected edges, and the class of each node (-1: not known).

    Features are sorted by node: node `feature_rows[i]` has feature `feature_columns[i]` with weight
    `feature_values[i]`.
    """

    nodes: tuple[str, ...]
    edges: Ints  # [E, 2]
    feature_rows: Ints  # [M]
    feature_columns: Ints  # [M]
    feature_values: Floats  # [M]
    feature_names: tuple[str, ...] = ()
    labels: Ints = None  # type: ignore[assignment]  # [N]
    classes: tuple[str, ...] = ()
    splits: Mapping[str, Ints] = None  # type: ignore[assignment]

    @property
    def digest(self) -> str:
        hashed = hashlib.blake2b(digest_size=16)
        for field in fields(self):
            value = getattr(self, field.name)
            parts = [f"{k} {v.tolist()}" for k, v in value.items()] if isinstance(value, Mapping) else value
            hashed.update(parts.tobytes() if isinstance(parts, np.ndarray) else repr(parts).encode())
        return hashed.hexdigest()

    @cached_property
    def directed(self) -> Ints:
        """Receiver and sender of each edge [E', 2], sorted: edges both ways, and one from every node to itself."""
        loops = np.arange(len(self.nodes)).repeat(2).reshape(-1, 2)
        both = np.concatenate([self.edges, self.edges[:, ::-1], loops])
        keys = np.unique(both[:, 0] * len(self.nodes) + both[:, 1])
        return np.stack([keys // len(self.nodes), keys % len(self.nodes)], 1)

    @cached_property
    def number(self) -> dict[str, int]:
        """The number of each node, by its name."""
        return {name: number for number, name in enumerate(self.nodes)}


def pack_graphs(graphs: Sequence[NodeGraph]) -> PackedGraphs:
    """Concatenate graphs; each undirected edge becomes two, and every node gets an edge to itself."""
    sizes = [len(graph.nodes) for graph in graphs]
    starts = np.cumsum([0, *sizes[:-1]])
    directed = np.concatenate([graph.directed + start for graph, start in zip(graphs, starts, strict=True)])
    rows = np.concatenate([graph.feature_rows + start for graph, start in zip(graphs, starts, strict=True)])
    offsets = np.searchsorted(rows, np.arange(sum(sizes)))
    return PackedGraphs(
        PackedLayout(sizes),
        torch.from_numpy(np.concatenate([graph.feature_columns for graph in graphs])),
        torch.from_numpy(np.concatenate([graph.feature_values for graph in graphs])),
        torch.from_numpy(offsets),
        torch.from_numpy(directed[:, 1].copy()),
        torch.from_numpy(directed[:, 0].copy()),
    )


# -- files ------------------------------------------------------------------------------------------------------------


def read_graph(path: Path) -> NodeGraph:
    """Read a graph from an .npz file, or from a folder of nodes.tsv and edges.tsv."""
    if path.is_dir():
        return _read_tables(path / "nodes.tsv", path / "edges.tsv")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
    except Exception as error:  # zipfile and NumPy raise many kinds for damaged files
        raise UserError(f"{path}: not an .npz file of a graph: {first_line(error)}") from error
    return _checked(_from_arrays(path, arrays), path)


def _from_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> NodeGraph:
    missing = [name for name in ("edges", "labels") if name not in arrays]
    if "features" not in arrays and not {"feature_rows", "feature_columns", "shape"} <= arrays.keys():
        missing.append("features (or feature_rows, feature_columns and shape)")
    if missing:
        raise UserError(f"{path} has no {missing[0]}: it has {', '.join(arrays) or 'nothing'}")
    if "features" in arrays:
        dense = arrays["features"]
        if dense.ndim != 2 or dense.dtype.kind not in "biuf":
            raise UserError(
                f"{path}: features are a table [nodes, features] of numbers, not {dense.dtype} {dense.shape}"
            )
        count, width = dense.shape
        rows, columns = np.nonzero(dense)
        values = dense[rows, columns]
    else:
        shape = arrays["shape"]
        if shape.shape != (2,) or shape.dtype.kind not in "iu" or shape.min() < 0:
            raise UserError(f"{path}: shape must be the numbers of nodes and of features")
        count, width = map(int, shape)
        rows, columns = arrays["feature_rows"], arrays["feature_columns"]
        values = arrays.get("feature_values", np.ones(len(rows)))
    labels = arrays["labels"]
    known = int(labels.max(initial=-1)) + 1 if labels.dtype.kind in "iu" else 0
    return NodeGraph(
        _names(path, arrays, "node_names", count),
        arrays["edges"],
        rows,
        columns,
        values,
        _names(path, arrays, "feature_names", width),
        labels,
        _names(path, arrays, "class_names", known),
        {split: arrays[split] for split in SPLITS if split in arrays},
    )


def _names(path: Path, arrays: Mapping[str, npt.NDArray[Any]], key: str, count: int) -> tuple[str, ...]:
    """The names in an array or, without it, the numbers from 0."""
    if key not in arrays:
        return tuple(map(str, range(count)))
    names = tuple(map(str, arrays[key].tolist()))
    if len(names) < count or len(set(names)) < len(names):
        raise UserError(f"{path}: {key} must be {count} different names")
    return names


def _read_tables(nodes: Path, edges: Path) -> NodeGraph:
    """Read nodes.tsv and edges.tsv; names of classes and features are numbered in alphabetical order."""
    rows = [(number, row) for number, row in _tsv(nodes, ("node", "class", "split", "features"))]
    names = [row["node"] for _, row in rows]
    position = {name: n for n, name in enumerate(names)}
    if len(position) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{nodes}: node {duplicate[:60]!r} occurs twice")
    weights_of = [_feature_weights(f"{nodes}, line {number}", row["features"]) for number, row in rows]
    features = {name: n for n, name in enumerate(sorted({name for weights in weights_of for name in weights}))}
    classes = {name: n for n, name in enumerate(sorted({row["class"] for _, row in rows if row["class"]}))}
    splits: dict[str, list[int]] = {}
    for n, (number, row) in enumerate(rows):
        if row["split"] not in ("", *SPLITS):
            raise UserError(f"{nodes}, line {number}: split {row['split'][:60]!r} must be {', '.join(SPLITS)} or empty")
        if row["split"]:
            splits.setdefault(row["split"], []).append(n)
    pairs = []
    for number, row in _tsv(edges, ("source", "target")):
        for name in row.values():
            if name not in position:
                raise UserError(f"{edges}, line {number}: there is no node {name[:60]!r} in {nodes}")
        pairs.append([position[row["source"]], position[row["target"]]])
    sizes = [len(weights) for weights in weights_of]
    graph = NodeGraph(
        tuple(names),
        np.array(pairs, np.int64).reshape(-1, 2),
        np.repeat(np.arange(len(names)), sizes),
        np.array([features[name] for weights in weights_of for name in weights], np.int64),
        np.array([weight for weights in weights_of for weight in weights.values()], np.float32),
        tuple(features),
        np.array([classes.get(row["class"], UNKNOWN) for _, row in rows], np.int64),
        tuple(classes),
        {split: np.array(members) for split, members in splits.items()},
    )
    return _checked(graph, nodes)


def _tsv(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a TSV file whose first line names these columns, with their line numbers."""
    lines = enumerate(read_lines(path), 1)
    _, header = next(lines, (1, ""))
    names = header.split("\t")
    if missing := [column for column in columns if column not in names]:
        raise UserError(f"{path}: the first line must name the columns {', '.join(columns)}; {missing[0]} is missing")
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) != len(names):
            raise UserError(f"{path}, line {number}: {len(cells)} columns, and the first line has {len(names)}")
        row = dict(zip(names, cells, strict=True))
        yield number, {column: row[column] for column in columns}


def _feature_weights(where: str, words: str) -> dict[str, float]:
    """Parse "cat dog:0.5" into the weights of features."""
    weights: dict[str, float] = {}
    for word in words.split():
        name, colon, weight = word.rpartition(":")
        try:
            weights[name if colon else word] = float(weight) if colon else 1.0
        except ValueError:
            raise UserError(f"{where}: {word[:60]!r} is not a feature: write name or name:number") from None
    return weights


def _checked(graph: NodeGraph, path: Path) -> NodeGraph:
    """Check indices and numbers, so that a mistake gets one line instead of an error inside the model."""
    nodes, width = len(graph.nodes), len(graph.feature_names)
    if not nodes:
        raise UserError(f"{path}: the graph has no nodes")
    if graph.edges.ndim != 2 or graph.edges.shape[1] != 2 or graph.edges.dtype.kind not in "iu":
        raise UserError(f"{path}: edges must be pairs of node numbers, [edges, 2]")
    indices = {"edges": (graph.edges, nodes), "feature_rows": (graph.feature_rows, nodes)}
    indices |= {"feature_columns": (graph.feature_columns, width)}
    indices |= {split: (members, nodes) for split, members in graph.splits.items()}
    for name, (array, limit) in indices.items():
        if array.dtype.kind not in "iu":
            raise UserError(f"{path}: {name} must be whole numbers, not {array.dtype}")
        if array.size and not (array.min() >= 0 and array.max() < limit):
            wrong = array[(array < 0) | (array >= limit)].flat[0]
            what = "features" if name == "feature_columns" else "nodes"
            raise UserError(f"{path}: {name} names {wrong}, but there are {limit} {what}, numbered from 0")
    if not len(graph.feature_rows) == len(graph.feature_columns) == len(graph.feature_values):
        raise UserError(f"{path}: feature_rows, feature_columns and feature_values must be equally long")
    if graph.feature_values.dtype.kind not in "biuf" or not np.isfinite(graph.feature_values).all():
        raise UserError(f"{path}: a feature is not a finite number")
    if graph.labels.shape != (nodes,) or graph.labels.dtype.kind not in "iu" or graph.labels.min() < UNKNOWN:
        raise UserError(f"{path}: labels must be one class number for each of the {nodes} nodes, or -1")
    for split, members in graph.splits.items():
        if (graph.labels[members] == UNKNOWN).any():
            raise UserError(f"{path}: a node of split {split} has no class")
    for (one, members), (other, others) in combinations(graph.splits.items(), 2):
        if common := sorted(set(members.tolist()) & set(others.tolist())):
            raise UserError(f"{path}: node {common[0]} is in two splits, {one} and {other}")
    if len(set(graph.labels.tolist()) - {UNKNOWN}) < 2:
        raise UserError(f"{path}: all its nodes have one class, and training needs at least two")
    order = np.argsort(graph.feature_rows, kind="stable")
    return NodeGraph(
        graph.nodes,
        graph.edges.astype(np.int64),
        graph.feature_rows[order].astype(np.int64),
        graph.feature_columns[order].astype(np.int64),
        graph.feature_values[order].astype(np.float32),
        graph.feature_names,
        graph.labels.astype(np.int64),
        graph.classes,
        {split: np.asarray(members, np.int64) for split, members in graph.splits.items()},
    )


# -- the built-in graph -----------------------------------------------------------------------------------------------

TOPICS = ("astronomy", "botany", "chess", "music", "sailing")
PAPERS, WORDS, LINKS = 600, 200, 4  # nodes, features, and citations of each node
TOPIC_WORDS, TOPIC_LINKS = 0.35, 0.85  # shares of words and links of the same topic; the rest are random
TRAIN_PER_CLASS, PER_SPLIT = 10, 150  # training nodes of each class; nodes of valid and of test


@CORPORA.register("citations")
class Citations:
    """The built-in corpus `citations`: papers that cite papers, mostly of their own topic.

    A paper's words say little about its topic, and those of the papers that it cites say more.
    """

    kind = "graph"

    @staticmethod
    def graph() -> NodeGraph:
        random = generator(7)
        topics = random.permutation(np.arange(PAPERS) % len(TOPICS))
        papers_of = [np.flatnonzero(topics == topic) for topic in range(len(TOPICS))]
        vocabularies = [random.permutation(WORDS)[: WORDS // len(TOPICS)] for _ in TOPICS]
        edges: list[tuple[int, int]] = []
        rows: list[int] = []
        columns: list[int] = []
        for paper, topic in enumerate(topics):
            for _ in range(LINKS):
                same_topic = random.random() < TOPIC_LINKS
                other = int(random.choice(papers_of[topic])) if same_topic else int(random.integers(PAPERS))
                edges += [] if other == paper else [(paper, other)]
            fits = random.random(8) < TOPIC_WORDS
            words = np.where(fits, random.choice(vocabularies[topic], 8), random.integers(0, WORDS, 8))
            columns += sorted(set(words.tolist()))
            rows += [paper] * (len(columns) - len(rows))
        order = random.permutation(PAPERS)
        train = np.concatenate([[n for n in order if topics[n] == t][:TRAIN_PER_CLASS] for t in range(len(TOPICS))])
        rest = order[~np.isin(order, train)]
        return NodeGraph(
            tuple(f"paper-{n}" for n in range(PAPERS)),
            np.array(edges),
            np.array(rows),
            np.array(columns),
            np.ones(len(rows), np.float32),
            tuple(f"word-{n}" for n in range(WORDS)),
            topics.astype(np.int64),
            TOPICS,
            {"train": train, "valid": rest[:PER_SPLIT], "test": rest[PER_SPLIT : 2 * PER_SPLIT]},
        )


# -- batches ----------------------------------------------------------------------------------------------------------


class GraphBatches(PlannedBatches):
    """An endless stream of batches of whole graphs with at most `budget` nodes, in another order in every epoch."""

    members = "graphs"

    def __init__(self, graphs: Sequence[NodeGraph], labels: npt.NDArray[Any], budget: int, seed: int) -> None:
        self.graphs, self.labels, self.budget, self.seed = list(graphs), labels, budget, seed
        self.sizes = np.array([len(graph.nodes) for graph in graphs])

    def _plan(self, random: np.random.Generator) -> Iterator[npt.NDArray[Any]]:
        order = random.permutation(len(self.graphs))
        begin = 0
        while begin < len(order):
            ends = self.sizes[order[begin:]].cumsum()
            end = begin + max(int(ends.searchsorted(self.budget, "right")), 1)  # a larger graph comes alone
            yield order[begin:end]
            begin = end

    def _cost(self, members: npt.NDArray[Any]) -> float:
        return int(self.sizes[members].sum())

    def _read(self, members: npt.NDArray[Any]) -> GraphBatch:
        graphs = pack_graphs([self.graphs[i] for i in members])
        return GraphBatch(graphs, torch.from_numpy(self.labels[members]))


class WholeGraph(PlannedBatches):
    """An endless stream of one batch: a graph and all of its nodes that are trained on."""

    members = "nodes"

    def __init__(self, batch: GraphBatch) -> None:
        self.batch, self.seed = batch, 0

    def _plan(self, random: np.random.Generator) -> Iterator[npt.NDArray[Any]]:
        if self.batch.num_targets:
            yield np.zeros(1, np.int64)

    def _cost(self, members: npt.NDArray[Any]) -> float:
        return self.batch.num_targets

    def _read(self, members: npt.NDArray[Any]) -> GraphBatch:
        return self.batch
