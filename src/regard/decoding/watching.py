"""Watching a search: a function that sees the beams after every step, and may stop some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.decoding.beam_state import SearchState


@dataclass(frozen=True)
class Beams:
    """The beams after a step, as a watcher sees them."""

    tokens: Tensor  # [N, K, t] tokens of each beam so far
    alive: Tensor  # [N, K] whether a beam can still be extended


Watch = Callable[[list[int], Beams], Tensor | None]  # sentence numbers and beams -> which beams [N, K] to stop, or None


def call_watcher(watch: Watch, state: SearchState, numbers: list[int], rows: list[int] | None = None) -> None:
    """Show the sentences in these rows of the state (None: all), whose numbers are given, and stop what it returns."""
    history = state.tokens if state.history is None else state.history
    chosen = slice(None) if rows is None else torch.tensor(rows, device=history.device)
    tokens = history[chosen][..., : int(state.step.max())].cpu()
    stopped = watch(numbers, Beams(tokens, (state.total[chosen] > -torch.inf).cpu()))
    if stopped is None:
        return
    which = torch.zeros_like(state.total, dtype=torch.bool)
    which[chosen] = stopped.to(which.device)
    state.finish(which, state.length_penalty())
    state.update_done(state.done)
