"""A run survives whatever ends it: a full disk at any write, a kill at any moment."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import FAMILIES
from safetensors import SafetensorError
from small_training import assert_same_runs, tiny

from regard import tensor_io
from regard.errors import UserError
from regard.recipes import to_toml
from regard.training import checkpoint
from regard.training.setup import train


class Disk:
    """Counts what can fail when a file is written, and lets one such call fail for want of room."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.full_at: int | None = None
        patch.setattr(os, "replace", self._failing(os.replace))
        patch.setattr(os, "fsync", self._failing(os.fsync))
        patch.setattr(tensor_io, "save_file", self._failing(tensor_io.save_file))
        patch.setattr(checkpoint, "open", self._failing(open), raising=False)  # metrics and samples are appended to

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            self.calls.append(call.__name__)
            if len(self.calls) - 1 == self.full_at:
                if call.__name__ == "save_file":  # it got half-way
                    Path(arguments[1]).write_bytes(b"half a header")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments, **named)

        return run

    def again(self, full_at: int | None) -> None:
        self.calls, self.full_at = [], full_at


@pytest.mark.invariant("failed writes lose nothing")
@pytest.mark.parametrize("every", [len(FAMILIES), pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_at_any_write_costs_nothing_but_the_time_since_the_last_save(
    recipe: Any, family: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families write the same files: every day, each write fails in one of them."""
    settings = recipe(1, steps=4, save_every=2, validate_every=2, validate_lines=1)
    whole = tmp_path / "whole"
    train(settings, whole, device="cpu", quiet=True)  # writes the token cache too, which the others read
    disk = Disk(monkeypatch)
    train(settings, tmp_path / "counted", device="cpu", quiet=True)
    kinds = list(disk.calls)
    assert set(kinds) == {"replace", "fsync", "save_file", "open"} and len(kinds) > 40
    for number in range(list(FAMILIES).index(family) % every, len(kinds), every):
        kind = kinds[number]
        run = tmp_path / f"{kind} {number}"
        disk.again(full_at=number)
        with pytest.raises(UserError, match=r"could not be written: the disk is full"):
            train(settings, run, device="cpu", quiet=True)
        assert disk.calls == kinds[: number + 1]
        for file in run.rglob("*.safetensors"):
            tensor_io.load(file)  # the old file or the new one, whole, with its checksum
        assert not list(run.rglob("*.tmp"))
        disk.again(full_at=None)
        train(settings, run, device="cpu", quiet=True)
        assert_same_runs(whole, run)


@pytest.mark.slow_families
def test_files_written_behind_the_training_are_the_same_and_fail_as_safely(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: updates go on meanwhile. After a failure nothing more is written, so that all files fit together."""
    settings = recipe(1, steps=14, save_every=2, validate_every=8, validate_lines=1)  # some snapshots go again
    names: list[str] = []
    full_at: list[int] = []
    writer, save_file = tensor_io.TensorWriter, tensor_io.save_file

    def slow(tensors: Any, file: str, **named: Any) -> None:
        time.sleep(0.02)  # so that updates overtake it
        names.append(Path(file).name)
        if len(names) - 1 in full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, file, **named)

    def trained(run: Path, in_background: bool) -> Path:
        names.clear()
        monkeypatch.setattr(tensor_io, "TensorWriter", lambda **_: writer(in_background=in_background))
        train(settings, run, device="cpu", quiet=True)
        return run

    monkeypatch.setattr(tensor_io, "save_file", slow)
    whole = trained(tmp_path / "whole", in_background=False)
    assert_same_runs(whole, trained(tmp_path / "behind", in_background=True))
    count = len(names)
    assert count > 14
    for number in (1, count - 3):
        full_at[:] = [number]
        left = []
        for in_background in (False, True):
            run = tmp_path / f"fails {number} {in_background}"
            with pytest.raises(UserError, match=r"could not be written: the disk is full"):
                trained(run, in_background)
            assert len(names) == number + 1
            files = run.rglob("*.safetensors")
            left.append({file.relative_to(run): tensor_io.read_metadata(file)["step"] for file in files})
        assert left[0] == left[1]
        full_at.clear()
        assert_same_runs(whole, trained(run, in_background=True))


def test_what_is_written_in_the_background_is_what_was_there_when_it_was_saved(tmp_path: Path) -> None:
    tensor, files = torch.zeros(3), [tmp_path / f"{n}.safetensors" for n in range(5)]
    with tensor_io.TensorWriter(in_background=True) as writer:
        for n, file in enumerate(files):
            writer.save(file, {"a": tensor.fill_(n)}, {"step": n})
        tensor.fill_(-1)
    for n, file in enumerate(files):
        tensors, about = tensor_io.load(file)
        assert about == {"step": n} and tensors["a"].tolist() == [n] * 3
    with pytest.raises(UserError), tensor_io.TensorWriter(in_background=True) as writer:
        writer.save(tmp_path / "0.safetensors" / "no folder", {"a": tensor}, {})


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "w.safetensors"
    old, new = {"a": torch.zeros(3)}, {"a": torch.ones(3)}
    tensor_io.save(file, old, {"step": 1})
    disk = Disk(monkeypatch)
    tensor_io.save(tmp_path / "other", new, {"step": 2})
    assert disk.calls == ["save_file", "fsync", "replace", "fsync"]
    for number in range(3):
        disk.again(full_at=number)
        with pytest.raises(UserError, match="the disk is full"):
            tensor_io.save(file, new, {"step": 2})
        tensors, about = tensor_io.load(file)
        assert torch.equal(tensors["a"], old["a"]) and about == {"step": 1}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "w.safetensors"]
    disk.again(full_at=None)
    tensor_io.save(file, new, {"step": 2})
    assert torch.equal(tensor_io.load(file)[0]["a"], new["a"])


def test_the_librarys_own_words_for_a_full_disk_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors hands on the system's reason as text, the way Rust writes it."""

    def save_file(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensor_io, "save_file", save_file)
    with pytest.raises(UserError, match=r"w\.safetensors could not be written: the disk is full"):
        tensor_io.save(tmp_path / "w.safetensors", {"a": torch.zeros(3)}, {})


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "w.safetensors"
    tensor_io.save(file, {"a": torch.arange(100.0)}, {})
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[:-7]
    elif damage == "flipped":
        content[-5] ^= 1
    else:
        content = bytearray(b"" if damage == "empty" else b"hello")
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"w\.safetensors (is damaged|was altered)"):
        tensor_io.load(file)


