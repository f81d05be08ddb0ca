"""Position vectors, studied: the vectors themselves, how alike two places are, and what can be asked of them.

Four things can be asked, and computed (see the tour's chapter on positions):

unique          no two of `LONG` places are alike (closer than a thousandth)
same distance   a step is equally long anywhere, in a short sentence and in a long one (within 1 %)
bounded         in a sentence ten times as long the largest number is not twice as large
deterministic   two random seeds give the same vectors

T places, D features.
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
SHORT, LONG = 20, 200  # places of the two sentences that are compared
BASE = 10_000.0


@dataclass(frozen=True)
class Criterion:
    """One thing asked of position vectors: whether it holds, the number that says so, and what that number is."""

    name: str
    holds: bool
    value: float
    why: str


@dataclass(frozen=True, eq=False)
class PositionStudy:
    """The vectors [T, D] of one kind; `dot[k]` is the mean of p_i · p_(i+k) over all i, `spread[k]` its deviation."""

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
    """A kind of positions by name, or, of a trained model, its `table` [places, D]."""
    if kind not in KINDS:
        raise UserError(f"{kind!r} adds no vector to look at: choose {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if table is not None:
        vectors = np.asarray(table, np.float32)[:length]
        short, long = vectors[:SHORT], np.asarray(table, np.float32)[:LONG]
    else:
        vectors, short, long = (_vectors(kind, n, width, base) for n in (length, SHORT, LONG))
    dot, spread = _products(vectors)
    seeds = [_vectors(kind, SHORT, width, base, seed) for seed in (0, 1)]
    return PositionStudy(kind, vectors, dot, spread, _criteria(short, long, seeds[0], seeds[1]))


def table(model: nn.Module) -> np.ndarray:
    """The vectors that a model with learned positions has learned: [places, D]."""
    learned = next(module for module in model.modules() if isinstance(module, positions.LearnedPositions))
    found: np.ndarray = learned.table.detach().float().cpu().numpy()
    return found


def _vectors(kind: str, length: int, width: int, base: float, seed: int = 0) -> np.ndarray:
    """[length, D]; what is drawn at random depends on the seed alone and leaves the world's generator as it was."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        made = positions.make(kind, width, base=base, longest=max(length, LONG))
        found: np.ndarray = made(torch.arange(length), torch.full((length,), length)).numpy()
    return found


def _products(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation, over all pairs of places k apart, of their dot product; k = 0 ... T - 1."""
    alike = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    diagonals = [np.diagonal(alike, k) for k in range(len(vectors))]
    return np.array([d.mean() for d in diagonals]), np.array([d.std() for d in diagonals])


def _criteria(short: np.ndarray, long: np.ndarray, one: np.ndarray, other: np.ndarray) -> tuple[Criterion, ...]:
    apart = torch.cdist(torch.from_numpy(long), torch.from_numpy(long)).fill_diagonal_(torch.inf)
    nearest = float(apart.min())
    steps = np.concatenate([np.linalg.norm(np.diff(sentence, axis=0), axis=1) for sentence in (short, long)])
    uneven = float(steps.std(ddof=1) / steps.mean())
    growth = float(np.abs(long).max() / np.abs(short).max())
    differs = float(np.abs(one - other).max())
    return (
        Criterion("unique", nearest > 1e-3, nearest, f"distance of the closest two of {len(long)} places"),
        Criterion("same distance", uneven < 0.01, uneven,
                  f"spread of a step's length, relative to its mean, over {len(short)} and {len(long)} places"),
        Criterion("bounded", growth < 2, growth, f"largest number of {len(long)} places over that of {len(short)}"),
        Criterion("deterministic", differs == 0, differs, "greatest difference between two random seeds"),
    )  # fmt: skip
