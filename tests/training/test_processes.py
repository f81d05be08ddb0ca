"""Several processes train one model: the same batches, losses, gradients and weights as one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import metrics, small, tensors, train_run
from torch import Tensor

from regard import distributed
from regard.accelerate.overlapped_sums import OverlappedSums
from regard.data.packing import Packer
from regard.data.token_store import TokenStore
from regard.errors import Interrupted, UserError
from regard.files import DirectoryLock
from regard.models import build
from regard.recipes.schema import Recipe, TrainingSettings
from regard.training.captured_step import make_step
from regard.training.loop import Trainer
from regard.training.parallel_step import clip_parts

STOPPED_AT = 6


def updates(accumulate: int, folder: Path) -> dict[str, Tensor]:
    """Run three steps in float64 on this process's share of the batches; return losses, gradients and weights."""
    sentences = [[4 + (3 * n + i) % 20 for i in range(2 + n % 7)] + [2] for n in range(60)]
    packer = Packer([TokenStore.of(sentences, sentences)], [1.0], target_budget=48, seed=1)
    torch.manual_seed(0)
    model = build(small(folder).model, 24, 24, True).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    settings, device = TrainingSettings(precision="fp32", accumulate=accumulate), torch.device("cpu")
    # as in captured steps, whose sums begin during the backward pass: here in about 30 buckets
    parallel = OverlappedSums(model, None, bucket_bytes=4000) if distributed.is_initialised() else None
    step = make_step(model, optimizer, None, settings, device, parallel=parallel)
    recorded: dict[str, Tensor] = {}
    shares = packer.shares(accumulate=accumulate, rank=distributed.rank(), world=distributed.world_size())
    for number, share in enumerate(islice(shares, 3), 1):
        plain_step = optimizer.step

        def record_grads(number: int = number, plain_step: Any = plain_step) -> None:
            recorded.update(
                {f"grad {number} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )
            plain_step()

        optimizer.step = record_grads  # type: ignore[method-assign, assignment]
        recorded[f"targets {number}"] = torch.tensor(step(share.batches, number, 1e-2, share.idle))
        optimizer.step = plain_step  # type: ignore[method-assign]
        recorded[f"loss {number}"] = torch.tensor(distributed.all_sum(step.loss.item()), dtype=torch.float64)
    return recorded | {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}


def recipe(folder: Path) -> Recipe:
    return small(folder, accumulate=2, ema=0.9, max_grad_norm=1.0, validate_lines=2)


def worker(rank: int, world: int, folder: Path) -> None:
    """Run one process of the test."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.save({n: updates(n, folder) for n in (1, 3)}, folder / f"updates-{rank}.pt")
    results: dict[str, Any] = {}
    try:
        with distributed.main_first():
            raise UserError("the disk is full" if distributed.is_main() else "not reached")
    except UserError as error:
        results["failed"] = str(error)
    results["flags"] = distributed.any_of(rank == 1, False)
    results["from main"] = distributed.broadcast(f"rank {rank}")
    part = torch.tensor([[3.0, 4.0][rank]])  # of a gradient of norm 5
    results["norm"], results["clipped"] = clip_parts([part, torch.zeros(0)], 1.0).item(), part.item()
    update = Trainer._take_step

    def stop_one_rank(self: Trainer, share: Any) -> None:
        update(self, share)
        if self.progress.step == STOPPED_AT and rank == world - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer._take_step = stop_one_rank  # type: ignore[method-assign]
    try:
        train_run(recipe(folder), folder / "run", quiet=False)
    except Interrupted as stop:
        results["stopped"] = [str(stop), stop.status]
    (folder / f"results-{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the processes do: other numbers of threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """Run two processes; return their folder and the standard error of each."""
    folder = tmp_path_factory.mktemp("job")
    recipe(folder)  # writes the held-out pairs before the processes read them
    command = [sys.executable, __file__]
    processes = [
        subprocess.Popen([*command, str(rank), "2", str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    yield folder, printed


@pytest.mark.parametrize("accumulate", [1, 3])  # with 1 micro-batch, one process has an empty share
def test_two_processes_have_the_loss_gradients_and_weights_of_one(accumulate: int, job: tuple[Path, list[str]]) -> None:
    folder, _ = job
    expected = updates(accumulate, folder)
    assert expected["grad 1 encoder.0.self_attn.out_proj.weight"].abs().max() > 1e-3
    for rank in range(2):
        recorded = torch.load(folder / f"updates-{rank}.pt")[accumulate]
        assert recorded.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(recorded[name], tensor, atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_a_signal_to_one_process_stops_all_and_one_process_can_resume(
    job: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Bit for bit as in one process: with two micro-batches a step, sums have only one order."""
    folder, _ = job
    for rank in range(2):
        results = json.loads((folder / f"results-{rank}.json").read_text())
        message = f"stopped after step {STOPPED_AT}; the same command continues" if rank == 0 else ""
        assert results["stopped"] == [message, 128 + 15]
    assert not list((folder / "run").rglob("*.tmp"))
    uninterrupted, resumed = train_run(recipe(folder), tmp_path / "whole"), train_run(recipe(folder), folder / "run")
    one, other = tensors(uninterrupted.resume), tensors(resumed.resume)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    for line, expected in zip(metrics(resumed.path), metrics(uninterrupted.path), strict=True):
        assert {**line, "seconds": 0} == {**expected, "seconds": 0}


def test_only_the_main_process_reports(job: tuple[Path, list[str]]) -> None:
    _, (main, other) = job
    assert "held-out pairs after step 4" in main and other == ""


def test_processes_exchange_flags_and_values_and_the_failure_of_the_main_one(job: tuple[Path, list[str]]) -> None:
    folder, _ = job
    for rank in range(2):
        results = json.loads((folder / f"results-{rank}.json").read_text())
        assert results["failed"] == "the disk is full"
        assert results["flags"] == [True, False] and results["from main"] == "rank 0"


def test_a_gradient_in_parts_is_clipped_by_the_norm_of_the_whole(job: tuple[Path, list[str]]) -> None:
    folder, _ = job
    for rank, expected in enumerate((3 / 5, 4 / 5)):
        results = json.loads((folder / f"results-{rank}.json").read_text())
        assert results["norm"] == pytest.approx(5) and results["clipped"] == pytest.approx(expected, rel=1e-5)


def test_one_process_needs_no_process_group() -> None:
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
    assert distributed.all_sum(3) == 3 and distributed.any_of(True, False) == (True, False)
    assert distributed.broadcast("x") == "x" and distributed.any_(torch.tensor(True))
    with pytest.raises(ZeroDivisionError), distributed.main_first():
        raise ZeroDivisionError


def test_a_lock_belongs_to_a_job_and_admits_its_other_processes(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path, "training") as lock, DirectoryLock(tmp_path, "training", exclusive=False) as admitted:
        lock.ensure_held()
        admitted.ensure_held()
        with pytest.raises(UserError, match="another process is training there"):
            DirectoryLock(tmp_path, "training")
        (tmp_path / DirectoryLock.NAME).unlink()
        for each in (lock, admitted):
            with pytest.raises(UserError, match="deleted, moved or replaced"):
                each.ensure_held()


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
