"""Sums of gradients over all processes that begin during the backward pass, for steps that are captured as CUDA graphs.

PyTorch's DistributedDataParallel does the same for plain steps. It reads the gradients of the fp32 weights during the
backward pass, where captured steps have gradients of bf16 copies (`bf16_weights`), which are converted many at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.accelerate.bf16_weights import Bf16Weights
from regard.models import SequenceModel

BUCKET = 25 * 2**20  # bytes that are summed at once, as in DistributedDataParallel
ALIGNMENT = 128  # elements, so that kernels read every gradient in wide loads


@dataclass(eq=False)
class GradBucket:
    """Weights whose gradients are views of one tensor."""

    weights: list[nn.Parameter]
    grads: Tensor
    missing: int = 0  # gradients that this backward pass has not computed yet
    sum: Any = None  # the collective operation, once it has begun


class OverlappedSums:
    """`DataParallel` by all-reduces of buckets, each as soon as its last gradient is there.

    Gradients are views of the buckets.
    """

    equal_passes = False
    static_grads = capturable = True

    def __init__(self, model: SequenceModel, copies: Bf16Weights | None, bucket_bytes: int = BUCKET) -> None:
        self._model, self.copies = model, copies
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._buckets = _buckets(trained[::-1], bucket_bytes)  # gradients come in about this order
        self._begun = 0  # buckets whose sum has begun: in the same order in all processes
        leaves = {} if copies is None else dict(zip(copies.weights, copies.copies, strict=True))
        self._hooks = [
            leaves.get(weight, weight).register_post_accumulate_grad_hook(partial(self._computed, bucket))
            for bucket in self._buckets
            for weight in bucket.weights
        ]

    def __call__(self, batch: Any, smoothing: float, r_drop: float) -> Tensor:
        loss: Tensor = self._model(batch, smoothing, r_drop)
        return loss

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        for bucket in self._buckets:
            bucket.missing = len(bucket.weights) if last else 0
        self._begun = 0
        yield
        if last:
            self._begin(len(self._buckets))  # weights that the loss does not depend on have no gradient
            for bucket in self._buckets:
                bucket.sum.wait()

    def _computed(self, bucket: GradBucket, leaf: Tensor) -> None:
        """Called when the backward pass has computed a gradient; begin the sums that have all of theirs."""
        if not bucket.missing:
            return
        bucket.missing -= 1
        ready = self._begun
        while ready < len(self._buckets) and not self._buckets[ready].missing:
            ready += 1
        self._begin(ready)

    def _begin(self, end: int) -> None:
        for bucket in self._buckets[self._begun : end]:
            if self.copies is not None:
                self.copies.take_grads(bucket.weights)
            bucket.sum = dist.all_reduce(bucket.grads, async_op=True)
        self._begun = end


def _buckets(weights: list[nn.Parameter], most: int) -> list[GradBucket]:
    """Divide weights of one dtype into buckets of at most `most` bytes, or of one weight."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for weight in weights:
        size += _padded_size(weight) * weight.element_size()
        if not groups or size > most:
            groups.append([])
            size = _padded_size(weight) * weight.element_size()
        groups[-1].append(weight)
    return [_bucket(group) for group in groups]


def _bucket(weights: list[nn.Parameter]) -> GradBucket:
    grads = torch.zeros(sum(map(_padded_size, weights)), dtype=weights[0].dtype, device=weights[0].device)
    begin = 0
    for weight in weights:
        weight.grad = grads[begin : begin + weight.numel()].view_as(weight)
        begin += _padded_size(weight)
    return GradBucket(weights, grads)


def _padded_size(weight: Tensor) -> int:
    return -(-weight.numel() // ALIGNMENT) * ALIGNMENT
