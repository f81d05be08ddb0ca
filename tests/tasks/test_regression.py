"""Regression on texts and on molecules: numbers, splits, scales, molecules as graphs, refusals."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.data.builtin import pairs
from regard.data.corpora import held_out, read_pairs
from regard.data.labelled import parse_numbers
from regard.errors import UserError
from regard.metrics.numbers import NumberScores
from regard.nn.losses import squared_error
from regard.recipes import load
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.training.setup import train

QUICK = ["training.steps=6", "training.validate_every=3", "training.save_every=3", "training.warmup=2"]
SMALL = ["model.width=16", "model.heads=2", "model.layers=1", "model.ffn_width=16"]


def needs_rdkit() -> None:
    if not os.environ.get("CI"):
        pytest.importorskip("rdkit", reason="molecules need regard[chemistry]")


def rows(count: int, scale: float = 1.0, shift: float = 0.0) -> list[tuple[str, str]]:
    return [(pair.source, repr(float(pair.target) * scale + shift)) for pair in pairs("smiles", "train", count)]


def table(path: Path, examples: list[tuple[str, str]]) -> Path:
    path.write_text("".join(f"{text}\t{number}\n" for text, number in [("smiles", "value"), *examples]))
    return path


def from_file(path: Path, name: str = "molecules-text", *changes: str) -> Recipe:
    key = "pairs" if name == "molecules-text" else "molecules"
    files = [f"data.{key}={path}", 'data.columns=["smiles", "value"]', "data.held_out=0.1"]
    return load(name, [*files, *QUICK, *SMALL, *changes])


def test_scores_are_those_of_the_formulas() -> None:
    random = np.random.default_rng(0)
    predicted, right = random.normal(size=50), random.normal(size=50)
    scores = NumberScores.of(predicted.tolist(), right.tolist())
    errors = predicted - right
    assert scores.rmse == pytest.approx(np.sqrt((errors**2).mean())) and scores.mae == pytest.approx(abs(errors).mean())
    assert scores.r2 == pytest.approx(1 - (errors**2).sum() / ((right - right.mean()) ** 2).sum())


def test_the_loss_is_the_squared_error_of_the_examples_that_count() -> None:
    numbers, labels = torch.tensor([[1.0, 2.0], [0.0, 0.0], [5.0, 5.0]]), torch.tensor([[1.0, 4.0], [3.0, 1.0], [0, 0]])
    assert squared_error(numbers, labels, torch.tensor([True, True, False])).item() == (0 + 4) / 2 + (9 + 1) / 2


@pytest.mark.parametrize("text", ["", "many", "nan", "1 inf", "1,5"])
def test_what_is_no_number_gets_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"x\.tsv: .* is not a finite number"):
        parse_numbers(text, "x.tsv")
    with pytest.raises(UserError, match="has 1 numbers, and others have 2"):
        parse_numbers("1", "x.tsv", 2)


def test_a_random_part_is_held_out_twice(tmp_path: Path) -> None:
    examples = rows(50)
    splits = []
    for seed in (0, 0, 1):
        data = from_file(table(tmp_path / "all.tsv", examples), "molecules-text", f"data.split_seed={seed}").data
        parts = [list(read_pairs(data, data)), held_out(data, "valid"), held_out(data, "test")]
        assert [len(part) for part in parts] == [40, 5, 5] and sorted(
            pair for part in parts for pair in part
        ) == sorted(examples)
        splits.append(parts)
    assert splits[0] == splits[1] and splits[0][1] != splits[2][1]
    with pytest.raises(UserError, match=r"below 0\.5"):
        from_file(tmp_path / "all.tsv", "molecules-text", "data.held_out=0.5")
    with pytest.raises(UserError, match=r"0\.1 of 3 pairs is less than one"):
        held_out(from_file(table(tmp_path / "few.tsv", examples[:3])).data, "valid")


def call(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> str:
    from regard.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    assert (left.value.code or 0) == status, printed.err
    return printed.out if status == 0 else printed.err


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("text")
    return train(from_file(table(folder / "all.tsv", rows(60))), folder / "run", device="cpu", quiet=True)


def test_errors_are_those_of_the_predictions(text_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    examples = held_out(text_run.recipe.data, "test")
    found = regard.load(text_run.path, device="cpu").predict([text for text, _ in examples])
    expected = NumberScores.of([p.numbers[0] for p in found], [float(number) for _, number in examples])
    entry = json.loads(call(capsys, "evaluate", text_run.path, "--json", "--device", "cpu"))
    assert entry["examples"] == 6 and entry["numbers"][0]["rmse"] == pytest.approx(expected.rmse, rel=1e-5)
    out = call(capsys, "predict", text_run.path, examples[0][0], "", "CCO", "--device", "cpu").splitlines()
    assert float(out[0]) == pytest.approx(found[0].numbers[0], rel=1e-4) and out[1] == ""
    entry = json.loads(call(capsys, "predict", text_run.path, "CCO", "--format", "jsonl", "--device", "cpu"))
    assert entry["input"] == "CCO" and entry["numbers"] == [pytest.approx(float(out[2]), rel=1e-4)]
    metrics = [json.loads(line) for line in (text_run.path / "metrics.jsonl").read_text().splitlines()]
    assert all({"rmse", "mae", "r2"} <= line.keys() for line in metrics if line["kind"] == "valid")


def test_units_do_not_matter(text_run: RunDir, tmp_path: Path) -> None:
    """Numbers are standardised: in other units, the same model is trained, and it predicts in these units."""
    other = train(from_file(table(tmp_path / "all.tsv", rows(60, 1000, 5))), tmp_path / "run", device="cpu", quiet=True)
    texts = ["CCO", "CCCCCl"]
    one, two = (regard.load(run.path, device="cpu").predict(texts) for run in (text_run, other))
    for a, b in zip(one, two, strict=True):
        assert b.numbers[0] == pytest.approx(1000 * a.numbers[0] + 5, rel=1e-3)


def test_several_numbers_are_predicted_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    double = [(text, f"{number} {-float(number)}") for text, number in rows(60)]
    run = train(from_file(table(tmp_path / "all.tsv", double)), tmp_path / "run", device="cpu", quiet=True)
    assert len(run.scales) == 2 and run.scales[0][0] == pytest.approx(-run.scales[1][0])
    assert len(call(capsys, "predict", run.path, "CCO", "--device", "cpu").split("\t")) == 2
    assert "number 2" in call(capsys, "evaluate", run.path, "--device", "cpu")


def test_mistakes_in_the_data_are_reported_before_training(tmp_path: Path) -> None:
    for examples, message in [
        ([*rows(20), ("CCO", "high")], "'high' is not a finite number"),
        ([(text, "1.5") for text, _ in rows(20)], "all numbers of the training data are equal"),
        ([*rows(20), ("CCO", "1 2")], "has 2 numbers, and others have 1"),
    ]:
        file = table(tmp_path / "all.tsv", examples)
        with pytest.raises(UserError, match=message):
            train(from_file(file, "molecules-text", "data.held_out=0.05"), tmp_path / "run", device="cpu", quiet=True)


# Molecules


def test_ethanol_as_a_graph() -> None:
    needs_rdkit()
    from regard.data.molecules import FEATURES, molecule_graph

    graph = molecule_graph("CCO")
    assert graph.nodes == ("C", "C", "O", "single", "single")
    assert sorted(map(tuple, graph.edges.tolist())) == [(0, 1), (0, 3), (1, 2), (1, 3), (1, 4), (2, 4)]
    bags = [{FEATURES[i] for i in graph.feature_columns[graph.feature_rows == node]} for node in range(5)]
    assert bags[0] == {"atom C", "1 neighbours", "3 hydrogens"} and bags[2] == {"atom O", "1 neighbours", "1 hydrogens"}
    assert bags[3] == {"single bond"}


def test_rings_charges_and_kinds_of_bonds_are_features() -> None:
    needs_rdkit()
    from regard.data.molecules import FEATURES, molecule_graph

    graph = molecule_graph("[NH4+].[O-]C(=O)c1ccccc1")
    names = [FEATURES[i] for i in graph.feature_columns]
    counts = {name: names.count(name) for name in ("positive", "negative", "aromatic atom", "ring bond", "double bond")}
    assert counts == {"positive": 1, "negative": 1, "aromatic atom": 6, "ring bond": 6, "double bond": 1}


def test_elements_are_those_of_the_periodic_table() -> None:
    needs_rdkit()
    from rdkit import Chem

    from regard.data.molecules import SYMBOLS

    periodic = Chem.GetPeriodicTable()
    assert SYMBOLS.split() == [periodic.GetElementSymbol(number) for number in range(1, 119)]


@pytest.mark.parametrize("smiles", ["[Xx]", "", "   ", "C1CC", "C(C", "F(F)F", "not a molecule"])
def test_what_is_no_molecule_gets_one_line(smiles: str) -> None:
    needs_rdkit()
    from regard.data.molecules import molecule_graph

    with pytest.raises(UserError, match="is not a molecule"):
        molecule_graph(smiles)


def test_spellings_are_of_the_same_molecule() -> None:
    needs_rdkit()
    from rdkit import Chem

    from regard.data.smiles import spellings

    smiles = "CC(=O)Oc1ccccc1C(=O)O"
    found = list(spellings(smiles, 20))
    assert len(set(found)) > 5 and found == list(spellings(smiles, 20))
    assert {Chem.CanonSmiles(text) for text in found} == {Chem.CanonSmiles(smiles)}


def test_spellings_are_trained_on_and_not_held_out(tmp_path: Path) -> None:
    needs_rdkit()
    data = from_file(table(tmp_path / "all.tsv", rows(20)), "molecules-text", "data.spellings=3").data
    assert len(list(read_pairs(data, data))) == 16 * 4 and len(held_out(data, "valid")) == 2


def test_the_built_in_molecules_are_valid_and_their_numbers_follow_from_their_groups() -> None:
    needs_rdkit()
    from rdkit import Chem

    def count(molecule: Any, pattern: str) -> int:
        return len(molecule.GetSubstructMatches(Chem.MolFromSmarts(pattern)))

    for pair in islice(pairs("molecules", "valid"), 200):
        molecule = Chem.MolFromSmiles(pair.source)
        assert molecule is not None, pair.source
        value = -0.5 * count(molecule, "[C]") - 2.0 * count(molecule, "c1ccccc1") - 0.9 * count(molecule, "Cl")
        value += 1.2 * count(molecule, "[OX2H]") + 0.3 * count(molecule, "[OX2H0]") + 0.7 * count(molecule, "[NH2]")
        value += 0.8 * count(molecule, "[OX1]")
        assert float(pair.target) == pytest.approx(value, abs=2e-3), pair.source


def test_molecules_are_trained_on_and_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs_rdkit()
    file = table(tmp_path / "all.tsv", rows(60))
    run = train(from_file(file, "molecules"), tmp_path / "run", device="cpu", quiet=True)
    one = float(call(capsys, "predict", run.path, "CCO", "--device", "cpu"))
    assert one == pytest.approx(float(call(capsys, "predict", run.path, "OCC", "--device", "cpu")), rel=1e-4)
    drawn = call(capsys, "draw", run.path, "CCO", "--hide", "C2:O3", "--device", "cpu")
    assert "nothing hidden" in drawn and "O3 to O3" in drawn and "C2 to O3" not in drawn
    call(capsys, "draw", run.path, "CCO", "--out", tmp_path / "ethanol.svg", "--device", "cpu")
    assert "C2 attends to O3" in (tmp_path / "ethanol.svg").read_text()
    message = call(capsys, "predict", run.path, "CC[Zz]", "--device", "cpu", status=2)
    assert "is not a molecule" in message and len(message.splitlines()) == 1
    broken = table(tmp_path / "broken.tsv", [("C1CC", "0.5"), *rows(60)])
    with pytest.raises(UserError, match="'C1CC' is not a molecule"):
        train(from_file(broken, "molecules"), tmp_path / "broken", device="cpu", quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), [("molecules", 0.15), ("molecules-text", 0.4)])
def test_the_property_is_learnt_in_a_minute(name: str, limit: float, tmp_path: Path) -> None:
    """The deviation of the numbers is 1.5; what is left follows from rules, so that the error can approach zero."""
    needs_rdkit()
    run = train(load(name), tmp_path / "run", device="cpu", quiet=True)
    examples = held_out(run.recipe.data, "test")
    found = regard.load(run.path, device="cpu").predict([text for text, _ in examples])
    scores = NumberScores.of([p.numbers[0] for p in found], [float(number) for _, number in examples])
    assert scores.rmse < limit
