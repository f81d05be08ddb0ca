"""Describe the machine, the versions and the commit; every benchmark prints this above its figures."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("regard", "torch", "numpy", "transformers", "ctranslate2")


def processor() -> str:
    """Return the name of the processor and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        lines = (line.partition(":") for line in facts.read_text().splitlines())
        name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} core{'s' * (cores != 1)}"


def vectors() -> str:
    """Return the widest vector instructions that PyTorch uses, and whether the processor has VNNI (int8)."""
    import torch

    facts = Path("/proc/cpuinfo")
    flags = facts.read_text() if facts.exists() else ""
    return torch.backends.cpu.get_cpu_capability() + (" with VNNI" if "vnni" in flags else "")


def accelerator() -> str | None:
    """Return the name of the GPU, or None."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def versions() -> str:
    """Return the versions of Python and the packages; torch.__version__ also names the build, unlike its metadata."""
    import torch

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = torch.__version__ if package == "torch" else metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(f"{name} {version}" for name, version in found.items())


def commit() -> str:
    """Return the commit that was measured, and whether the working tree differs from it."""
    home = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=home, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (", changed since" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"


def about(threads: int | None = None) -> dict[str, str]:
    """Return everything that a figure depends on, in the order in which it is printed."""
    facts = {"machine": f"{processor()}, {vectors()}"}
    if (device := accelerator()) is not None:
        facts["GPU"] = device
    if threads is not None:
        facts["threads"] = str(threads)
    return {**facts, "versions": versions(), "commit": commit()}


def heading(threads: int | None = None) -> str:
    return "\n".join(f"{name:<9} {value}" for name, value in about(threads).items())
