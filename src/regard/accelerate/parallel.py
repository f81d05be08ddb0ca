"""Training on several devices: PyTorch's DistributedDataParallel and FSDP2, applied to a finished model.

With `ddp` every process has the whole model, and gradients are summed while the backward pass goes on. With `fsdp` a
process holds a part of every weight, gradient and optimizer state; a block's weights are gathered when it is computed.
Parameters keep their names under both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard import distributed, sharding
from regard.accelerate.bf16_weights import Bf16Weights
from regard.models import SequenceModel
from regard.nn.blocks import BlockStack
from regard.precision import in_bf16
from regard.recipes.schema import TrainingSettings


class DataParallel(Protocol):
    """A model whose gradients are summed over all processes."""

    equal_passes: bool  # whether every process needs as many forward passes as the others
    static_grads: bool  # whether gradients stay where they are: they are zeroed, not removed
    capturable: bool  # whether a step can be captured as a CUDA graph
    copies: Bf16Weights | None  # bf16 copies that replace the weights in the backward pass

    def __call__(self, batch: Any, smoothing: float, r_drop: float) -> Tensor:
        """The loss of the model."""

    def accumulating(self, last: bool) -> Any:
        """A context for a forward and a backward pass, of which the last of a step alone sums the gradients."""


class Replicated:
    """`DataParallel` by DistributedDataParallel."""

    equal_passes = static_grads = capturable = False
    copies: Bf16Weights | None = None

    def __init__(self, model: SequenceModel, device: torch.device) -> None:
        with warnings.catch_warnings():
            # PyTorch 2.13 has another name for `broadcast_buffers`, and still obeys this one.
            warnings.simplefilter("ignore", FutureWarning)
            self._module = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                broadcast_buffers=False,  # `training.running_statistics` keeps them equal
                gradient_as_bucket_view=True,
            )
        # A lambda, because PyTorch compares annotations, which are strings here, with types.
        self._module.register_comm_hook(None, lambda _, bucket: _sum(bucket))

    def __call__(self, batch: Any, smoothing: float, r_drop: float) -> Tensor:
        loss: Tensor = self._module(batch, smoothing, r_drop)
        return loss

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        if last:
            yield
        else:
            with self._module.no_sync():
                yield


def _sum(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum the gradients of a bucket, where DistributedDataParallel would take their mean."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda finished: finished.value()[0])


class Sharded:
    """`DataParallel` by FSDP2, for a model that `shard` was applied to."""

    equal_passes = True  # each pass gathers weights from all processes
    static_grads = False
    copies: Bf16Weights | None = None

    def __init__(self, model: SequenceModel, settings: TrainingSettings) -> None:
        self._model = model
        self._syncs = True  # FSDP's default
        self.capturable = can_capture(settings)

    def __call__(self, batch: Any, smoothing: float, r_drop: float) -> Tensor:
        loss: Tensor = self._model(batch, smoothing, r_drop)
        return loss

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        if last != self._syncs:  # it visits all modules
            self._model.set_requires_gradient_sync(last)  # type: ignore[operator]  # a method of FSDPModule
            self._syncs = last
        yield


def shards(settings: TrainingSettings) -> bool:
    """Whether a training divides the model among its processes."""
    return settings.parallel == "fsdp" and distributed.is_initialised()


def can_capture(settings: TrainingSettings) -> bool:
    """Whether a training step can be captured, as far as this depends on how processes share the model.

    Under FSDP, which gathers weights and frees them inside the graph, a step is captured only if the recipe says so:
    no speed of it was recorded. A process needs one pass in a step then, because passes that sum no gradients leave
    them in memory that belongs to no graph.
    """
    one_pass = settings.accumulate <= distributed.world_size()
    return not shards(settings) or (settings.backend == "captured" and one_pass)


def shard(model: SequenceModel, settings: TrainingSettings, device: torch.device) -> None:
    """Divide a model's weights among all processes, and move them to the device, block by block.

    In bf16, blocks gather bf16 weights: what autocast would convert them to, at half of the communication. What is
    outside of the blocks (embeddings, output projection, last norm) stays in fp32, as do gradient sums.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = low if in_bf16(settings.precision, device) else MixedPrecisionPolicy()
    for stack in model.children():
        for block in stack if isinstance(stack, BlockStack) else ():
            fully_shard(block, mesh=mesh, reshard_after_forward=settings.reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules() if distributed.world_size() > 1 else ():
        if isinstance(module, FSDPModule):  # sum gradients, where FSDP would take their mean
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def is_sharded(model: nn.Module) -> bool:
    return any(sharding.is_sharded(parameter) for parameter in model.parameters())
