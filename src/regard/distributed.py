"""Several processes that train one model: which one this is, and how they exchange values.

Rank 0 is the main process: it alone writes files and reports. Without `torch.distributed`, or before it is initialised,
there is one process, and nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.errors import UserError

Value = TypeVar("Value")


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if _initialised() else 0


def world_size() -> int:
    return dist.get_world_size() if _initialised() else 1


def is_main() -> bool:
    return rank() == 0


def broadcast(value: Value) -> Value:
    """The main process's value."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_sum(value: float) -> float:
    """The sum of a number over all processes, in float64; whole numbers up to 2^53 stay exact."""
    if world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=_device())
    dist.all_reduce(total)
    return total.item()


def any_of(*flags: bool) -> tuple[bool, ...]:
    """Whether each flag is set in any process."""
    if world_size() == 1:
        return flags
    counts = torch.tensor(flags, dtype=torch.int32, device=_device())
    dist.all_reduce(counts)
    return tuple(bool(count) for count in counts.tolist())


def any_(flag: Tensor) -> Tensor:
    """[] whether a boolean on the device is true in any process; the device is not synchronised."""
    if world_size() == 1:
        return flag
    count = flag.to(torch.int32)
    dist.all_reduce(count)
    return count > 0


def sum_grads(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its sum over all processes. A process without gradients adds zeros."""
    if world_size() == 1:
        return
    learned = [p for p in parameters if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in learned]
    present = learned[0].new_tensor([p.grad is not None for p in learned])  # a parameter without any keeps None
    sums = torch.cat([*(grad.flatten() for grad in grads), present])
    dist.all_reduce(sums)
    *totals, counts = sums.split([*(p.numel() for p in learned), len(learned)])
    for parameter, total, count in zip(learned, totals, counts.tolist(), strict=True):
        parameter.grad = total.view_as(parameter) if count else None


@contextmanager
def main_first() -> Iterator[None]:
    """Run a block on the main process, then on the others, which find what it wrote.

    If it fails on the main process, the others raise the same line and do not wait for it.
    """
    if is_main():
        failure: str | None = "the main process was stopped"
        try:
            yield
            failure = None
        except Exception as error:
            failure = str(error)
            raise
        finally:
            broadcast(failure)
    else:
        failure = broadcast(None)
        if failure is not None:
            raise UserError(failure)
        yield


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
