"""DDP and FSDP: for every family the losses, gradient norms, weights and moving averages of one process.

In float64, up to 1e-9: with gradient accumulation, activation checkpointing, clipping, weight decay, dropout, tied
embeddings, micro-batches of very different sizes, and processes without any; with R-Drop, guided alignment, adapters
and numbers for labels. Where one process has a loss or a gradient that is not finite, no process changes a weight.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import small_jobs
import torch
from parallel_job import KINDS, cases, updates

JOB = small_jobs.here(str(Path(__file__).with_name("parallel_job.py")))


def check_job(world: int, which: str, folder: Path) -> None:
    small_jobs.run(world, JOB, which, str(folder))
    found = torch.load(folder / "results.pt")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = {name: updates(*case) for name, case in cases(which).items()}
    finally:
        torch.set_num_threads(threads)
    assert found.keys() == {(kind, name) for kind in KINDS for name in expected}
    for (parallel, name), results in found.items():
        assert results.keys() == expected[name].keys()
        float32 = any("running" in key for key in results)  # batch norm computes in float32
        tolerance = {"atol": 1e-5, "rtol": 1e-5} if float32 else {"atol": 1e-9, "rtol": 1e-9}
        for key, value in expected[name].items():
            torch.testing.assert_close(
                results[key], value, **tolerance, msg=lambda m, at=(parallel, name, key): f"{at}: {m}"
            )


@pytest.mark.slow
def test_two_processes_train_every_family_as_one_does(tmp_path: Path) -> None:
    check_job(2, "few", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_processes_trains_every_family_as_one_does(world: int, tmp_path: Path) -> None:
    check_job(world, "all", tmp_path)
