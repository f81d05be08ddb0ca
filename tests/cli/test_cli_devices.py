"""`regard train --devices`: what torchrun is given, and errors."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from regard.cli import processes


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Calls of torchrun, which starts nothing."""
    calls: list[list[str]] = []
    monkeypatch.setattr(processes, "torchrun", calls.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    return calls


def test_devices_is_short_for_torchrun(regard: Any, started: list[list[str]], tmp_path: Any) -> None:
    out, changes = tmp_path / "run", ["--set", "training.steps=5", "--set", "text.unit=char", "--seed", 3]
    result = regard(
        "train", "copy", "--devices", 4, "--device", "cpu", "--out", out, *changes, "--threads", 1, "--quiet"
    )
    assert (result.status, result.out, result.err) == (0, "", "")
    (words,) = started
    assert words[:5] == ["--standalone", "--nproc-per-node", "4", "-m", "regard"]
    sets = ["training.steps=5", "text.unit=char", "training.seed=3"]
    expected = ["train", "copy", "--out", str(out), "--device", "cpu", *(w for s in sets for w in ("--set", s))]
    assert words[5:] == [*expected, "--threads", "1", "--quiet"]
    assert os.environ["OMP_NUM_THREADS"] == str(max((os.cpu_count() or 1) // 4, 1)) and not out.exists()


def test_one_device_needs_no_torchrun(
    regard: Any, started: list[list[str]], train_copy: list[str], tmp_path: Any
) -> None:
    result = regard(*train_copy, "--devices", 1, "--device", "cpu", "--out", tmp_path / "run", "--quiet")
    assert result.status == 0 and not started and (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "3", "--device", "cuda"], "--devices 3, but this machine has 2 GPUs"),
        (["--devices", "2", "--device", "cuda:1"], "--device cuda:1 is one device: use --device cuda with --devices"),
        (["--devices", "2", "--set", "training.step=5"], "training.step"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(
    words: list[str], message: str, regard: Any, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert message in regard("train", "copy", *words).error and not started


def test_devices_under_torchrun_is_a_mistake(
    regard: Any, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "leave it out under torchrun" in regard("train", "copy", "--devices", 2).error and not started
