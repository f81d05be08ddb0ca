"""Graphs: files, the built-in graph, node classification, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard import tasks
from regard.data.graphs import Citations, NodeGraph, pack_graphs, read_graph
from regard.errors import UserError
from regard.models.graph import GraphBatch, GraphModel, GraphSettings
from regard.recipes import load
from regard.run_dir import RunDir
from regard.training.setup import train

QUICK = ["training.steps=12", "training.validate_every=6", "training.save_every=6"]


def arrays(**changes: Any) -> dict[str, Any]:
    """A triangle and a lone node."""
    return {
        "edges": np.array([[0, 1], [1, 2], [2, 0]]),
        "features": np.array([[1, 0], [0, 2.5], [1, 1], [0, 0]]),
        "labels": np.array([0, 1, 0, -1]),
        "train": np.array([0, 1]),
        "valid": np.array([2]),
        **changes,
    }


def saved(path: Path, **changes: Any) -> Path:
    np.savez(path, **{name: value for name, value in arrays(**changes).items() if value is not None})
    return path


def test_an_npz_file_is_read_with_dense_and_with_sparse_features(tmp_path: Path) -> None:
    dense = read_graph(saved(tmp_path / "dense.npz"))
    sparse = {"feature_rows": [2, 0, 1, 2], "feature_columns": [1, 0, 1, 0], "feature_values": [1, 1, 2.5, 1]}
    other = read_graph(saved(tmp_path / "sparse.npz", features=None, shape=np.array([4, 2]), **sparse))
    for graph in (dense, other):
        table = np.zeros((4, 2))
        table[graph.feature_rows, graph.feature_columns] = graph.feature_values
        assert np.array_equal(table, arrays()["features"])
        assert (graph.nodes, graph.classes, graph.labels.tolist()) == (tuple("0123"), ("0", "1"), [0, 1, 0, -1])


def test_a_folder_of_tables_is_read(tmp_path: Path) -> None:
    nodes = ["node\tclass\tsplit\tfeatures", "a\tcat\ttrain\tfur claw:2", "b\tfish\tvalid\tfin", "c\t\t\t"]
    (tmp_path / "nodes.tsv").write_text("\n".join(nodes) + "\n")
    (tmp_path / "edges.tsv").write_text("source\ttarget\na\tb\nc\ta\n")
    graph = read_graph(tmp_path)
    assert (graph.nodes, graph.classes, graph.feature_names) == (tuple("abc"), ("cat", "fish"), ("claw", "fin", "fur"))
    assert graph.edges.tolist() == [[0, 1], [2, 0]] and graph.labels.tolist() == [0, 1, -1]
    assert list(zip(graph.feature_rows, graph.feature_columns, graph.feature_values, strict=True)) == [
        (0, 2, 1.0),
        (0, 0, 2.0),
        (1, 1, 1.0),
    ]
    assert {name: nodes.tolist() for name, nodes in graph.splits.items()} == {"train": [0], "valid": [1]}


def test_packed_graphs_have_edges_both_ways_and_to_themselves(tmp_path: Path) -> None:
    graph = read_graph(saved(tmp_path / "graph.npz"))
    packed = pack_graphs([graph, graph])
    expected = {(a, b) for a in range(3) for b in range(3)} | {(3, 3)}
    expected |= {(a + 4, b + 4) for a, b in expected}
    found = list(zip(packed.receivers.tolist(), packed.senders.tolist(), strict=True))
    assert found == sorted(expected) and packed.layout.lengths == (4, 4)
    assert packed.feature_offsets.tolist() == [0, 1, 2, 4, 4, 5, 6, 8]


def test_a_node_is_the_weighted_sum_of_its_features(tmp_path: Path) -> None:
    packed = pack_graphs([read_graph(saved(tmp_path / "graph.npz"))])
    for normalise in (False, True):
        model = GraphModel(GraphSettings(width=4, heads=2, normalise_features=normalise), 2, 3).eval()  # type: ignore[call-arg]
        features = torch.tensor(arrays()["features"], dtype=torch.float32)
        if normalise:
            features = features / features.sum(1, keepdim=True).clamp(min=1e-9)
        torch.testing.assert_close(model._embed(packed), features @ model.features_table)


@pytest.mark.parametrize("pooling", ["mean", "sum", "mean-sum"])
def test_a_graph_is_pooled_by_mean_sum_or_both(pooling: str) -> None:
    settings = GraphSettings.model_validate({"family": "graph", "block": "transformer", "pooling": pooling})
    model = GraphModel(settings, 2, 1).double().eval()
    alone = NodeGraph(("a",), np.zeros((0, 2), np.int64), np.array([0]), np.array([1]), np.ones(1, np.float32))
    path = NodeGraph(
        tuple("abc"), np.array([[0, 1], [1, 2]]), np.array([0, 2]), np.array([0, 1]), np.ones(2, np.float32)
    )
    graphs = pack_graphs([alone, path])
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter)
    nodes = model.encode(graphs)
    sums = torch.stack([nodes[:1].sum(0), nodes[1:].sum(0)])
    means = sums / torch.tensor([[1.0], [3.0]])
    pooled = {"mean": means, "sum": sums, "mean-sum": torch.cat([means, sums / 10], 1)}[pooling]
    expected = model.head(pooled)
    torch.testing.assert_close(model.logits(GraphBatch(graphs, torch.zeros(2, 1))), expected)


def test_a_node_sees_as_many_edges_far_as_there_are_layers() -> None:
    """In a chain 0 - 1 - 2 - 3 - 4, the output of node 0 depends on nodes 0 to 2 after two layers."""
    count = 5
    chain = NodeGraph(
        tuple(map(str, range(count))),
        np.array([[n, n + 1] for n in range(count - 1)]),
        np.arange(count),
        np.arange(count),
        np.ones(count, np.float32),
    )
    torch.manual_seed(0)
    for block in ("gat", "transformer"):
        model = GraphModel(GraphSettings(width=8, heads=2, layers=2, block=block), count, 3).eval()  # type: ignore[call-arg]
        for parameter in model.parameters():  # weights that start as zeros would hide what the output depends on
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        batch = GraphBatch(pack_graphs([chain]), torch.zeros(1, dtype=torch.long), torch.tensor([0]))
        (grad,) = torch.autograd.grad(model.logits(batch).square().sum(), model.features_table)
        assert (grad.abs().sum(1) > 0).tolist() == [True, True, True, False, False]


MISTAKES = {
    "edges to missing nodes": ({"edges": np.array([[0, 9]])}, "edges names 9, but there are 4 nodes"),
    "negative nodes": ({"edges": np.array([[0, -1]])}, "edges names -1"),
    "edges of three": ({"edges": np.zeros((2, 3), int)}, "pairs of node numbers"),
    "edges of fractions": ({"edges": np.array([[0.5, 1]])}, "pairs of node numbers"),
    "NaN features": ({"features": np.full((4, 2), np.nan)}, "not a finite number"),
    "infinite features": ({"features": np.full((4, 2), np.inf)}, "not a finite number"),
    "features of text": ({"features": np.array([["a"] * 2] * 4)}, "features are a table"),
    "no nodes": (
        {"features": np.zeros((0, 2)), "labels": np.zeros(0, int), "edges": np.zeros((0, 2), int)},
        "no nodes",
    ),
    "too few labels": ({"labels": np.array([0, 1])}, "one class number for each of the 4 nodes"),
    "no labels": ({"labels": None}, "has no labels"),
    "no features": ({"features": None}, "has no features"),
    "a split of missing nodes": ({"train": np.array([7])}, "train names 7"),
    "a split without classes": ({"train": np.array([3])}, "split train has no class"),
    "a node in two splits": ({"valid": np.array([0])}, "node 0 is in two splits, train and valid"),
    "a single class": ({"labels": np.zeros(4, int)}, "have one class"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_file_gets_one_line(name: str, tmp_path: Path) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises(UserError, match=message) as raised:
        read_graph(saved(tmp_path / "graph.npz", **changes))
    assert "\n" not in str(raised.value) and "graph.npz" in str(raised.value)


def test_mistakes_in_tables_name_the_line(tmp_path: Path) -> None:
    head, edges = "node\tclass\tsplit\tfeatures\n", "source\ttarget\n"
    for nodes, links, message in [
        (head + "a\tx\ttrain\t\n", edges + "a\tb\n", r"edges.tsv, line 2: there is no node 'b'"),
        (head + "a\tx\ttrain\tw:many\n", edges, r"nodes.tsv, line 2: 'w:many' is not a feature"),
        (head + "a\tx\tdev\t\n", edges, r"line 2: split 'dev' must be"),
        (head + "a\tx\ttrain\t\na\tx\ttrain\t\n", edges, "'a' occurs twice"),
        (head + "a\tx\n", edges, "line 2: 2 columns"),
        ("node\tclass\n", edges, "split is missing"),
        (head, edges, "no nodes"),
        (head + "a\tx\ttrain\tw:nan\n", edges, "not a finite number"),
    ]:
        (tmp_path / "nodes.tsv").write_text(nodes)
        (tmp_path / "edges.tsv").write_text(links)
        with pytest.raises(UserError, match=message):
            read_graph(tmp_path)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no graph")
    with pytest.raises(UserError, match=r"text\.npz: not an \.npz file of a graph: not a NumPy file of numbers$"):
        read_graph(tmp_path / "text.npz")
    with pytest.raises(UserError, match="no such file"):
        tasks.of(load("citations", [f"data.graph={tmp_path / 'gone.npz'}"])).check_files(resumed=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(load("citations", QUICK), tmp_path_factory.mktemp("graph") / "run", device="cpu", quiet=True)


def call(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> str:
    from regard.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    assert (left.value.code or 0) == status, printed.err
    return printed.out if status == 0 else printed.err


def test_nodes_are_predicted_by_name(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    graph = Citations.graph()
    out = call(capsys, "predict", run.path, "paper-3", "paper-599", "--device", "cpu").splitlines()
    assert len(out) == 2 and set(out) <= set(graph.classes)
    entry = json.loads(call(capsys, "evaluate", run.path, "--json", "--device", "cpu"))
    assert entry["examples"] == 150 and entry["accuracy"] > 40  # five topics, and 12 steps of training
    message = call(capsys, "predict", run.path, "paper-600", status=2)
    assert "there is no node 'paper-600'" in message and len(message.splitlines()) == 1


def test_a_graph_with_other_features_is_refused(run: RunDir, tmp_path: Path) -> None:
    file = saved(tmp_path / "graph.npz")
    task = tasks.of(run.recipe.model_copy(update={"data": load("citations", [f"data.graph={file}"]).data}))
    with pytest.raises(UserError, match="features of the graph are not those"):
        list(task.batches(run, [0]))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_topics_are_learnt_and_edges_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the edges, nearly all papers are classified; by their words alone, far fewer."""
    whole = train(load("citations"), tmp_path / "whole", device="cpu", quiet=True)
    graph = Citations.graph()
    names = {"node_names": graph.nodes, "feature_names": graph.feature_names, "class_names": graph.classes}
    saved(
        tmp_path / "alone.npz",
        edges=np.zeros((0, 2), int),
        features=None,
        feature_rows=graph.feature_rows,
        feature_columns=graph.feature_columns,
        shape=np.array([len(graph.nodes), len(graph.feature_names)]),
        labels=graph.labels,
        **graph.splits,
        **names,
    )
    alone = train(load("citations", [f"data.graph={tmp_path / 'alone.npz'}"]), tmp_path / "a", device="cpu", quiet=True)
    accuracy = [json.loads(call(capsys, "evaluate", r.path, "--json"))["accuracy"] for r in (whole, alone)]
    assert accuracy[0] >= 95 and accuracy[1] <= accuracy[0] - 15


# Pictures


def test_a_graph_is_drawn_as_text_and_as_a_file(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "draw", run.path, "paper-3", "--device", "cpu")
    assert out.startswith("paper-3: ") and "paper-3 to paper-3" in out
    call(capsys, "draw", run.path, "paper-3", "--out", tmp_path / "graph.svg", "--layer", 1, "--head", 2)
    svg = (tmp_path / "graph.svg").read_text()
    assert "paper-3 attends to itself" in svg and "layer 1 of 2, head 2" in svg
    call(capsys, "draw", run.path, "paper-3", "--out", tmp_path / "graph.json")
    numbers = json.loads((tmp_path / "graph.json").read_text())
    row = numbers["weights"][numbers["queries"].index("paper-3")]
    assert sum(row) == pytest.approx(1, abs=1e-4)
    for words, message in [
        (["--layer", 3], "this model has 2 encoder layers"),
        (["--head", 9], "this model has 1 head"),
        (["--at", "paper-9999"], "there is no such element"),
        (["--view", "walk"], "is a graph model without walk"),
    ]:
        assert message in call(capsys, "draw", run.path, "paper-3", *words, status=2)
