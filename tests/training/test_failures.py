"""What happens to a job when one of its processes is killed, hangs, is told to stop, or cannot write."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import small_jobs
from small_jobs import BUSY
from small_runs import equal, metrics, small, tensors, train_run

from regard.recipes import to_toml

pytestmark = pytest.mark.slow
TIMEOUT = round(5 * BUSY)
TRAINING: dict[str, Any] = {"accumulate": 2, "ema": 0.9, "save_every": 5, "validate_every": 50, "timeout": TIMEOUT}

LIMITED = """
import resource, runpy, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
runpy.run_module("regard", run_name="__main__")
"""


LATE = f"""
import os, runpy, time
time.sleep({TIMEOUT + 3} * int(os.environ["RANK"]))
runpy.run_module("regard", run_name="__main__")
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def recipe_file(folder: Path, **training: Any) -> Path:
    """Write a recipe for the command line, and its held-out pairs."""
    file = folder / "recipe.toml"
    file.write_text(to_toml(small(folder, **{**TRAINING, **training})))
    return file


def words(folder: Path, recipe: Path) -> list[str]:
    return ["-m", "regard", "train", str(recipe), "--out", str(folder / "run"), "--device", "cpu"]


def wait_for_step(folder: Path, processes: list[subprocess.Popen[str]], timeout: float = 120 * BUSY) -> None:
    """Wait until a run has saved a state; if it does not, end its processes."""
    end = time.monotonic() + timeout
    try:
        while not (folder / "run" / "resume.safetensors").exists():
            for process in processes:
                assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end, "the job has saved nothing"
            time.sleep(0.05)
    except AssertionError:
        for process in processes:
            process.kill()
        raise


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def assert_uninterrupted(folder: Path, **training: Any) -> None:
    """The run equals one that a single process trained without interruptions, bit for bit."""
    expected = train_run(small(folder, **{**TRAINING, **training}), folder / "expected")
    run = folder / "run"
    assert equal(tensors(run / "resume.safetensors"), tensors(expected.resume))
    assert equal(tensors(run / "model.safetensors"), tensors(expected.best))
    for line, other in zip(metrics(run), metrics(expected.path), strict=True):
        assert {**line, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_when_a_process_is_lost_the_others_end_and_name_one_that_hangs(
    lost: int, by: signal.Signals, tmp_path: Path
) -> None:
    processes = small_jobs.start(3, *words(tmp_path, recipe_file(tmp_path, steps=100_000)))
    try:
        wait_for_step(tmp_path, processes)
        processes[lost].send_signal(by)
        others = [process for rank, process in enumerate(processes) if rank != lost]
        errors = [process.communicate(timeout=60 * BUSY)[1] for process in others]
        assert all(process.returncode == 2 for process in others), errors
        if by == signal.SIGKILL:
            assert any("another process of the job has ended" in error for error in errors), errors
        else:
            assert all(f"rank {lost} did not answer in time" in error for error in errors), errors
    finally:
        small_jobs.finish([p for p in processes if p.poll() is not None])
        for process in processes:
            process.kill()
    assert not list((tmp_path / "run").glob(".*.tmp"))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_sigterm_to_one_process_saves_and_stops_all(parallel: str, tmp_path: Path) -> None:
    processes = small_jobs.start(2, *words(tmp_path, recipe_file(tmp_path, steps=100_000, parallel=parallel)))
    wait_for_step(tmp_path, processes)
    processes[1].terminate()
    errors = small_jobs.finish(processes, timeout=60 * BUSY)
    assert [process.returncode for process in processes] == [143, 143], errors
    assert "the same command continues" in errors[0] and "continues" not in errors[1]


def test_a_process_that_starts_later_than_the_timeout_is_waited_for(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, steps=10)
    errors = small_jobs.finish(small_jobs.start(2, "-c", LATE, *words(tmp_path, recipe)[2:]), timeout=120 * BUSY)
    assert (tmp_path / "run" / "model.safetensors").exists(), errors


def test_a_full_disk_ends_all_processes_and_leaves_the_last_state(tmp_path: Path) -> None:
    """The main process may write files of a few kilobytes only, and the state is larger."""
    recipe = recipe_file(tmp_path, steps=20)
    processes = small_jobs.start(2, "-c", LIMITED, *words(tmp_path, recipe)[2:])
    errors = small_jobs.finish(processes, timeout=120 * BUSY)
    assert [process.returncode for process in processes] == [2, 2], errors
    assert "could not be written" in errors[0] and "another process of the job has ended" in errors[1]
    small_jobs.run(2, *words(tmp_path, recipe))
    assert_uninterrupted(tmp_path, steps=20)


def run_with_kills(folder: Path, kills: int, seed: int, **training: Any) -> int:
    """Run torchrun with restarts, kill workers at random moments, and return the number of kills until it ended."""
    chance, done = random.Random(seed), 0
    recipe = recipe_file(folder, **training)
    job = small_jobs.torchrun(
        "--standalone", "--nproc-per-node", "2", "--max-restarts", str(kills), *words(folder, recipe)
    )
    try:
        while job.poll() is None and done < kills:
            end = time.monotonic() + chance.uniform(0.5, 12)
            while job.poll() is None and (time.monotonic() < end or len(children(job.pid)) < 2):
                time.sleep(0.02)
            workers = children(job.pid)
            if len(workers) == 2:
                os.kill(chance.choice(workers), signal.SIGKILL)
                done += 1
                while job.poll() is None and set(children(job.pid)) & set(workers):
                    time.sleep(0.02)
        error = job.communicate(timeout=600 * BUSY)[1]
        assert job.returncode == 0, error
    finally:
        job.kill()
    return done


def test_torchrun_restarts_a_job_after_kills_at_random_moments(tmp_path: Path) -> None:
    """20 kills, in as many jobs as it takes; every result is bit-equal to an uninterrupted one."""
    kills = jobs = 0
    while kills < 20:
        folder = tmp_path / str(jobs)
        folder.mkdir()
        kills += run_with_kills(folder, 20 - kills, seed=jobs, steps=300)
        assert_uninterrupted(folder, steps=300)
        jobs += 1


def test_a_sharded_job_that_is_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """Each process writes a part of the state; those that a kill interrupts do not count."""
    training: dict[str, Any] = {"parallel": "fsdp", "steps": 200}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    small_jobs.run(2, *words(whole, recipe_file(whole, **training)))
    run_with_kills(killed, 6, seed=0, **training)
    run, expected = killed / "run", whole / "run"
    for file in ("resume.safetensors", "model.safetensors"):
        assert equal(tensors(run / file), tensors(expected / file))
    for line, other in zip(metrics(run), metrics(expected), strict=True):
        assert {**line, "seconds": 0} == {**other, "seconds": 0}
    assert not list(run.glob(".*.tmp")) and len(list(run.glob("resume-*"))) == 1


def agent(folder: Path, recipe: Path, port: int) -> subprocess.Popen[str]:
    """Start one of two torchrun agents, as on two machines."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"]
    quick = ["--rdzv-conf", "last_call_timeout=3,close_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"]
    nodes = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "10"]
    # In PyTorch 2.13, agents that share a store do not tell a new one its address again (docs/scale.md).
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return small_jobs.torchrun(*nodes, *rendezvous, *quick, *words(folder, recipe), **own_store)


def test_an_agent_leaves_and_returns(tmp_path: Path) -> None:
    """The job goes on with one machine, then with two again, and the result is that of an uninterrupted run."""
    steps = 600
    recipe, port = recipe_file(tmp_path, steps=steps), small_jobs.free_port()
    agents = [agent(tmp_path, recipe, port)]
    try:
        time.sleep(0.5)
        agents.append(agent(tmp_path, recipe, port))
        wait_for_step(tmp_path, agents)
        agents[1].terminate()
        agents[1].communicate(timeout=60 * BUSY)
        agents.append(agent(tmp_path, recipe, port))
        errors = small_jobs.finish([agents[0], agents[2]], timeout=400 * BUSY)
        assert agents[0].returncode == 0, "\n".join(errors)
    finally:
        for each in agents:
            each.kill()
    assert_uninterrupted(tmp_path, steps=steps)
