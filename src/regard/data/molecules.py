"""Molecules as graphs, from SMILES.

Atoms are nodes, and so are bonds: a bond is connected with its two atoms, and these with each other. So the kind of a
bond is a feature of a node like any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from regard.data.graphs import NodeGraph
from regard.data.smiles import parse_smiles, rdkit
from regard.registry import CORPORA

SYMBOLS = """
    H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y
    Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re
    Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg
    Cn Nh Fl Mc Lv Ts Og
"""  # symbols of the elements
BONDS = ("single", "double", "triple", "aromatic", "other")
MAX_COUNT = 6  # maximum number of neighbours or hydrogens; larger ones count as this
FEATURES = (
    *(f"atom {symbol}" for symbol in SYMBOLS.split()),
    *(f"{count} neighbours" for count in range(MAX_COUNT + 1)),
    *(f"{count} hydrogens" for count in range(MAX_COUNT + 1)),
    *("positive", "negative", "aromatic atom", "ring atom"),
    *(f"{kind} bond" for kind in BONDS),
    *("conjugated bond", "ring bond"),
)


@CORPORA.register("molecules")
class Molecules:
    """The built-in corpus `molecules`, as graphs; `smiles` are the same as texts (`data.builtin.molecules`)."""

    kind = "molecules"


NUMBER = {name: number for number, name in enumerate(FEATURES)}


def molecule_graph(smiles: str) -> NodeGraph:
    """The graph of a molecule: its atoms (hydrogens are counted, not nodes), then its bonds."""
    molecule = parse_smiles(smiles)
    atoms, bonds = list(molecule.GetAtoms()), list(molecule.GetBonds())
    bags = [_atom_features(atom) for atom in atoms] + [_bond_features(bond) for bond in bonds]
    names = [atom.GetSymbol() for atom in atoms] + [_bond_kind(bond) for bond in bonds]
    edges = []
    for number, bond in enumerate(bonds, len(atoms)):
        one, other = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        edges += [(one, other), (one, number), (other, number)]
    columns = [NUMBER[name] for bag in bags for name in bag]
    return NodeGraph(
        tuple(names),
        np.array(edges, np.int64).reshape(-1, 2),
        np.repeat(np.arange(len(bags)), [len(bag) for bag in bags]),
        np.array(columns, np.int64),
        np.ones(len(columns), np.float32),
        FEATURES,
    )


def _atom_features(atom: Any) -> list[str]:
    charge = atom.GetFormalCharge()
    flags = {"positive": charge > 0, "negative": charge < 0}
    flags |= {"aromatic atom": atom.GetIsAromatic(), "ring atom": atom.IsInRing()}
    return [
        f"atom {atom.GetSymbol()}",
        f"{min(atom.GetDegree(), MAX_COUNT)} neighbours",
        f"{min(atom.GetTotalNumHs(), MAX_COUNT)} hydrogens",
        *(name for name, holds in flags.items() if holds),
    ]


def _bond_kind(bond: Any) -> str:
    kind = str(bond.GetBondType()).lower()
    return kind if kind in BONDS else "other"


def _bond_features(bond: Any) -> list[str]:
    flags = {"conjugated bond": bond.GetIsConjugated(), "ring bond": bond.IsInRing()}
    return [f"{_bond_kind(bond)} bond", *(name for name, holds in flags.items() if holds)]


def atom_positions(smiles: str) -> npt.NDArray[np.float64]:
    """Positions of the atoms in a structural formula: [atoms, 2], from 0 to 1."""
    molecule = parse_smiles(smiles)
    rdkit().rdDepictor.Compute2DCoords(molecule)
    points = np.array(molecule.GetConformer().GetPositions())[:, :2] * [1, -1]
    centred = points - (points.max(0) + points.min(0)) / 2
    return np.asarray(0.5 + centred / max(np.ptp(centred, axis=0).max(), 3.0))
