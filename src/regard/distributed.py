"""Several processes that train one model: which one this is, and how they exchange values.

Rank 0 is the main process: it alone reports and writes files (except for the shards of a sharded state). Without
`torch.distributed`, or before it is initialised, there is one process, and nothing here communicates.

Numbers and objects of the host are exchanged on the host, also if tensors are on GPUs, so that no device has to wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import ReportedElsewhere, UserError, first_line

Value = TypeVar("Value")
Item = TypeVar("Item")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
CONNECTING = timedelta(minutes=2)  # how long processes that start at different times wait for each other at least
SAVING = timedelta(minutes=30)  # by how much one process may take longer than another to write its part of a state
PATIENCE = timedelta(days=7)  # how long processes wait where one of them alone works, for instance tokenises

_grace = 0.0  # seconds in which a process that still answers reports so, after another did not
_store: dist.Store | None = None  # through which processes exchange keys, if `joined` initialised them
_patient: dist.ProcessGroup | None = None  # all processes, with a long timeout
_saving: dist.ProcessGroup | None = None  # the same for the threads that write files


def is_launched() -> bool:
    """Whether torchrun, or another launcher that sets the same variables, started this process."""
    return dist.is_available() and all(name in os.environ for name in ENVIRONMENT)


def is_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_initialised() else 0


def world_size() -> int:
    return dist.get_world_size() if is_initialised() else 1


def is_main() -> bool:
    return rank() == 0


# -- joining and leaving -----------------------------------------------------------------------------------------------


def local_device(device: torch.device) -> torch.device:
    """The device of this process: of the GPUs of a machine, each of its processes has its own."""
    if device.type != "cuda" or not is_launched():
        return device
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= count:
        processes = os.environ.get("LOCAL_WORLD_SIZE", local + 1)
        raise UserError(
            f"this machine has {count} GPU{'s' * (count != 1)}, too few for {processes} processes: "
            "lower --devices (or torchrun's --nproc-per-node), or use --device cpu"
        )
    return torch.device("cuda", local)


@contextmanager
def joined(device: torch.device, timeout: float) -> Iterator[None]:
    """Be one of the processes that torchrun started, if it did, while the context lasts.

    Tensors are exchanged by NCCL between GPUs and by gloo between CPUs; `timeout` is in seconds.
    """
    global _grace, _store, _patient, _saving
    if is_initialised() or not is_launched():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit, backend = timedelta(seconds=timeout), "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        store, number, world = next(dist.rendezvous("env://", timeout=max(limit, CONNECTING)))
        store = dist.PrefixStore(_attempt(), store)
        _wait_for_all(store, number, world, max(limit, CONNECTING))
        dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=limit)
        _store, _grace = dist.PrefixStore("regard", store), min(timeout, 10.0)
        _patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        _saving = dist.new_group(backend="gloo", timeout=max(limit, SAVING))
    except RuntimeError as error:
        raise UserError(f"the processes of the job could not connect: {first_line(error)}") from error
    try:
        yield
    finally:
        _store = _patient = _saving = None
        dist.destroy_process_group()


def _wait_for_all(store: dist.Store, number: int, world: int, limit: timedelta) -> None:
    """Wait until every process has started, before the limit for collective operations counts."""
    store.set(f"started/{number}", "yes")
    store.wait([f"started/{n}" for n in range(world)], limit)


def _attempt() -> str:
    """A prefix for the keys of this start of the processes.

    torchrun keeps its store when it restarts them, with the addresses of processes that were killed while they
    connected. The agents of several machines count restarts for themselves, so that they have no common prefix: there a
    start that finds such an address fails, and torchrun starts again.
    """
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0) if alone else 0}"


@contextmanager
def lost_process_named() -> Iterator[None]:
    """Say which process did not answer, or that one has ended, where a collective operation fails."""
    try:
        yield
    except RuntimeError as error:
        if world_size() == 1 or not _is_lost_connection(error):
            raise
        silent = _silent_ranks() if "Timed out" in str(error) else []
        which = "another process of the job has ended, or the connection to it was lost"
        if silent:
            which = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} did not answer in time"
        raise UserError(f"{which}; the same command continues from the last save") from error


def _is_lost_connection(error: RuntimeError) -> bool:
    if isinstance(error, torch.distributed.DistError):
        return True
    return "gloo" in str(error) and any(words in str(error) for words in ("Timed out", "Connection closed", "reset by"))


def _silent_ranks() -> list[int]:
    """The processes that do not report within `_grace` seconds that they still answer."""
    store = _store
    if store is None:
        return []
    missing = [0]  # which holds the store, unless torchrun does: where that does not answer, neither does rank 0

    def ask() -> None:
        store.set(f"answers/{rank()}", "yes")
        end = time.monotonic() + _grace
        while (numbers := [n for n in range(world_size()) if not store.check([f"answers/{n}"])]) and (
            time.monotonic() < end
        ):
            time.sleep(0.1)
        missing[:] = numbers

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_grace + 5.0)
    return missing


# -- exchanging values -------------------------------------------------------------------------------------------------


def broadcast(value: Value, patient: bool = False) -> Value:
    """The main process's value; `patient`: which may take its time."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_patient if patient else None)
    return values[0]


def all_sum(value: float) -> float:
    """The sum of a number over all processes, in float64; whole numbers up to 2^53 stay exact."""
    if world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=_host())
    dist.all_reduce(total)
    return total.item()


def any_of(*flags: bool) -> tuple[bool, ...]:
    """Whether each flag is set in any process."""
    if world_size() == 1:
        return flags
    counts = torch.tensor(flags, dtype=torch.int32, device=_host())
    dist.all_reduce(counts)
    return tuple(bool(count) for count in counts.tolist())


def any_(flag: Tensor) -> Tensor:
    """[] whether a boolean on the device is true in any process; the device is not synchronised."""
    if world_size() == 1:
        return flag
    count = flag.to(torch.int32)
    dist.all_reduce(count)
    return count > 0


def spread(function: Callable[[Item], Value], items: Sequence[Item]) -> list[Value]:
    """[function(item) for item in items], of which each process computes a part; all get the whole list."""
    if world_size() == 1:
        return [function(item) for item in items]
    local_results = {index: function(items[index]) for index in range(rank(), len(items), world_size())}
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, local_results)
    results: dict[int, Value] = {index: value for part in parts for index, value in part.items()}
    return [results[index] for index in range(len(items))]


def saving_group() -> dist.ProcessGroup | None:
    """The group for threads that write files: they may not mix their messages with those of the training loop."""
    return _saving


def gather_saved(value: Value) -> list[Value]:
    """The values of all processes, exchanged by threads that write files."""
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_saving)
    return values


@contextmanager
def main_first() -> Iterator[None]:
    """Run a block on the main process, then on the others, which find what it wrote.

    If it fails on the main process, the others raise an error too and do not wait for it.
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
            broadcast(failure, patient=True)
    else:
        failure = broadcast(None, patient=True)
        if failure is not None:
            raise ReportedElsewhere(failure)
        yield


def _host() -> torch.device:
    """The device on which numbers of the host are exchanged: the CPU, unless only GPUs are connected."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config() else "cuda")
