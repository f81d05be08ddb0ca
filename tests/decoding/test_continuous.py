"""Continuous batching finds what separate searches find, whenever the sentences arrive."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.decoding.test_static_search import ENSEMBLES, MODELS, SETTINGS, Taped, model_of, sources
from torch import Tensor

from regard import cancel
from regard.decoding import Hypothesis, SearchRequest, search
from regard.decoding.continuous import Engine, EngineRunner
from regard.decoding.engine_thread import EngineThread
from regard.decoding.running_batch import Job, JobUpdate
from regard.decoding.watching import Beams, Watch
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings
from regard.text import BOS, EOS, PAD


def request_of(line: list[int], number: int, how: dict[str, Any], **options: Any) -> SearchRequest:
    chosen = DecodingSettings.model_validate({"max_ratio": 1.0, "max_extra": 6, **how})
    nbest = 2 if chosen.method == "sample" or chosen.beam > 1 else 1
    options = {"nbest": nbest, "seed": 5, "lines": [number], **options}
    return SearchRequest(PackedTokens.from_lists([line]), chosen, banned=[PAD, BOS], **options)


class Caller:
    """Submits requests of one sentence to an engine whose turns the test takes, and compares the results."""

    def __init__(self, model: SequenceModel, **options: Any) -> None:
        self.model, self.engine = model, Engine(model, **options)
        self.requests: list[SearchRequest] = []
        self.found: dict[int, Any] = {}
        self.turns = 0

    def submit(self, *requests: SearchRequest) -> list[Job]:
        jobs: list[Job] = []
        for request in requests:
            (job,) = EngineRunner(self.engine)._jobs(request, request.constraints(), self._note, False)
            job.number = len(self.requests)
            self.requests.append(request)
            jobs.append(job)
        self.engine.submit(jobs)
        return jobs

    def _note(self, update: JobUpdate) -> None:
        assert update.number not in self.found
        self.found[update.number] = update.outcome

    def run(self) -> None:
        while self.engine.waiting or self.engine._batches:
            self.engine.turn()
            self.turns += 1

    def check(self) -> None:
        """Compare with separate searches: tokens exactly, and scores to the rounding of float32."""
        assert sorted(self.found) == list(range(len(self.requests)))
        for number, request in enumerate(self.requests):
            (expected,) = search(self.model, request)
            assert not isinstance(self.found[number], Exception), self.found[number]
            hypotheses = self.found[number]
            assert [h.tokens for h in hypotheses] == [h.tokens for h in expected]
            assert [h.finished for h in hypotheses] == [h.finished for h in expected]
            assert [h.score for h in hypotheses] == pytest.approx([h.score for h in expected], rel=1e-6)
            for one, other in zip(hypotheses, expected, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, rel=1e-5, abs=1e-6)


def staggered(model: SequenceModel, how: dict[str, Any], **options: Any) -> Caller:
    """Sentences that arrive one or two at a time, while others are at different steps."""
    caller = Caller(model, rows=5, **options)
    lines = sources(12)
    for number, line in enumerate(lines):
        caller.submit(request_of(line, number, how))
        if number % 3:
            caller.engine.turn()
    caller.run()
    return caller


EVERYDAY = [
    ("transformer", "beam"),
    ("transformer", "no repeated bigrams"),
    ("gpt", "top-k"),
    ("window", "beam"),
    ("lstm", "greedy"),
]


@pytest.mark.parametrize(("name", "how"), EVERYDAY)
def test_sentences_that_arrive_later_change_nothing(name: str, how: str) -> None:
    staggered(model_of(name).double(), SETTINGS[how]).check()


@pytest.mark.slow
@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("name", [*MODELS, *ENSEMBLES])
def test_sentences_that_arrive_later_change_nothing_in_any_family(name: str, how: str) -> None:
    staggered(model_of(name).double(), SETTINGS[how]).check()


@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_captured_steps_serve_sentences_that_arrive_later(name: str) -> None:
    staggered(model_of(name).double(), SETTINGS["beam"], runner=Taped(bf16=False, coarse=True)).check()


def arrivals(data: st.DataObject, name: str, longest: int) -> None:
    caller = Caller(model_of(name).double(), rows=data.draw(st.integers(1, 6)))
    kinds = [{"beam": 1}, {"beam": 3}, {"beam": 2, "no_repeat_ngram": 2}, {"method": "sample", "top_k": 4}]
    for number, line in enumerate(sources(data.draw(st.integers(1, 8)), seed=data.draw(st.integers(0, 99)))):
        how = {**data.draw(st.sampled_from(kinds)), "max_extra": data.draw(st.integers(1, longest))}
        prefix = data.draw(st.lists(st.integers(4, 20), max_size=3))
        seed = data.draw(st.integers(0, 3))
        caller.submit(request_of(line, number, how, prefixes=[prefix] if prefix else None, seed=seed))
        for _ in range(data.draw(st.integers(0, 4))):
            caller.engine.turn()
    caller.run()
    caller.check()


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_order_of_arrival_changes_nothing(data: st.DataObject) -> None:
    arrivals(data, data.draw(st.sampled_from(["transformer", "gpt"])), longest=12)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_order_of_arrival_changes_nothing_at_length(data: st.DataObject) -> None:
    """Long enough that the capacity grows, in more families."""
    arrivals(data, data.draw(st.sampled_from(["transformer", "gpt", "window", "lstm", "ensemble"])), longest=90)


def test_a_short_sentence_does_not_wait_for_a_long_one() -> None:
    caller = Caller(model_of("transformer").double())
    never_ends = {"beam": 2, "min_length": 40, "max_extra": 40}
    caller.submit(request_of([5, 6, EOS], 0, never_ends))
    caller.engine.turn()
    caller.submit(request_of([7, EOS], 1, {"beam": 2, "max_extra": 3}))
    for _ in range(5):
        caller.engine.turn()
    assert 0 not in caller.found and 1 in caller.found
    caller.run()
    caller.check()


def test_rows_are_limited_and_sentences_wait_in_order() -> None:
    caller = Caller(model_of("transformer").double(), rows=2)
    caller.submit(*(request_of(line, n, {"beam": 2}) for n, line in enumerate(sources(5))))
    assert caller.engine.waiting == 5
    caller.engine.turn()
    assert caller.engine.waiting == 3 and caller.engine.running <= 2
    caller.run()
    caller.check()


def test_a_cancelled_sentence_leaves_and_others_stay() -> None:
    caller = Caller(model_of("transformer").double())
    jobs = caller.submit(*(request_of(line, n, {"beam": 2, "min_length": 9}) for n, line in enumerate(sources(3))))
    caller.engine.turn()
    jobs[1].cancelled = True
    caller.engine.turn()
    assert caller.engine.running == 2
    caller.run()
    assert sorted(caller.found) == [0, 2]
    caller.requests[1:2] = []
    caller.found = {0: caller.found[0], 1: caller.found[2]}
    caller.check()


def test_an_error_ends_the_sentences_of_its_batch_only() -> None:
    caller = Caller(model_of("transformer").double())
    caller.submit(request_of([5, EOS], 0, {"beam": 2}), request_of([10_000, EOS], 1, {"beam": 3}))
    caller.run()
    assert isinstance(caller.found.pop(1), Exception)
    caller.requests.pop()
    caller.check()


def test_broken_weights_are_a_plain_error() -> None:
    model = model_of("transformer")
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(UserError, match="not a number"), engine_of(model) as run:
        search(model, request_of([5, EOS], 0, {"beam": 2}), run=run)


@pytest.mark.parametrize("place", ["session", "key", "observe"])
def test_an_error_outside_a_batch_ends_its_callers_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    model = model_of("transformer").double()
    request = request_of([5, 6, EOS], 0, {"beam": 2})

    def broken(*_: object) -> None:
        raise MemoryError("no memory left")

    with engine_of(model) as run:
        with monkeypatch.context() as patch:
            if place == "session":
                patch.setattr(run.engine.runner, "session", broken)
            elif place == "key":
                patch.setattr(Job, "key", property(broken))
            else:
                patch.setattr(run.engine, "observe", broken)
            with pytest.raises(MemoryError, match="no memory left"), cancel.cancellable(Late(20)):
                search(model, request, run=run)
        assert search(model, request, run=run)
        assert run.engine.waiting == run.engine.running == 0


class Late:
    """Whether so many seconds have passed."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() > self.end


