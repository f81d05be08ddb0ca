"""Benchmark systems in separate processes that take turns; each sleeps until it receives a request.

Separate processes keep the memory, threads and settings of one system from affecting another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HOME = Path(__file__).parent.parent
Answer = Callable[[Any], Any]


class Worker:
    """Runs `python -m MODULE WORDS...`, which answers every JSON line on its standard input with a JSON line."""

    def __init__(self, module: str, *words: str, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            cwd=HOME,
        )

    def ask(self, question: Any) -> Any:
        self.send(question)
        return self.receive()

    def send(self, question: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)

    def receive(self) -> Any:
        """The answer to the last question."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended: see above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(answer: Answer) -> None:
    """Answer requests in the worker process until standard input is closed."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":  # for the tests: echoes every request
    serve(lambda question: question)
