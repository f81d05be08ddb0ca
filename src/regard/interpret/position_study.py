"""A study of position vectors: the vectors, their dot products by distance, and four criteria.

The criteria (see the tour's chapter on positions):

unique          no two of `LONG` positions have the same vector (within a thousandth)
same distance   consecutive vectors are equally far apart, in a short sentence and in a long one (within 1 %)
bounded         in a sentence ten times as long the largest value is less than twice as large
deterministic   two random seeds give the same vectors

T positions, D features.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from regard.errors import UserError
from regard.nn import positions

KINDS = ("sinusoidal", "sinusoidal-split", "learned", "index", "fraction")
SHORT, LONG = 20, 200  # positions of the two sentences that are compared
BASE = 10_000.0


@dataclass(frozen=True)
class Criterion:
    """A criterion: whether it holds, the measured value, and what was measured."""

    name: str
    holds: bool
    value: float
    why: str


@dataclass(frozen=True, eq=False)
class PositionStudy:
    """Vectors [T, D]; `dot[k]` is the mean of p_i · p_(i+k) over all i, and `spread[k]` its standard deviation."""

    kind: str
    vectors: np.ndarray
    dot: np.ndarray
    spread: np.ndarray
    criteria: tuple[Criterion, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "array": self.vectors.tolist(),
            "dot": self.dot.tolist(),
            "spread": self.spread.tolist(),
            "criteria": [asdict(criterion) for criterion in self.criteria],
        }


def study(
    kind: str, length: int = 64, width: int = 64, base: float = BASE, table: np.ndarray | None = None
) -> PositionStudy:
    """Study a kind of positions by name, or the learned `table` [positions, D] of a trained model."""
    if kind not in KINDS:
        raise UserError(f"{kind!r} positions add no vectors: choose {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if table is not None:
        vectors = np.asarray(table, np.float32)[:length]
        short, long = vectors[:SHORT], np.asarray(table, np.float32)[:LONG]
    else:
        vectors, short, long = (_vectors(kind, n, width, base) for n in (length, SHORT, LONG))
    dot, spread = _dot_products(vectors)
    seeds = [_vectors(kind, SHORT, width, base, seed) for seed in (0, 1)]
    return PositionStudy(kind, vectors, dot, spread, _criteria(short, long, seeds[0], seeds[1]))


def table(model: nn.Module) -> np.ndarray:
    """The learned position vectors of a model: [positions, D]."""
    learned = next(module for module in model.modules() if isinstance(module, positions.LearnedPositions))
    vectors: np.ndarray = learned.table.detach().float().cpu().numpy()
    return vectors


def _vectors(kind: str, length: int, width: int, base: float, seed: int = 0) -> np.ndarray:
    """Make vectors [length, D]; random ones depend on the seed alone, and the global generator is left unchanged."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = positions.make(kind, width, base=base, longest=max(length, LONG))
        vectors: np.ndarray = module(torch.arange(length), torch.full((length,), length)).numpy()
    return vectors


def _dot_products(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the dot products of all pairs of positions k apart; k = 0 ... T - 1."""
    products = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    diagonals = [np.diagonal(products, k) for k in range(len(vectors))]
    return np.array([d.mean() for d in diagonals]), np.array([d.std() for d in diagonals])


def _criteria(short: np.ndarray, long: np.ndarray, one: np.ndarray, other: np.ndarray) -> tuple[Criterion, ...]:
    distances = torch.cdist(torch.from_numpy(long), torch.from_numpy(long)).fill_diagonal_(torch.inf)
    nearest = float(distances.min())
    steps = np.concatenate([np.linalg.norm(np.diff(sentence, axis=0), axis=1) for sentence in (short, long)])
    variation = float(steps.std(ddof=1) / steps.mean())
    growth = float(np.abs(long).max() / np.abs(short).max())
    difference = float(np.abs(one - other).max())
    return (
        Criterion("unique", nearest > 1e-3, nearest, f"distance of the closest two of {len(long)} positions"),
        Criterion("same distance", variation < 0.01, variation,
                  f"relative spread of the distance between neighbours, over {len(short)} and {len(long)} positions"),
        Criterion("bounded", growth < 2, growth, f"largest value of {len(long)} positions over that of {len(short)}"),
        Criterion("deterministic", difference == 0, difference, "largest difference between two random seeds"),
    )  # fmt: skip
