"""A few seconds of the campaign: hostile files, requests and command lines, the same ones every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_few_hostile_files_requests_and_command_lines() -> None:
    """In a process of its own, which forks one for every trial: see tests/campaign."""
    command = [sys.executable, "-m", "tests.campaign", "fuzz", "--count", "6", "--seed", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REGARD_CACHE": ""}
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