SCRIPT = """
import sys
from regard.recipes import load
from regard.training.setup import train
from regard.training.loop import Trainer

start = Trainer.train
Trainer.train = lambda self: (print("go", flush=True), start(self))
train(load(sys.argv[1]), sys.argv[2], device="cpu", quiet=True)
"""


class Sitting:
    """A training run in a process of its own."""

    def __init__(self, recipe: Path, run: Path, cache: Path) -> None:
        self.began = time.monotonic()
        environment = {**os.environ, "REGARD_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, str(recipe), str(run)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def wait_for_steps(self) -> float:
        """Seconds until the first step."""
        assert self.process.stdout is not None and self.process.stdout.readline() == "go\n"
        return time.monotonic() - self.began

    def kill_after(self, seconds: float) -> bool:
        """Whether it was still running by then."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return True
        assert self.process.returncode == 0
        return False


FORKED = """
import os, signal, sys, threading, time
from random import Random
import torch
from regard.recipes import load
from regard.training.setup import train
from regard.training.loop import Trainer

torch.set_num_threads(1)
settings, whole, parts, longest = load(sys.argv[1]), sys.argv[2], sys.argv[3], 0.0
began = time.monotonic()
train(settings, whole, device="cpu", quiet=True)
longest, random = time.monotonic() - began, Random()
for number in range(4):
    child = os.fork()  # all is imported already, so that a sitting is short
    if child == 0:
        train(settings, parts, device="cpu", quiet=True)
        os._exit(0)
    time.sleep(random.uniform(0, longest / 2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
train(settings, parts, device="cpu", quiet=True)
"""


def test_a_run_killed_at_four_random_moments_ends_like_one_that_was_not(tmp_path: Path) -> None:
    """The short version of the next one."""
    settings = tiny("transformer", 1, tmp_path, steps=30, save_every=2, validate_every=3, accumulate=1)
    file, whole, parts = tmp_path / "recipe.toml", tmp_path / "whole", tmp_path / "parts"
    file.write_text(to_toml(settings))
    command = [sys.executable, "-c", FORKED, str(file), str(whole), str(parts)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=300)
    assert_same_runs(whole, parts)
    assert not [path for path in parts.rglob(".*") if path.name != ".lock"]


@pytest.mark.slow
def test_a_run_killed_at_twenty_random_moments_ends_like_one_that_was_not(recipe: Any, tmp_path: Path) -> None:
    """Killed while starting (every fourth time) and while training, which is saving most of the time."""
    settings = recipe(1, steps=400, save_every=2, validate_every=3, accumulate=1)
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(settings))
    whole, parts, cache = tmp_path / "whole", tmp_path / "parts", tmp_path / "cache"
    sitting = Sitting(file, whole, tmp_path / "other cache")
    startup = sitting.wait_for_steps()
    assert not sitting.kill_after(600)
    training = time.monotonic() - sitting.began - startup
    random, kills = Random(), 0  # other moments each time
    while kills < 20:
        sitting = Sitting(file, parts, cache)
        if kills % 4 == 0:
            killed = sitting.kill_after(random.uniform(0, 1.2 * startup))
        else:
            sitting.wait_for_steps()
            killed = sitting.kill_after(random.uniform(0, training / 10))
        if not killed:
            break
        kills += 1
    assert kills >= 12
    assert not Sitting(file, parts, cache).kill_after(600)
    assert_same_runs(whole, parts)
