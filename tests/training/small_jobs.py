"""Jobs of several processes on one machine, as torchrun would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

BUSY = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # how much longer everything takes on a busy machine
PROCESS_TIMEOUT = 600 * BUSY


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(world: int, *words: str, **variables: str) -> list[subprocess.Popen[str]]:
    """Start Python with these words in `world` processes, each with the environment that torchrun gives it."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    common = {**os.environ, **address, "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", **variables}
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float = PROCESS_TIMEOUT) -> list[str]:
    """Wait for all processes; return the standard error of each. None outlives this."""
    try:
        return [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()


def run(world: int, *words: str, **variables: str) -> list[str]:
    """Run a job that has to succeed; return the standard error of each process."""
    processes = start(world, *words, **variables)
    errors = finish(processes)
    assert [process.returncode for process in processes] == [0] * world, "\n".join(errors)
    return errors


def torchrun(*words: str, **variables: str) -> subprocess.Popen[str]:
    """Start torchrun with these words."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def here(file: str) -> str:
    return str(Path(file).resolve())
