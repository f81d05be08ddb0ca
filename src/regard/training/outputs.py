"""The files and reports of a training run. With several processes, the main one alone writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from regard import distributed, sharding, tensor_io
from regard.files import DirectoryLock, write_text
from regard.run_dir import LOGS, RunDir
from regard.training.checkpoint import Log, LogState
from regard.training.progress import Reporter, TensorBoardWriter
from regard.training.sharded_state import ShardedStates


class RunOutputs:
    """Files, logs and reports of a run. Other processes than the main one call the same methods, which do nothing.

    `in_background`: tensors are written by a thread, while training goes on. `lock` is that of the run directory:
    nothing is written once the directory was deleted or replaced.
    """

    def __init__(self, run: RunDir, reporter: Reporter, in_background: bool, lock: DirectoryLock | None) -> None:
        self.active = distributed.is_main()
        self.run, self.lock = run, lock
        self.reporter = reporter if self.active else Reporter()
        self._writer = tensor_io.TensorWriter(in_background=in_background, check=self.ensure_held)
        self._sharded = ShardedStates(in_background, self.ensure_held)
        self._logs = {name: Log(run.path / name) for name in LOGS}
        tensorboard = self.active and run.recipe.training.tensorboard
        self._board = TensorBoardWriter(run.path / "tensorboard" if tensorboard else None)

    def ensure_held(self) -> None:
        """Raise an error if the run directory is no longer the one that was locked."""
        if self.lock is not None:
            self.lock.ensure_held()

    def say(self, line: str) -> None:
        self.reporter.say(line)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a file of tensors, whole or not at all; `then` is called once it is on disk."""
        if self.active:
            self._writer.save(path, tensors, metadata, then)

    def save_state(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Write the state of the run; of a sharded model, every process its part."""
        if any(sharding.is_sharded(tensor) for tensor in tensors.values()):
            self._writer.wait()  # a state follows the weights that were saved before it
            self._sharded.save(path, tensors, metadata)
        else:
            self.save(path, tensors, metadata)

    def write_json(self, path: Path, content: Any) -> None:
        if self.active:
            write_text(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    def check(self) -> None:
        """Raise what went wrong in writing so far."""
        self.ensure_held()
        self._writer.check()
        self._sharded.check()

    def wait(self) -> None:
        """Wait until every file is on disk."""
        self._writer.wait()
        self._sharded.wait()

    # -- logs ---------------------------------------------------------------------------------------------------------

    def measured(self, step: int, kind: str, **numbers: Any) -> None:
        """Log and report measurements of a kind ("train", "valid" or "stop")."""
        self._append("metrics.jsonl", {"step": step, "kind": kind, **numbers})
        self._board.write(step, kind, numbers)
        self.reporter.measured(step, kind, numbers)

    def samples(self, step: int, samples: list[dict[str, str]]) -> None:
        """Log and report outputs of the model, to read."""
        for sample in samples:
            self._append("samples.jsonl", {"step": step, **sample})
        self.reporter.samples(samples)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self.active:
            self.ensure_held()
            self._logs[name].append(json.dumps(line, ensure_ascii=False))

    def log_states(self) -> dict[str, LogState]:
        """Length and digest of every log, after everything is on disk."""
        return {name: log.state() for name, log in self._logs.items()} if self.active else {}

    def restore_logs(self, log_states: dict[str, LogState] | None) -> None:
        """Cut the logs back to these states: the lines after them will be written again. None: empty logs."""
        for name, log in self._logs.items() if self.active else ():
            if not log.restore(log.state() if log_states is None else log_states.get(name)):
                self.say(f"warning: {log.path} was altered after it was written: its numbers may be wrong")

    def __enter__(self) -> Self:
        self.reporter.__enter__()
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._writer.__exit__(kind, error, trace)
            if kind is None:
                self._sharded.wait()
        finally:
            self.reporter.__exit__(kind, error, trace)
