"""FLOPs of a training update, by the formulas of the model families.

Not `torch.utils.flop_counter.FlopCounterMode`, which counts the operations of a pass while it runs: it does not see
into our Triton kernels or a captured graph, counts padding, and would slow every batch down. The tests compare the
formulas with it where it sees everything.
"""

from __future__ import annotations

from regard.packed import Batch
from regard.recipes.schema import ModelSettings

BACKWARD = 2  # the gradients of both factors of a matmul cost twice the matmul


def update(settings: ModelSettings, batch: Batch, target_size: int) -> int:
    """FLOPs of a forward and a backward pass, without activations that are recomputed."""
    return (1 + BACKWARD) * settings.forward_flops(batch, target_size)
