"""Several models of one vocabulary that decide together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.family import State, Translator
from regard.rows import PairBatch, TokenRow


def agreed(opinions: Sequence[Tensor]) -> Tensor:
    """Logits [..., V] of several models -> the logarithm of the mean of their probabilities, in float32.

    >>> agreed([torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()]).exp()
    tensor([0.7000, 0.3000])
    """
    logp = torch.stack([F.log_softmax(logits, -1, dtype=torch.float32) for logits in opinions])
    return logp.logsumexp(0) - math.log(len(logp))


@dataclass(frozen=True)
class Together:
    """The members' states, which follow the same choices."""

    states: list[State]

    def reorder(self, parents: Tensor) -> Together:
        return Together([state.reorder(parents) for state in self.states])

    def keep(self, sentences: Tensor) -> Together:
        return Together([state.keep(sentences) for state in self.states])


class Ensemble(Translator):
    """Members of any families. A token's probability is the mean of those that the members give it."""

    def __init__(self, members: Sequence[Translator]) -> None:
        super().__init__()
        self.members: Sequence[Translator] = nn.ModuleList(members)  # type: ignore[assignment]

    def forward(self, batch: PairBatch) -> Tensor:
        return agreed([member(batch) for member in self.members])

    def start(self, source: TokenRow) -> Together:
        return Together([member.start(source) for member in self.members])

    def step(self, state: Together, tokens: Tensor) -> tuple[Tensor, Together]:
        taken = [member.step(own, tokens) for member, own in zip(self.members, state.states, strict=True)]
        return agreed([logits for logits, _ in taken]), Together([after for _, after in taken])