class engine_of:
    """A running engine, as a `Runner`."""

    def __init__(self, model: SequenceModel) -> None:
        self.engine = Engine(model)

    def __enter__(self) -> EngineRunner:
        return EngineRunner(self.engine.start())

    def __exit__(self, *_: object) -> None:
        self.engine.close()


def test_threads_share_the_batches_of_one_engine() -> None:
    model, lines = model_of("transformer").double(), sources(12)
    found: dict[int, list[list[Hypothesis]]] = {}

    def translate(first: int, run: EngineRunner) -> None:
        requests = [request_of(line, first + n, {"beam": 3}) for n, line in enumerate(lines[first : first + 4])]
        for n, request in enumerate(requests):
            found[first + n] = search(model, request, run=run)

    with engine_of(model) as run:
        threads = [threading.Thread(target=translate, args=(first, run)) for first in (0, 4, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, line in enumerate(lines):
        expected = search(model, request_of(line, number, {"beam": 3}))
        assert [h.tokens for h in found[number][0]] == [h.tokens for h in expected[0]]


@pytest.mark.parametrize("steps", [1, 4])
def test_a_watcher_sees_every_token_and_stops_where_it_would(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setattr("regard.decoding.running_batch.STEPS", {"cpu": steps, "cuda": steps})
    model, line = model_of("gpt").double(), [5, 6, 7]

    def watcher(stop_at: int) -> tuple[list[list[int]], Watch]:
        seen: list[list[int]] = []

        def watch(sentences: list[int], beams: Beams) -> Tensor:
            if bool(beams.alive.any()):
                seen.append(beams.tokens[0, 0].tolist())
            return beams.alive & (beams.tokens.shape[-1] == stop_at)

        return seen, watch

    with engine_of(model) as run:
        for stop_at in (3, 6, 100):
            request = request_of(line, 0, {"beam": 1, "max_extra": 9, "min_length": 8})
            got_seen, got_watch = watcher(stop_at)
            expected_seen, expected_watch = watcher(stop_at)
            (got,) = search(model, request, watch=got_watch, run=run)
            (expected,) = search(model, request, watch=expected_watch)
            assert got_seen == expected_seen
            assert (got[0].tokens, got[0].finished) == (expected[0].tokens, expected[0].finished)
            assert got[0].score == pytest.approx(expected[0].score, rel=1e-6)


def test_a_caller_that_gives_up_frees_its_row() -> None:
    model = model_of("transformer").double()
    request = request_of([5, 6, EOS], 0, {"beam": 2, "min_length": 900, "max_extra": 1000})
    with engine_of(model) as run:
        with pytest.raises(cancel.Cancelled), cancel.cancellable(lambda: run.engine.running > 0):
            search(model, request, run=run)
        search(model, request_of([7, EOS], 1, {"beam": 2}), run=run)  # the engine goes on
        assert run.engine.running == 0


def test_a_closed_engine_ends_its_callers() -> None:
    model = model_of("transformer").double()
    engine = Engine(model).start()
    request = request_of([5, 6, EOS], 0, {"beam": 2, "min_length": 900, "max_extra": 1000})
    threading.Timer(0.2, engine.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        search(model, request, run=EngineRunner(engine))
    with pytest.raises(RuntimeError, match="closed"):
        search(model, request, run=EngineRunner(engine))


def test_engines_that_share_a_thread_take_turns_in_it() -> None:
    thread = EngineThread()
    computing: list[int] = []

    def record(*_: object) -> None:
        computing.append(threading.get_ident())

    models = [model_of("transformer").double(), model_of("gpt").double()]
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_hook(record)
    engines = [Engine(model, thread=thread).start() for model in models]
    found: dict[int, list[list[Hypothesis]]] = {}

    def translate(number: int) -> None:
        request = request_of([5, 6, 7, EOS], number, {"beam": 2, "min_length": 12, "max_extra": 20})
        found[number] = search(models[number], request, run=EngineRunner(engines[number]))

    callers = [threading.Thread(target=translate, args=(number,)) for number in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(set(computing)) == 1 and threading.get_ident() not in computing
    for number, model in enumerate(models):
        request = request_of([5, 6, 7, EOS], number, {"beam": 2, "min_length": 12, "max_extra": 20})
        assert [h.tokens for h in found[number][0]] == [h.tokens for h in search(model, request)[0]]

    engines[0].close()
    with pytest.raises(RuntimeError, match="closed"):
        translate(0)
    translate(1)  # the other one goes on
    engines[1].close()
    with pytest.raises(RuntimeError, match="closed"):
        translate(1)
    again = Engine(models[0], thread=thread).start()  # after the thread has ended
    assert search(models[0], request_of([7, EOS], 0, {"beam": 2}), run=EngineRunner(again))[0]
    again.close()
