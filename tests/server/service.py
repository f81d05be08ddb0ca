"""A running `regard serve` with tiny random models, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.server.process import Server
from regard.server.service_server import Options, open_service
from tiny_runs import make_run

KEY = "0123456789abcdef-key"


def make_runs(folder: Path) -> dict[str, Path]:
    return {
        "en-es": make_run(folder / "en-es", "transformer").path,
        "stories": make_run(folder / "stories", "gpt").path,
    }


@contextmanager
def serving(runs: dict[str, Path], **options: Any) -> Iterator[Server]:
    given = Options(**{"device": "cpu", "logs": False, "drain_seconds": 5.0, **options})
    server = open_service([f"{name}={path}" for name, path in runs.items()], given)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    try:
        yield server
    finally:
        server.stop()
        thread.join(120)
        assert not thread.is_alive()
