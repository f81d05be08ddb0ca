"""Regression on molecules, as graphs of their atoms and bonds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regard.arguments import text_list
from regard.data.corpora import corpora, describe, held_out, read_pairs
from regard.data.graphs import GraphBatches, pack_graphs
from regard.data.molecules import FEATURES, atom_positions, molecule_graph
from regard.data.stream import BatchStream
from regard.errors import UserError
from regard.models.graph import GraphBatch
from regard.packed import Batch
from regard.registry import TASKS
from regard.run_dir import RunDir
from regard.tasks.axes import EXAMPLES
from regard.tasks.base import Dataset, TraceSpec
from regard.tasks.classes import InputBatch
from regard.tasks.graph_axes import GraphInspectableTask, GraphInspection, node_axis
from regard.tasks.numbers import NumberTask
from regard.tasks.text import check_files

BATCH = 128  # molecules in a batch of prediction


@dataclass(frozen=True)
class MoleculeDataset(Dataset):
    """Molecules as SMILES, with the numbers of each."""

    pairs: list[tuple[str, str]]

    @property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(self.pairs).encode(), digest_size=16).hexdigest()


@TASKS.register("molecule-regression")
class MoleculeRegressionTask(NumberTask, GraphInspectableTask):
    """Trains on pairs of SMILES and numbers; `training.batch_tokens` counts nodes, which are atoms and bonds."""

    name = "molecule-regression"
    about = "predict numbers for a molecule, as a graph"
    data = "molecules"
    usage = "'CCO'"
    targets = "molecules"
    verbs = frozenset({"predict", "evaluate", "look", "draw", "explain"})
    has_source = True
    trace = TraceSpec("predict")

    def feature_names(self) -> list[str]:
        return list(FEATURES)

    @property
    def members(self) -> str:
        return "molecules"

    def check_files(self, resumed: bool) -> list[str]:
        return check_files(self.recipe.data, resumed)

    def digest(self, examples: Sequence[Any]) -> str:
        return MoleculeDataset(list(examples)).digest

    def held_out(self, split: str) -> list[Any]:
        pairs = held_out(self.recipe.data, split)
        for smiles, _ in pairs:
            self.read_input(smiles)  # a mistake is reported before training
        return pairs

    def dataset(
        self,
        run: RunDir,
        progress: Callable[[str, int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> MoleculeDataset:
        return MoleculeDataset([pair for c in corpora(self.recipe.data) for pair in read_pairs(c, self.recipe.data)])

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        assert isinstance(dataset, MoleculeDataset)
        where = " and ".join(map(describe, corpora(self.recipe.data)))
        graphs = []
        for number, (smiles, _) in enumerate(dataset.pairs, 1):
            try:
                graphs.append(molecule_graph(smiles))
            except UserError as error:
                raise UserError(f"{where}, molecule {number}: {error}") from error
        labels = self.labels(run, [target for _, target in dataset.pairs], where)
        settings = self.recipe.training
        return GraphBatches(graphs, np.array(labels, np.float32), settings.batch_tokens, settings.seed)

    def describe(self, run: RunDir, dataset: Dataset, static: bool) -> list[str]:
        assert isinstance(dataset, MoleculeDataset)
        budget = self.recipe.training.batch_tokens
        return [f"data: {len(dataset.pairs):,} molecules, in batches of up to {budget:,} atoms and bonds"]

    def describe_batch(self, run: RunDir, batch: Batch) -> list[dict[str, Any]]:
        assert isinstance(batch, GraphBatch)
        sizes = zip(batch.graphs.layout.lengths, batch.labels, strict=True)
        return [{"nodes": size, "numbers": self.prediction(run, label).numbers} for size, label in sizes]

    def batches(self, run: RunDir, inputs: Sequence[Any], labels: Sequence[Any] | None = None) -> Iterator[InputBatch]:
        for begin in range(0, len(inputs), BATCH):
            indices = list(range(begin, min(begin + BATCH, len(inputs))))
            graphs = pack_graphs([molecule_graph(inputs[i]) for i in indices])
            given = [[0.0] * len(run.scales) if labels is None else labels[i] for i in indices]
            yield InputBatch(indices, GraphBatch(graphs, torch.tensor(given)))

    def read_input(self, argument: str) -> str:
        molecule_graph(argument)
        return argument

    def inspect(self, run: RunDir, given: Any) -> GraphInspection:
        """The atoms, named by element and number ("C1", "O3"); bonds are not drawn."""
        (only,) = self.batches(run, [given])
        assert isinstance(only.batch, GraphBatch)
        positions, graph = atom_positions(given), molecule_graph(given)
        atoms = range(len(positions))
        names = [f"{symbol}{number}" for number, symbol in enumerate(graph.nodes[: len(atoms)], 1)]
        ends = graph.edges[::3].tolist()  # the first of a bond's three edges connects its atoms
        bonds = {(one, other): len(atoms) + bond for bond, (one, other) in enumerate(ends)}
        return GraphInspection(only.batch, node_axis(only.batch, names, atoms, positions, inside=True), bonds=bonds)

    def examples(self) -> list[str]:
        return [smiles for smiles, _ in self.held_out("test")[:EXAMPLES]]

    def input_list(self, given: Any) -> tuple[list[Any], bool]:
        return text_list("predict", given), isinstance(given, str)

    def show_input(self, index: int, given: Any) -> str:
        return str(given)
