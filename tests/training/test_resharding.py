"""The state of a sharded run: written by any number of processes, and read by any other number."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_jobs
import torch
from small_runs import metrics, small, tensors, train_run
from torch.distributed import checkpoint as dcp

from regard import tensor_io
from regard.errors import UserError
from regard.run_dir import RunDir
from regard.tensor_io import remove_shards
from regard.training.sharded_state import ShardedStates
from regard.verify import verify

JOB = small_jobs.here(str(Path(__file__).with_name("resume_job.py")))
# The default learning rate of so small a model (a peak of 0.18) makes training unstable: after step 16 a deviation of
# 2e-9 grows by a factor of about 30 every two steps, also in one process alone. At 0.01 it stays below 1e-9.
RATE = {"learning_rate": 0.01}
TRAINING: dict[str, Any] = {**RATE, "accumulate": 4, "ema": 0.9, "average": 3, "validate_lines": 2, "save_every": 2}


def train_in_job(world: int, folder: Path, run: Path, **training: Any) -> None:
    small_jobs.run(world, JOB, str(folder), str(run), json.dumps({**TRAINING, **training}))


def assert_close(run: RunDir, other: RunDir) -> None:
    """The same states and measurements, in float64 (biases of keys differ by rounding errors that Adam scales)."""
    one, two = tensors(run.resume), tensors(other.resume)
    last = tensor_io.read_metadata(other.resume)["step"]
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], atol=1e-7, rtol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    lines, others = ([m for m in metrics(r.path, "valid") if m["step"] == last] for r in (run, other))
    assert [line["weights"] for line in lines] == ["ema", "average of 3"]
    for line, expected in zip(lines, others, strict=True):
        for key in expected.keys() - {"seconds"}:
            value = expected[key]
            assert line[key] == (pytest.approx(value, abs=2e-6) if isinstance(value, float) else value), key


@pytest.fixture(autouse=True)
def float64_in_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that two processes trained for 6 steps, sharded."""
    folder = tmp_path_factory.mktemp("sharded")
    small(folder)  # writes the held-out pairs
    train_in_job(2, folder, folder / "run", steps=6, parallel="fsdp")
    return folder


def test_the_state_is_in_shards_and_one_process_continues_it(sharded: Path, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(sharded / "run", tmp_path / "run"))
    facts = tensor_io.read_metadata(run.resume)
    files = [run.path / name for name in facts["shards"]]
    assert len(files) == 2 and {file.parent for file in files} == set(run.path.glob("resume-*"))
    whole = tensors(run.resume)
    for name, weight in run.fresh_model().named_parameters():  # each process has written about half of every tensor
        parts = [tensor_io.elements(file, f"optimizer.{name}.exp_avg") for file in files]
        assert sum(parts) == 2 * weight.numel() and max(parts) <= 2 * (weight[:1].numel() + weight.numel() / 2)
        assert whole[f"model.{name}"].shape == weight.shape
    expected = train_run(small(sharded, **TRAINING, steps=12), tmp_path / "expected")
    resumed = train_run(small(sharded, **TRAINING, steps=12), run.path)
    assert_close(resumed, expected)
    assert not list(run.path.glob("resume-*"))  # the state is whole again


def test_shards_are_weights_like_any_others_and_are_verified(sharded: Path, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(sharded / "run", tmp_path / "run"))
    last = tensor_io.model_tensors(run.model(weights="last"))
    snapshot = tensors(run.snapshot(6))
    assert all(torch.equal(tensor, snapshot[name]) for name, tensor in last.items())
    assert {finding.status for finding in verify(run.path)} == {"ok"}
    first, second = sorted(run.path.glob("resume-*/*"))
    content = bytearray(first.read_bytes())
    content[-3] ^= 1
    first.write_bytes(content)
    assert [f.file for f in verify(run.path) if f.status == "damaged"] == [run.resume]
    with pytest.raises(UserError, match=f"{first.name} was altered after it was written"):
        tensors(run.resume)
    content[-3] ^= 1
    first.write_bytes(content)
    second.unlink()
    with pytest.raises(UserError, match=f"{second.name} could not be read"):
        tensors(run.resume)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_that_does_not_fit_on_the_disk_leaves_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(writer: Any, *_: Any) -> None:
        (Path(writer.path) / "shard-00001-model-00001-of-00001.safetensors").write_bytes(bytes(1000))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp.HuggingFaceStorageWriter, "write_data", write_half)
    states = ShardedStates(in_background=False, check=lambda: None)
    with pytest.raises(UserError, match="rank 0 could not write its part: the disk is full"):
        states.save(tmp_path / "resume.safetensors", {"weight": torch.zeros(3)}, {"step": 3})
    assert not list(tmp_path.iterdir())


def test_folders_of_other_names_are_kept(tmp_path: Path) -> None:
    kept = ["resume-backup", "resume-00000006-0123abcd-copy", "resume-6-0123abcd", "resume-00000008-89abcdef"]
    for name in [*kept, "resume-00000006-0123abcd", "resume-123456789-0123abcd"]:
        (tmp_path / name).mkdir()
    (tmp_path / "resume-00000004-00000000").symlink_to("resume-backup")
    (tmp_path / "resume-00000002-00000000").touch()
    remove_shards(tmp_path / "resume.safetensors", but=["resume-00000008-89abcdef"])
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {*kept, "resume-00000004-00000000", "resume-00000002-00000000"}


@pytest.mark.slow
def test_two_processes_then_one_then_four_train_as_one_does(sharded: Path, tmp_path: Path) -> None:
    """DCP reshards: tensors of 16 and of 8 rows in two parts, whole, and in four parts."""
    expected = train_run(small(sharded, **TRAINING, steps=24), tmp_path / "expected")
    run = Path(shutil.copytree(sharded / "run", tmp_path / "run"))
    train_run(small(sharded, **TRAINING, steps=10), run)
    train_in_job(4, sharded, run, steps=14, parallel="fsdp")
    train_in_job(3, sharded, run, steps=18, parallel="fsdp", reshard=False)
    train_in_job(2, sharded, run, steps=22, parallel="ddp")
    assert tensor_io.read_metadata(run / "resume.safetensors")["shards"] == {}
    train_in_job(2, sharded, run, steps=24, parallel="fsdp")
    assert_close(RunDir(run), expected)
