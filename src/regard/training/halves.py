"""Weights in bf16, all at once.

Under autocast every linear layer copies its weights to bf16 where it uses them, and brings their gradients back to
float32: a kernel each, and a small model has hundreds in an update. Here one kernel makes all the copies, and another
brings all gradients back. The numbers are those of autocast, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from regard.blocks import late_biases


class Halves:
    """Copies of the weights of a model's linear layers, to compute with in their place."""

    def __init__(self, model: nn.Module) -> None:
        uses = Counter(weight for module in model.modules() for weight in module.parameters(recurse=False))
        late = late_biases(model)
        self.places: list[tuple[nn.Module, str]] = []
        self.weights: list[nn.Parameter] = []
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                if isinstance(module, nn.Linear) and uses[weight] == 1 and weight not in late:
                    self.places.append((module, name))
                    self.weights.append(weight)
        self.copies = [nn.Parameter(w.detach().to(torch.bfloat16), w.requires_grad) for w in self.weights]

    @contextmanager
    def used(self) -> Iterator[None]:
        """While the context lasts, the model computes with the copies, as they are at its beginning.

        At its end the weights have the gradients that their copies were given.
        """
        with torch.no_grad():
            torch._foreach_copy_([*self.copies], [*self.weights])
        self._put(self.copies)
        try:
            yield
            self._hand_over()
        finally:
            self._put(self.weights)
            for copy in self.copies:
                copy.grad = None

    def _hand_over(self) -> None:
        """The copies' gradients become the weights'."""
        given = [(w, c.grad) for w, c in zip(self.weights, self.copies, strict=True) if c.grad is not None]
        slopes = [torch.empty_like(weight) for weight, _ in given]
        if given:
            torch._foreach_copy_(slopes, [slope for _, slope in given])
        for (weight, _), slope in zip(given, slopes, strict=True):
            weight.grad = slope

    def _put(self, weights: list[nn.Parameter]) -> None:
        for (module, name), weight in zip(self.places, weights, strict=True):
            setattr(module, name, weight)
