"""Deletion and insertion curves: how fast the score falls when the most important parts are hidden first.

Deletion starts with the whole input and hides one part after another; insertion starts with nothing and shows one after
another. A good order has a small area under its deletion curve and a large one under its insertion curve, compared with
random orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.decoding.sampling import fold, keys
from regard.interpret.explain.rise import BlackBox, MaskScorer, Numbers

SHUFFLES = 16
MAX_STEPS = 64  # points of a curve
RANDOM = "random order"


@dataclass(frozen=True, eq=False)
class Curve:
    """The overall score as the parts of the input are hidden, and shown, in one order; three arrays [steps + 1]."""

    name: str
    counts: NDArray[np.integer]  # how many parts are hidden, or shown: 0, 1, ... n, or fewer of these numbers
    deletion: Numbers
    insertion: Numbers

    @property
    def deletion_area(self) -> float:
        return area(self.counts, self.deletion)

    @property
    def insertion_area(self) -> float:
        return area(self.counts, self.insertion)


def area(x: Sequence[float] | NDArray[Any], y: Sequence[float] | Numbers) -> float:
    """The area under y at increasing x, which are scaled to the interval from 0 to 1; by the trapezoid rule.

    >>> area([0, 1, 3], [4.0, 1.0, 0.0])
    1.1666666666666667
    """
    return float(np.trapezoid(y, x) / (x[-1] - x[0]))


def curves(
    box: BlackBox,
    importance: Mapping[str, Sequence[float] | Numbers],
    *,
    insertion: BlackBox | None = None,
    steps: int = MAX_STEPS,
    shuffles: int = SHUFFLES,
    seed: int = 0,
    batch: int = 64,
) -> list[Curve]:
    """Compute a curve for each named importance [n], greatest first, and one for the mean of random orders.

    Parts are hidden one by one, or, if there are more than `steps`, in `steps` steps. Insertion may start from another
    box, such as a blurred image.
    """
    parts = len(box.parts)
    counts = np.unique(np.rint(np.linspace(0, parts, min(steps, parts) + 1)).astype(int))
    scorers = MaskScorer(box, batch), MaskScorer(insertion or box, batch)
    ends = [[scorer(np.full((1, parts), kept))[0, -1] for kept in (True, False)] for scorer in scorers]

    def curve(order: np.ndarray) -> tuple[Numbers, Numbers]:
        """Both curves of an order; masks of one order are in memory at a time."""
        hidden = _hidden_first(order, counts[1:-1])
        deletion, shown = (scorers[0](hidden)[:, -1], scorers[1](~hidden)[:, -1]) if len(hidden) else ((), ())
        (whole, nothing), (everything, empty) = ends
        return np.array([whole, *deletion, nothing]), np.array([empty, *shown, everything])

    named = {name: np.argsort(-np.asarray(values, np.float64), kind="stable") for name, values in importance.items()}
    result = [Curve(name, counts, *curve(order)) for name, order in named.items()]
    if shuffles:
        random = np.argsort(keys(fold(seed, parts), range(shuffles), parts), axis=1)
        means = np.mean([curve(order) for order in random], axis=0)
        result.append(Curve(RANDOM, counts, *means))
    return result


def _hidden_first(order: np.ndarray, counts: np.ndarray) -> NDArray[np.bool_]:
    """Masks [C, n] with these numbers of parts hidden, in this order."""
    rank = np.argsort(order)  # the step at which each part is hidden
    return rank[None, :] >= counts[:, None]
