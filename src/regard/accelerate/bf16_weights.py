"""bf16 working copies of the weights of linear layers, made in one kernel.

Under autocast every linear layer converts its weights to bf16 and their gradients back to float32, with one kernel
each: hundreds per update, even for a small model. Here one kernel makes all the copies, and another converts all
gradients. Results are bitwise equal to those of autocast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from regard import torch_private


class Bf16Weights:
    """bf16 copies of the weights of a model's linear layers, which replace them during a step."""

    def __init__(self, model: nn.Module, without: Collection[nn.Parameter] = ()) -> None:
        uses = Counter(weight for module in model.modules() for weight in module.parameters(recurse=False))
        self.owners: list[tuple[nn.Module, str]] = []
        self.weights: list[nn.Parameter] = []
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                if isinstance(module, nn.Linear) and uses[weight] == 1 and weight not in without:
                    self.owners.append((module, name))
                    self.weights.append(weight)
        self.copies = [nn.Parameter(w.detach().to(torch.bfloat16), w.requires_grad) for w in self.weights]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Refresh the copies and let the model use them; at the end, copy their gradients to the weights."""
        with torch.no_grad():
            torch_private.foreach_copy_([*self.copies], [*self.weights])
        self._swap(self.copies)
        try:
            yield
            self._copy_grads()
        finally:
            self._swap(self.weights)
            for copy in self.copies:
                copy.grad = None

    def _copy_grads(self) -> None:
        given = [(w, c.grad) for w, c in zip(self.weights, self.copies, strict=True) if c.grad is not None]
        grads = [torch.empty_like(weight) for weight, _ in given]
        if given:
            torch_private.foreach_copy_(grads, [grad for _, grad in given])
        for (weight, _), grad in zip(given, grads, strict=True):
            weight.grad = grad

    def _swap(self, weights: list[nn.Parameter]) -> None:
        for (module, name), weight in zip(self.owners, weights, strict=True):
            setattr(module, name, weight)
