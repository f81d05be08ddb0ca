"""Several models of one vocabulary that decide together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.models.family import State, Translator
from regard.rows import PairBatch, TokenRow


def agreed(opinions: Iterable[Tensor]) -> Tensor:
    """Logits [..., V] of several models, one after the other -> logits of the mean of their probabilities, in float32.

    Logits say no more than probabilities but for their level, which a penalty on them goes by. It is the members' mean
    level: log(mean p) + mean(log sum exp logits). So one model twice is that model.

    >>> agreed([torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()]).exp()
    tensor([0.7000, 0.3000])
    """
    total: Tensor | None = None
    level: Tensor | float = 0.0
    count = 0
    for logits in opinions:
        least = logits.float().logsumexp(-1, keepdim=True)
        logp = logits.float() - least
        total, level, count = logp if total is None else torch.logaddexp(total, logp), level + least, count + 1
    assert total is not None
    return total + (level / count - math.log(count))


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
        return agreed(member(batch) for member in self.members)

    def start(self, source: TokenRow) -> Together:
        return Together([member.start(source) for member in self.members])

    def step(self, state: Together, tokens: Tensor) -> tuple[Tensor, Together]:
        after: list[State] = []

        def opinions() -> Iterator[Tensor]:
            for member, own in zip(self.members, state.states, strict=True):
                logits, then = member.step(own, tokens)
                after.append(then)
                yield logits

        return agreed(opinions()), Together(after)
