"""Activation checkpointing: layers are recomputed in the backward pass instead of storing their activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.nn.blocks import BlockStack
from regard.nn.norms import BatchNorm


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute every layer of a model's stacks in the backward pass.

    Their classes are replaced by subclasses in place, so that parameters, names and references stay; PyTorch's
    `checkpoint_wrapper` would insert another module and change the names.
    """
    for stack in model.children():
        if isinstance(stack, BlockStack | nn.ModuleList):
            for layer in stack:
                if not isinstance(layer, Recomputed):
                    layer.__class__ = type(f"Recomputed{type(layer).__name__}", (Recomputed, type(layer)), {})


class Recomputed(nn.Module):
    """A layer that stores only its inputs for the backward pass."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        call = super().__call__
        if not self.training:
            return call(*given, **named)
        contexts = nullcontext(), _without_statistics(self)
        return checkpoint(call, *given, use_reentrant=False, context_fn=lambda: contexts, **named)


@contextmanager
def _without_statistics(layer: nn.Module) -> Iterator[None]:
    """Do not update running statistics: the forward pass already did."""
    norms = [module for module in layer.modules() if isinstance(module, BatchNorm)]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            del norm.track_running_stats
