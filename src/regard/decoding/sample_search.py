"""Random sampling: a `SearchState` whose beams are independent samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.decoding.beam_state import Choice, SearchState, num_beams
from regard.decoding.constraints import Constraints
from regard.decoding.sampling import draw, keys, uniforms
from regard.decoding.topk import log_softmax
from regard.recipes.schema import DecodingSettings


@dataclass(eq=False, kw_only=True)
class SampleState(SearchState):
    """K samples for each of N sentences. Unlike beams, they are neither reordered nor compared."""

    SENTENCE_TENSORS: ClassVar[tuple[str, ...]] = (*SearchState.SENTENCE_TENSORS, "keys", "uniform")

    keys: Tensor  # [N, K] keys of the random draws
    uniform: Tensor  # [N, K, T] random numbers of every step

    @classmethod
    def create(
        cls, settings: DecodingSettings, nbest: int, constraints: Constraints, capacity: int, **options: Any
    ) -> Self:
        keys = constraints.limit.new_empty(len(constraints.limit), num_beams(settings, nbest))
        uniform = torch.empty(*keys.shape, capacity, device=keys.device)
        return super().create(settings, nbest, constraints, capacity, keys=keys, uniform=uniform, **options)

    @classmethod
    def reorders_beams(cls, beams: int) -> bool:
        return False

    def restart(self, constraints: Constraints, begin: Tensor, lines: Sequence[int], seed: int | Sequence[int]) -> None:
        random_keys = keys(seed, lines, self.beams)
        self.keys.copy_(torch.from_numpy(random_keys.view(np.int64)))
        self.uniform.copy_(uniforms(random_keys[..., None], np.arange(self.uniform.shape[-1], dtype=np.uint64)))
        super().restart(constraints, begin, lines, seed)

    def reset(self, begin: Tensor) -> None:
        super().reset(begin)
        self.total.zero_()

    def grown(self, capacity: int, prefix: int = 0, prompt: int = 0) -> Self:
        state = super().grown(capacity, prefix, prompt)
        random_keys = state.keys.cpu().numpy().view(np.uint64)
        uniform = uniforms(random_keys[..., None], np.arange(capacity, dtype=np.uint64))
        return replace(state, uniform=uniform.to(state.keys.device))

    def _choose(self, logits: Tensor, history: Tensor, penalty: Tensor) -> Choice:
        """Draw a random token for every sample."""
        logp = F.log_softmax(logits, -1, dtype=torch.float32) if self.static else log_softmax(logits)
        single = self._mask(logp, None, history)
        only = None if single is None else self._is_single(logp.amax(-1, keepdim=True), single)
        if only is not None and single is not None:
            chosen = torch.arange(logp.shape[-1], device=logp.device) == single.token
            logp = torch.where(only, torch.where(chosen, single.logprob, -math.inf), logp)
        step = self._next_index().clamp(max=self.uniform.shape[-1] - 1)  # sentences that are done may be at the end
        tokens, logprobs = draw(logp, self.uniform.gather(-1, step).squeeze(-1), self.settings)
        parents = self._beam_index if logits.shape[1] == self.beams else torch.zeros_like(self._beam_index)
        return Choice(parents.expand_as(tokens), tokens, logprobs, self.total + logprobs)

    def _is_over(self, live: Tensor) -> Tensor:
        return live == -math.inf
