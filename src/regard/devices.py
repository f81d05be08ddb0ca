"""Selection of the device, and its memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

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


MALLOC_PARAMETERS = {"trim": -1, "top": -2, "maps": -4, "arenas": -8}  # M_TRIM_THRESHOLD and others of malloc.h
MALLOC_DEFAULTS = {
    "trim": 128 * 1024,
    "top": 128 * 1024,
    "maps": 65536,
    "arenas": 0,
}  # glibc's defaults
MALLOC_KEEPS_MEMORY = {"trim": 2**31 - 1, "top": 64 * 2**20, "maps": 0, "arenas": 1}


@contextmanager
def held_memory(device: torch.device) -> Iterator[None]:
    """Let the process keep freed memory for reuse, on a CPU, while the context lasts.

    A training step frees and allocates hundreds of megabytes, and so does a decoding step with a large vocabulary. If
    they were returned to the system, they would have to be mapped and zeroed again, page by page. All threads share
    what was freed (one arena). Only glibc has these options; elsewhere this does nothing.
    """
    import ctypes

    library = None
    if device.type == "cpu" and sys.platform == "linux":
        library = ctypes.CDLL(None)
    if library is None or not hasattr(library, "mallopt"):
        yield
        return
    for name, number in MALLOC_PARAMETERS.items():
        library.mallopt(number, MALLOC_KEEPS_MEMORY[name])
    try:
        yield
    finally:
        for name, number in MALLOC_PARAMETERS.items():
            library.mallopt(number, MALLOC_DEFAULTS[name])
        library.malloc_trim(0)
