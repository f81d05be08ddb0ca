"""Several models of one vocabulary that decide together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.base import SequenceModel
from regard.models.decoder_state import StaticShape
from regard.packed import PackedTokens, SeqBatch


def mean_logprobs(opinions: Iterable[Tensor]) -> Tensor:
    """Logits [..., V] of several models, one after the other -> logits of the mean of their probabilities, in float32.

    Logits say no more than probabilities but for their level, which a penalty on them goes by. It is the members' mean
    level: log(mean p) + mean(log sum exp logits). So one model twice is that model.

    >>> mean_logprobs([torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()]).exp()
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
class EnsembleState:
    """The members' states, which follow the same choices."""

    states: list[Any]

    def reorder(self, parents: Tensor) -> EnsembleState:
        return EnsembleState([state.reorder(parents) for state in self.states])

    def keep(self, sentences: Tensor) -> EnsembleState:
        return EnsembleState([state.keep(sentences) for state in self.states])

    def grown(self, capacity: int) -> EnsembleState:
        return EnsembleState([state.grown(capacity) for state in self.states])

    def tensors(self) -> Iterator[Tensor]:
        for state in self.states:
            yield from state.tensors()


class Ensemble(SequenceModel):
    """Members of any families. A token's probability is the mean of those that the members give it."""

    def __init__(self, members: Sequence[SequenceModel]) -> None:
        super().__init__()
        self.members: Sequence[SequenceModel] = nn.ModuleList(members)  # type: ignore[assignment]
        kinds = {member.is_decoder_only for member in members}  # which count positions alike
        self.has_static_state = len(kinds) == 1 and all(member.has_static_state for member in members)
        self.is_decoder_only = any(kinds)
        self.can_restart = all(member.can_restart for member in members)

    def logits(self, batch: SeqBatch) -> Tensor:
        return mean_logprobs(member.logits(batch) for member in self.members)

    def start(self, source: PackedTokens) -> EnsembleState:
        return EnsembleState([member.start(source) for member in self.members])

    def static_state(self, state: EnsembleState, shape: StaticShape) -> EnsembleState:
        pairs = zip(self.members, state.states, strict=True)
        return EnsembleState([member.static_state(own, shape) for member, own in pairs])

    def restart(self, state: EnsembleState, source: PackedTokens) -> None:
        for member, own in zip(self.members, state.states, strict=True):
            member.restart(own, source)

    def step(self, state: EnsembleState, tokens: Tensor) -> tuple[Tensor, EnsembleState]:
        after: list[Any] = []

        def opinions() -> Iterator[Tensor]:
            for member, own in zip(self.members, state.states, strict=True):
                logits, then = member.step(own, tokens)
                after.append(then)
                yield logits

        return mean_logprobs(opinions()), EnsembleState(after)
