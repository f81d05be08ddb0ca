"""Tiny random runs, and their server: called in this process, or listening in a thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny_runs import make_run

if "CI" not in os.environ:  # CI must have it
    pytest.importorskip("fastapi", reason="the page needs regard[serve]")

from fastapi.testclient import TestClient

from regard.server.page_app import application
from regard.server.page_server import open_server
from regard.server.process import Server

RUNS = {
    "tiny-transformer": "transformer",
    "tiny-additive": "recurrent (additive)",
    "tiny-gpt": "gpt",
    "tiny-bert": "bert (fill)",
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / name, family).path for name, family in RUNS.items()]


@pytest.fixture(scope="session")
def client(runs: list[Path]) -> TestClient:
    """A client of the application, with the host name 127.0.0.1."""
    return TestClient(application(runs, text="this cat", device="cpu"), base_url="http://127.0.0.1")


@pytest.fixture(scope="session")
def server(runs: list[Path]) -> Iterator[Server]:
    """A listening server, for tests that need real connections."""
    made = open_server(runs, device="cpu")
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 300
    while not made.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made.started
    yield made
    made.stop()
    thread.join(300)
    assert not thread.is_alive()
