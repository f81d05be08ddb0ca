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
from torch import Tensor, nn

from regard import torch_private


class Bf16Weights:
    """bf16 copies of the weights of a model's linear layers, which replace them during a step.

    `adds`: gradients are added to those that weights have already; else they replace them.
    """

    def __init__(self, model: nn.Module, without: Collection[nn.Parameter] = (), adds: bool = True) -> None:
        self.adds = adds
        uses = Counter(weight for module in model.modules() for weight in module.parameters(recurse=False))
        self.owners: list[tuple[nn.Module, str]] = []
        self.weights: list[nn.Parameter] = []
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                if isinstance(module, nn.Linear) and uses[weight] == 1 and weight not in without:
                    self.owners.append((module, name))
                    self.weights.append(weight)
        self.copies = [nn.Parameter(w.detach().to(torch.bfloat16), w.requires_grad) for w in self.weights]
        self._copy_of = dict(zip(self.weights, self.copies, strict=True))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Refresh the copies and let the model use them; at the end, move their gradients to the weights."""
        with torch.no_grad():
            torch_private.foreach_copy_([*self.copies], [*self.weights])
        self._swap(self.copies)
        try:
            yield
            self.take_grads()
        finally:
            self._swap(self.weights)
            for copy in self.copies:
                copy.grad = None

    def take_grads(self, weights: Collection[nn.Parameter] | None = None) -> None:
        """Move the gradients of the copies, of these weights or of all, to the weights, in fp32."""
        chosen = self.weights if weights is None else [weight for weight in weights if weight in self._copy_of]
        given = [(w, copy.grad) for w in chosen if (copy := self._copy_of[w]).grad is not None]
        if not given:
            return
        targets = [torch.empty_like(w) if self.adds or w.grad is None else w.grad for w, _ in given]
        torch_private.foreach_copy_(targets, [grad for _, grad in given])
        added: list[tuple[Tensor, Tensor]] = []
        for (weight, _), target in zip(given, targets, strict=True):
            self._copy_of[weight].grad = None
            if weight.grad is None:
                weight.grad = target
            elif self.adds:
                added.append((weight.grad, target))
        if added:
            torch_private.foreach_add_([total for total, _ in added], [grad for _, grad in added])

    def _swap(self, weights: list[nn.Parameter]) -> None:
        for (module, name), weight in zip(self.owners, weights, strict=True):
            setattr(module, name, weight)
