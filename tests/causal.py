"""A tiny causal language model that stands in for a GPT: every token changes what is remembered, for good."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.models import SequenceModel
from regard.packed import PackedTokens, SeqBatch


@dataclass(frozen=True)
class Memory:
    """[N, K, D] what each beam remembers, and [N] how many tokens its sentence has been fed."""

    vector: Tensor
    fed: Tensor

    def reorder(self, parents: Tensor) -> Memory:
        return Memory(self.vector[torch.arange(len(parents))[:, None], parents], self.fed)

    def select(self, sentences: Tensor) -> Memory:
        return Memory(self.vector[sentences], self.fed[sentences])


class Causal(SequenceModel):
    """memory = tanh(memory A + token), logits = memory W; in double precision, so that batches differ by nothing.

    To be fed more than `longest` tokens is a failure, as it is for a model with that many positions.
    """

    def __init__(self, size: int, longest: int, seed: int = 0, sharpness: float = 2.0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.longest, self.width = longest, 12

        def random(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=draw, dtype=torch.float64), requires_grad=False)

        self.token, self.mix, self.out = random(size, 12), random(12, 12), random(12, size)
        self.mix.mul_(0.4)
        self.out.mul_(sharpness / 12**0.5)

    def feed(self, memory: Memory, tokens: Tensor) -> Memory:
        assert int(memory.fed.max()) < self.longest, "fed more tokens than the model sees"
        return Memory(torch.tanh(memory.vector @ self.mix + self.token[tokens]), memory.fed + 1)

    def start(self, source: PackedTokens) -> Memory:
        empty = torch.zeros(1, 1, self.width, dtype=torch.float64)
        memories = []
        for ids in source.layout.split(source.ids):
            memory = Memory(empty, torch.zeros(1, dtype=torch.long))
            for token in ids:
                memory = self.feed(memory, token.view(1, 1))
            memories.append(memory)
        return Memory(torch.cat([m.vector for m in memories]), torch.cat([m.fed for m in memories]))

    def step(self, state: Memory, tokens: Tensor) -> tuple[Tensor, Memory]:
        memory = self.feed(state, tokens)
        return memory.vector @ self.out, memory

    def after(self, tokens: list[int]) -> Tensor:
        """[V] logits of what follows these tokens."""
        state = self.start(PackedTokens.from_lists([tokens[:-1]]))
        return self.step(state, torch.tensor([[tokens[-1]]]))[0][0, 0]

    def logits(self, batch: SeqBatch) -> Tensor:
        rows = []
        parts = batch.source.layout.split(batch.source.ids), batch.inputs.layout.split(batch.inputs.ids)
        for source, inputs in zip(*parts, strict=True):
            state = self.start(PackedTokens.from_lists([source.tolist()]))
            for token in inputs:
                logits, state = self.step(state, token.view(1, 1))
                rows.append(logits[0, 0])
        return torch.stack(rows)
