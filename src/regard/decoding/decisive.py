"""Results of a search that depend on rounding, for tests and benchmarks that compare two ways to compute them.

Where scores are nearly equal, runs that round differently may decide differently. Such sentences are found by searching
again with disturbed logits, once with a disturbance and once with its opposite: one of both reverses the order of two
candidates whose scores differ by less than the disturbance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.decoding.results import Hypothesis
from regard.decoding.search import SearchRequest, Stepper, search

DISTURBANCE = 1e-4  # of logits in float32: several times what they are rounded by


class Disturbed:
    """A model with noise in its logits, in [-size, size]; with `-size` it is the opposite noise."""

    def __init__(self, model: Stepper, size: float) -> None:
        self.model, self.size = model, size
        self.random = torch.Generator().manual_seed(1)

    def start(self, source: Any) -> Any:
        return self.model.start(source)

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        logits, state = self.model.step(state, tokens)
        noise = 2 * torch.rand(logits.shape[-1], generator=self.random) - 1
        return logits + self.size * noise.to(logits), state


def decisive(
    model: Stepper, request: SearchRequest, results: Sequence[Sequence[Hypothesis]], size: float = DISTURBANCE
) -> list[bool]:
    """Whether each sentence keeps its results, those of an eager search, when logits are disturbed by up to `size`."""
    stays = [True] * len(results)
    for sign in (1, -1):
        found = search(Disturbed(model, sign * size), request)
        for n, (ours, theirs) in enumerate(zip(found, results, strict=True)):
            stays[n] &= [(h.tokens, h.finished) for h in ours] == [(h.tokens, h.finished) for h in theirs]
    return stays
