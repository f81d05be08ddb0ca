"""The thread in which engines of continuous batching compute."""

from __future__ import annotations

from threading import Condition, Thread
from typing import Protocol

import torch


class Computing(Protocol):
    """The part of an engine that the thread calls. The properties are read with `EngineThread.changed` held."""

    @property
    def has_work(self) -> bool:
        """Whether there is a turn to take, or the engine is to be ended."""
        ...

    @property
    def is_closed(self) -> bool: ...

    def run_turn(self) -> None: ...

    def end(self) -> None:
        """Fail the jobs that are not done."""
        ...


class EngineThread:
    """Runs the turns of one or more engines, one after the other, while there are engines.

    Engines of one process share it because of OpenMP: every thread that computes has a pool of `torch.get_num_threads`
    threads, and where the threads of all pools are more than the cores, they sleep between operations instead of
    waiting actively, even if only one pool is in use. With two pools on two cores a beam search took twice the time.
    """

    def __init__(self) -> None:
        self.changed = Condition()  # of the engines' queues too
        self._engines: list[Computing] = []
        self._num_threads = torch.get_num_threads()
        self._thread: Thread | None = None

    def add(self, engine: Computing) -> None:
        """Take this engine's turns from now on."""
        with self.changed:
            self._engines.append(engine)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="regard-engine", daemon=True)
                self._thread.start()

    def wait_for_end(self, engine: Computing) -> None:
        """Wait until the thread has ended a closed engine. Call it with `changed` held."""
        self.changed.notify_all()
        self.changed.wait_for(lambda: engine not in self._engines)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: any(engine.has_work for engine in self._engines))
                due = [engine for engine in self._engines if engine.has_work]
            for engine in due:
                if not engine.is_closed:
                    engine.run_turn()
                    continue
                engine.end()
                with self.changed:
                    self._engines.remove(engine)
                    self.changed.notify_all()
                    if not self._engines:
                        self._thread = None
                        return
