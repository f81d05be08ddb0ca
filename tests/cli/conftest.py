"""A tiny trained run, and the command line called in this process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from regard.cli import run

TINY = [
    "model.width=16",
    "model.heads=2",
    "model.ffn_width=32",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.max_positions=40",
    "data.max_length=40",
    "training.steps=20",
    "training.validate_lines=5",
    "training.batch_tokens=256",
    "decoding.beam=2",
]


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that reports an error of the user."""
        *before, line = self.err.splitlines()
        assert self.status == 2, f"exit status {self.status}: {self.err}"
        assert line.startswith("regard: ") and line.rstrip(": ") == line, line
        others = [entry for entry in before if not entry.startswith("regard: warning: ")]
        assert not any(entry.startswith("regard: ") for entry in others), self.err
        assert "Traceback" not in self.err and self.out == "", self.err
        return line.removeprefix("regard: ")


Command = Callable[..., Outcome]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread: more make a model this small slower."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def regard(capsys: pytest.CaptureFixture[str]) -> Command:
    """Call the command line: `regard("translate", run, "a b").out`."""

    def call(*words: object, debug: bool = False) -> Outcome:
        capsys.readouterr()
        status = run([str(word) for word in words], debug)
        return Outcome(status, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Settings of a model that trains in a second or two."""
    return sets(*TINY)


@pytest.fixture(scope="session")
def train_copy(tiny: Sequence[str]) -> list[str]:
    """The command that made `trained`, without --out."""
    return ["train", "copy", *tiny, *sets("data.count=500")]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, train_copy: list[str]) -> Path:
    """A run that every test reads and none writes to."""
    path = tmp_path_factory.mktemp("cli") / "run"
    assert run([*train_copy, "--quiet", "--device", "cpu", "--out", str(path)], debug=True) == 0
    return path


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "copied"))


@pytest.fixture
def typed(regard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call the command line with these bytes on standard input."""

    def call(content: bytes, *words: object) -> Outcome:
        (tmp_path / "stdin").write_bytes(content)
        with open(tmp_path / "stdin") as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            return regard(*words)

    return call


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Start `python -m regard` in another process with pipes, which ends with the test."""
    return _start


def _start(*words: object, **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "regard", *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, encoding="utf-8", env=environment, **pipes)  # type: ignore[call-overload]
