"""SMILES, the notation of molecules as text: parsed by RDKit (`regard[chemistry]`), and spelt in random ways."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

from regard.errors import UserError


@cache
def rdkit() -> Any:
    """RDKit's module `Chem`; a UserError if it is not installed."""
    try:
        from rdkit import Chem, RDLogger
        from rdkit.Chem import rdDepictor  # noqa: F401  makes it an attribute of Chem
    except ImportError:
        raise UserError("molecules need one more package: pip install 'regard[chemistry]'") from None
    RDLogger.logger().setLevel(RDLogger.CRITICAL)  # mistakes are reported by the caller
    return Chem


def parse_smiles(smiles: str) -> Any:
    """RDKit's molecule; a UserError if the text is not SMILES, has an unknown atom or an impossible valence."""
    molecule = rdkit().MolFromSmiles(smiles.strip())
    if molecule is None or not molecule.GetNumAtoms():
        raise UserError(f"{smiles.strip()[:60]!r} is not a molecule: not SMILES, or with an unknown atom or valence")
    return molecule


def spellings(smiles: str, count: int) -> Iterator[str]:
    """Random SMILES of a molecule, which begin at a random atom and take branches in random order."""
    molecule, random = parse_smiles(smiles), Random(smiles)
    for _ in range(count):
        order = list(range(molecule.GetNumAtoms()))
        random.shuffle(order)
        yield str(rdkit().MolToSmiles(rdkit().RenumberAtoms(molecule, order), canonical=False))
