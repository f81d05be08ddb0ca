"""Selection of device and precision."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor

from regard.errors import UserError


def pick(name: str = "auto") -> torch.device:
    """The device with this name; auto: a GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"no device {name!r}: try auto, cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"no device {name!r}: try auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"device {name} was requested, but this PyTorch sees {count or 'no'} GPU{'s' * (count != 1)}")
    return device


def gpu_count() -> int:
    return torch.cuda.device_count()


def memory(device: torch.device) -> int:
    """Total bytes of memory of a device; of a CPU, the limit of this process."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [sys.maxsize]
    with suppress(AttributeError, ValueError, OSError):  # not on every system
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):  # a container's limit; "max" where there is none
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


DECODING = ("auto", "fp32", "bf16", "int8")


def decoding_precision(requested: str, trained: str, device: torch.device) -> str:
    """The precision for decoding on a device: fp32, bf16 (GPU) or int8 (CPU).

    auto: fp32 on a CPU; on a GPU, the precision of training.
    """
    if requested not in DECODING:
        raise UserError(f"no precision {requested!r}: there are {', '.join(DECODING)}")
    gpu = device.type == "cuda"
    if requested == "auto":
        return "bf16" if gpu and trained != "fp32" else "fp32"
    if requested == "int8" and gpu:
        raise UserError("int8 is for CPUs: use it with --device cpu")
    if requested == "bf16" and not gpu:
        raise UserError("bf16 is for GPUs, where it is quicker: leave --precision out, or use int8")
    return requested


def in_bf16(precision: str, device: torch.device) -> bool:
    """Return whether matmuls are in bf16; auto: on a GPU they are, on a CPU not."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matmuls run in this precision. Weights stay in fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if in_bf16(precision, device) else nullcontext()


def matrix_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matmul with x in the current autocast context."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


MALLOC = {"trim": -1, "top": -2, "maps": -4}  # M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_MAX of malloc.h
USUAL = {"trim": 128 * 1024, "top": 128 * 1024, "maps": 65536}  # glibc's own
HELD = {"trim": 2**31 - 1, "top": 64 * 2**20, "maps": 0}


@contextmanager
def held_memory(device: torch.device) -> Iterator[None]:
    """On a CPU, let the process keep freed memory for reuse while the context lasts.

    A training step frees and allocates hundreds of megabytes. If they were returned to the system, they would have to
    be mapped and zeroed again, page by page. Only glibc has these options; elsewhere this does nothing.
    """
    import ctypes

    library = None
    if device.type == "cpu" and sys.platform == "linux":
        library = ctypes.CDLL(None)
    if library is None or not hasattr(library, "mallopt"):
        yield
        return
    for name, number in MALLOC.items():
        library.mallopt(number, HELD[name])
    try:
        yield
    finally:
        for name, number in MALLOC.items():
            library.mallopt(number, USUAL[name])
        library.malloc_trim(0)
