"""Ensembles of models with one vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.base import SequenceModel
from regard.models.decoder_state import StaticShape
from regard.packed import TextBatch


def mean_logprobs(member_logits: Iterable[Tensor]) -> Tensor:
    """Logits [..., V] of each member -> logits [..., V] of the mean of their probabilities, in float32.

    Probabilities determine logits up to an offset, which matters to a repetition penalty. Here it is the mean of the
    members' offsets: log(mean p) + mean(logsumexp(logits)). So an ensemble of one model twice equals that model.

    >>> mean_logprobs([torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()]).exp()
    tensor([0.7000, 0.3000])
    """
    total: Tensor | None = None
    offset: Tensor | float = 0.0
    count = 0
    for logits in member_logits:
        lse = logits.float().logsumexp(-1, keepdim=True)
        logp = logits.float() - lse
        total, offset, count = logp if total is None else torch.logaddexp(total, logp), offset + lse, count + 1
    assert total is not None
    return total + (offset / count - math.log(count))


@dataclass(frozen=True)
class EnsembleState:
    """The decoding states of the members."""

    states: list[Any]

    def reorder(self, parents: Tensor) -> EnsembleState:
        return EnsembleState([state.reorder(parents) for state in self.states])

    def select(self, sentences: Tensor) -> EnsembleState:
        return EnsembleState([state.select(sentences) for state in self.states])

    def compact(self) -> None:
        for state in self.states:
            state.compact()

    def grown(self, capacity: int, source: int = 0) -> EnsembleState:
        return EnsembleState([state.grown(capacity, source) for state in self.states])

    def tensors(self) -> Iterator[Tensor]:
        for state in self.states:
            yield from state.tensors()


class Ensemble(SequenceModel):
    """Models of any families; the probability of a token is the mean over the members."""

    def __init__(self, members: Sequence[SequenceModel]) -> None:
        super().__init__()
        self.members: Sequence[SequenceModel] = nn.ModuleList(members)  # type: ignore[assignment]
        kinds = {member.is_decoder_only for member in members}  # these count positions differently
        self.has_static_state = len(kinds) == 1 and all(member.has_static_state for member in members)
        self.is_decoder_only = any(kinds)
        self.can_restart = all(member.can_restart for member in members)

    def logits(self, batch: TextBatch) -> Tensor:
        return mean_logprobs(member.logits(batch) for member in self.members)

    def start(self, source: Any) -> EnsembleState:
        return EnsembleState([member.start(source) for member in self.members])

    def static_state(self, state: EnsembleState, shape: StaticShape) -> EnsembleState:
        pairs = zip(self.members, state.states, strict=True)
        return EnsembleState([member.static_state(each, shape) for member, each in pairs])

    def restart(self, state: EnsembleState, source: Any) -> None:
        for member, member_state in zip(self.members, state.states, strict=True):
            member.restart(member_state, source)

    def step(self, state: EnsembleState, tokens: Tensor) -> tuple[Tensor, EnsembleState]:
        new_states: list[Any] = []

        def member_logits() -> Iterator[Tensor]:  # one at a time, to hold the logits of one member only
            for member, member_state in zip(self.members, state.states, strict=True):
                logits, new_state = member.step(member_state, tokens)
                new_states.append(new_state)
                yield logits

        return mean_logprobs(member_logits()), EnsembleState(new_states)
