"""Deletion and insertion curves: how fast the score falls when the most important parts are hidden first.

Deletion starts with the whole input and hides one part after another; insertion starts with nothing and shows one after
another. A good order has a small area under its deletion curve and a large one under its insertion curve, compared with
random orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from regard.decoding.sampling import fold, keys
from regard.interpret.explain.rise import Asker, BlackBox, Masks, Numbers

SHUFFLES = 16
RANDOM = "random order"


@dataclass(frozen=True, eq=False)
class Curve:
    """The overall score with 0, 1, ... n parts hidden, and shown, in one order; both [n + 1]."""

    name: str
    deletion: Numbers
    insertion: Numbers

    @property
    def deletion_area(self) -> float:
        return area(self.deletion)

    @property
    def insertion_area(self) -> float:
        return area(self.insertion)


def area(scores: Sequence[float] | Numbers) -> float:
    """The area under equally spaced scores from 0 to 1, by the trapezoid rule.

    >>> area([4.0, 2.0, 0.0])
    2.0
    """
    y = np.asarray(scores, np.float64)
    return float((y[:-1] + y[1:]).sum() / 2 / (len(y) - 1))


def curves(
    box: BlackBox,
    importance: Mapping[str, Sequence[float] | Numbers],
    *,
    shuffles: int = SHUFFLES,
    seed: int = 0,
    batch: int = 64,
) -> list[Curve]:
    """Compute a curve for each named importance [n], greatest first, and one for the mean of random orders."""
    parts, ask = len(box.parts), Asker(box, batch)
    named = {name: np.argsort(-np.asarray(values, np.float64), kind="stable") for name, values in importance.items()}
    random = np.argsort(keys(fold(seed, parts), range(shuffles), parts), axis=1)
    orders = [*named.values(), *random]
    masks = np.concatenate([_hidden_first(order) for order in orders] + [~_hidden_first(order) for order in orders])
    unique, back = np.unique(masks, axis=0, return_inverse=True)  # all orders share the first and the last mask
    scores = ask(unique)[back.reshape(-1), -1].reshape(2, len(orders), parts + 1)
    result = [Curve(name, *scores[:, i]) for i, name in enumerate(named)]
    if shuffles:
        result.append(Curve(RANDOM, *scores[:, len(named) :].mean(1)))
    return result


def _hidden_first(order: np.ndarray) -> Masks:
    """Masks [n + 1, n] with 0, 1, ... n parts hidden in this order."""
    rank = np.argsort(order)  # the step at which each part is hidden
    return rank[None, :] >= np.arange(len(order) + 1)[:, None]
