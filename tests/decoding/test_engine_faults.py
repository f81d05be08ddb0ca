"""The engine of continuous batching when admissions fail, callers give up, or too many sentences wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from tests.decoding.test_continuous import Caller, engine_of, request_of
from tests.decoding.test_static_search import model_of, sources

from regard import cancel
from regard.decoding import continuous, search
from regard.decoding.continuous import Engine, EngineRunner, QueueFull
from regard.decoding.running_batch import Job, RunningBatch
from regard.decoding.static_search import StaticSearch
from regard.text import EOS

LONG = {"beam": 2, "min_length": 9, "max_extra": 12}


@pytest.mark.parametrize("place", ["_open", "write"])
def test_an_admission_that_fails_ends_only_its_own_sentences(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    caller = Caller(model_of("transformer").double())
    caller.submit(*(request_of(line, n, LONG) for n, line in enumerate(sources(4))))  # one more row is not dropped
    caller.engine.turn()
    owner = RunningBatch if place == "_open" else StaticSearch
    real = getattr(owner, place)

    def broken(*arguments: object) -> None:
        real(*arguments)  # so that rows are already written
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, broken)
        caller.submit(request_of([7, EOS], 4, LONG))
        caller.engine.turn()
    assert isinstance(caller.found.pop(4), RuntimeError)
    assert caller.engine.running == 4
    (batch,) = caller.engine._batches.values()
    assert batch.search is not None
    assert batch.search.hypotheses.done.tolist() == [job is None for job in batch.jobs]
    caller.run()
    caller.requests.pop()
    caller.check()


def test_a_sentence_that_cannot_join_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(model_of("transformer").double())
    real = RunningBatch._open

    def fails(self: RunningBatch, jobs: Sequence[Job]) -> object:
        if any(job.number == 2 for job in jobs):
            raise RuntimeError("no such kernel")
        return real(self, jobs)

    monkeypatch.setattr(RunningBatch, "_open", fails)
    caller.submit(*(request_of(line, n, LONG) for n, line in enumerate(sources(3))))  # they arrive in the same turn
    caller.run()
    assert isinstance(caller.found.pop(2), RuntimeError)
    caller.requests.pop()
    caller.check()


@pytest.mark.parametrize("failures", [1, 2])
def test_without_memory_graphs_are_freed_and_an_admission_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    caller = Caller(model_of("transformer").double())
    released: list[bool] = []
    monkeypatch.setattr(caller.engine.runner, "release", lambda: released.append(True))
    left, real = [failures], RunningBatch._open

    def scarce(self: RunningBatch, jobs: object) -> object:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, jobs)  # type: ignore[arg-type]

    monkeypatch.setattr(RunningBatch, "_open", scarce)
    caller.submit(request_of([5, 6, EOS], 0, LONG))
    caller.run()
    assert len(released) == failures
    assert isinstance(caller.found[0], torch.OutOfMemoryError) == (failures == 2)
    caller.submit(request_of([7, EOS], 1, LONG))
    caller.run()
    if failures == 1:
        caller.check()
    else:
        assert isinstance(caller.found[1], list)


def test_a_caller_with_few_sentences_does_not_wait_for_one_with_many() -> None:
    caller = Caller(model_of("transformer").double(), rows=1)
    caller.submit(*(request_of(line, n, {"beam": 2}) for n, line in enumerate(sources(8))))
    caller.submit(request_of([5, EOS], 8, {"beam": 2}))
    while 8 not in caller.found:
        caller.engine.turn()
    assert len(caller.found) <= 3
    caller.run()
    caller.check()


def test_too_many_waiting_sentences_are_refused_and_withdrawn_ones_do_not_count() -> None:
    engine = Engine(model_of("transformer").double(), rows=1, queue=8)
    runner = EngineRunner(engine)

    def jobs(count: int) -> list:
        request = request_of([5, EOS], 0, {"beam": 2})
        return [runner._jobs(request, request.constraints(), lambda update: None, False)[0] for _ in range(count)]

    first = jobs(50)
    engine.submit(first)  # one caller fills a quarter of the queue only: others are not refused because of it
    assert (engine.waiting, engine.queued) == (50, 2)
    for count in (1, 2, 3):
        engine.submit(jobs(count))
    assert engine.queued == 7
    with pytest.raises(QueueFull):
        engine.submit(jobs(2))
    engine.submit(jobs(1))
    with pytest.raises(QueueFull):
        engine.submit(jobs(1))
    engine.withdraw(first)
    assert (engine.waiting, engine.queued) == (7, 6)
    engine.submit(jobs(1))


def test_a_cancelled_caller_is_woken_without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous, "CANCEL_SECONDS", 1000.0)
    model = model_of("transformer").double()
    endless = request_of([5, 6, EOS], 0, {"beam": 2, "min_length": 900, "max_extra": 1000})
    cancellation = cancel.Cancellation()
    threading.Timer(0.2, cancellation.cancel, ["time is up"]).start()
    began = time.monotonic()
    with engine_of(model) as run:
        with pytest.raises(cancel.Cancelled, match="time is up"), cancel.cancellable(cancellation):
            search(model, endless, run=run)
        with pytest.raises(cancel.Cancelled), cancel.cancellable(cancellation):  # it was cancelled before
            search(model, endless, run=run)
    assert time.monotonic() - began < 60
