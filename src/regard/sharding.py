"""Tensors that are divided among processes: PyTorch's DTensors, whose module is imported only where there are any."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is divided among processes, gathered from all, which all call this; any other as it is."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that is divided among processes; any other as it is."""
    part: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def fill(target: Tensor, tensor: Tensor) -> None:
    """Copy a whole tensor into one that may be divided among processes."""
    local(target).copy_(shard_of(tensor, target))


def as_shard(part: Tensor, like: Tensor) -> Tensor:
    """A tensor divided as `like` is, of which this process has `part`."""
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def shard_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, divided as `like` is; all of it where `like` is not divided."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return local(distribute_tensor(tensor, mesh, placements, src_data_rank=None))
