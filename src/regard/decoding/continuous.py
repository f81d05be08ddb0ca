"""Continuous batching: a sentence joins a running search between two steps, and leaves it when it is done.

`Engine` holds the queue, and a `RunningBatch` for every kind of search. `EngineRunner` is a `Runner` over it, so that
all callers of `search` can share its batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import torch

from regard import cancel
from regard.decoding.constraints import Constraints
from regard.decoding.cuda_graphs import CapturedRunner
from regard.decoding.engine_thread import EngineThread
from regard.decoding.results import Hypothesis
from regard.decoding.running_batch import Job, JobUpdate, RunningBatch
from regard.decoding.search import Results, SearchRequest, Stepper
from regard.decoding.static_search import StaticRunner
from regard.decoding.watching import Beams, Watch
from regard.errors import UserError, is_out_of_memory
from regard.models.base import SequenceModel
from regard.packed import PackedTokens

MAX_ROWS = 64  # sentences in all batches together
MAX_QUEUE = 1 << 20  # sentences that wait
CALLER_SHARE = 4  # one caller fills at most a quarter of the queue, however many sentences it has
PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}  # source tokens that may join between two steps, which others wait for
CANCEL_SECONDS = 0.2  # between two checks whether a caller has cancelled, where cancelling cannot wake it


class QueueFull(Exception):
    """An engine for which too many jobs wait already."""


@dataclass
class Turn:
    """The work of one turn of the engine."""

    rows: int  # sentences in the batches
    tokens: int  # that sentences have got


class Engine:
    """Searches with one model for many callers at once, in continuous batches, from `start` on.

    Every turn, waiting jobs join, and each batch takes a step. Callers take turns, so that a caller with few jobs does
    not wait for all jobs of another. How many sentences are in the batches, and how many wait, is limited; a caller
    fills a part of the queue only (`CALLER_SHARE`), so that others are not refused because of it.
    Engines of one process share a thread to compute in (`EngineThread` says why).
    """

    def __init__(
        self,
        model: SequenceModel,
        *,
        precision: str = "auto",
        rows: int = MAX_ROWS,
        queue: int = MAX_QUEUE,
        observe: Callable[[Turn], None] | None = None,
        runner: StaticRunner | None = None,
        thread: EngineThread | None = None,
    ) -> None:
        self.device = next(model.parameters()).device
        if not model.has_static_state:
            raise UserError(f"{type(model).__name__} has no decoding state that sentences can join")
        self.model, self.rows, self.queue, self.observe = model, rows, queue, observe
        if runner is None:
            on_gpu = self.device.type == "cuda"
            runner = (
                CapturedRunner(precision in ("auto", "bf16"), coarse=True)
                if on_gpu
                else StaticRunner(softmax_last=False)
            )
        self.runner = runner
        self._waiting: deque[deque[Job]] = deque()  # the jobs of each caller; callers take turns
        self._count = 0  # jobs that wait
        self._joining: list[Job] = []  # those that this turn has taken
        self._batches: dict[object, RunningBatch] = {}
        self.thread, self.is_closed = thread or EngineThread(), False
        self._changed = self.thread.changed

    @property
    def waiting(self) -> int:
        """Jobs that have not joined a batch."""
        return self._count

    @property
    def queued(self) -> int:
        """Jobs that wait, as the limit of the queue counts them: those of one caller up to its share."""
        return sum(map(self._places, list(self._waiting)))

    def _places(self, jobs: Collection[Job]) -> int:
        return min(len(jobs), max(1, self.queue // CALLER_SHARE))

    @property
    def running(self) -> int:
        """Sentences in the batches."""
        return sum(len(batch.live) for batch in list(self._batches.values()))

    @property
    def has_work(self) -> bool:
        """Whether there is a turn to take, or the engine is to be ended."""
        return bool(self.is_closed or self._waiting or self._batches)

    def start(self) -> Engine:
        self.thread.add(self)
        return self

    def close(self) -> None:
        """End the engine; jobs that are not done fail."""
        with self._changed:
            self.is_closed = True
            self.thread.wait_for_end(self)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Let the jobs of a caller wait; they are refused if others wait and there would be too many."""
        with self._changed:
            if self.is_closed:
                raise RuntimeError("the engine is closed")
            queued = self.queued
            if queued and queued + self._places(jobs) > self.queue:
                raise QueueFull(f"{self._count} sentences are waiting")
            self._waiting.append(deque(jobs))
            self._count += len(jobs)
            self._changed.notify_all()

    def withdraw(self, jobs: Sequence[Job]) -> None:
        """Forget the jobs of a caller that no longer waits for them."""
        for job in jobs:
            job.cancelled = True  # a batch drops them before its next step
        with self._changed:
            waiting = (deque(job for job in jobs if not job.cancelled) for jobs in self._waiting)
            self._waiting = deque(jobs for jobs in waiting if jobs)
            self._count = sum(map(len, self._waiting))

    def run_turn(self) -> None:
        """Take a turn; if it fails, all jobs fail with it."""
        try:
            self.turn()
        except Exception as error:
            self._fail(error)

    def end(self) -> None:
        """Fail the jobs that are not done."""
        ended = RuntimeError("the engine was closed")
        for batch in self._batches.values():
            batch.fail(ended)
        for job in self._take_waiting():
            job.on_update(JobUpdate(job.number, outcome=ended))

    def _take_waiting(self) -> list[Job]:
        """Remove all waiting jobs; return them."""
        jobs = [job for jobs in self._waiting for job in jobs]
        self._waiting.clear()
        self._count = 0
        return jobs

    def _fail(self, error: Exception) -> None:
        """End all jobs with an error, and begin again without batches."""
        with self._changed:
            jobs = [job for batch in self._batches.values() for job in batch.jobs if job is not None]
            jobs = list(dict.fromkeys([*jobs, *self._joining, *self._take_waiting()]))
            self._batches, self._joining = {}, []
        for job in jobs:
            with suppress(Exception):  # a callback that fails must not keep the others from being called
                job.on_update(JobUpdate(job.number, outcome=error))

    def turn(self) -> None:
        """Let jobs join, and take a step in every batch."""
        tokens, rows = 0, 0
        with torch.inference_mode(), self.runner.session(self.model) as model:
            for key, jobs in self._arrivals().items():
                batch = self._batches.get(key) or RunningBatch(model, self.runner, self.device)
                self._batches[key] = batch
                self._admit(batch, jobs)
            for key, batch in list(self._batches.items()):
                rows += len(batch.live)
                try:
                    tokens += batch.advance() if batch.search is not None else 0
                except Exception as error:
                    batch.fail(error)
                    self._release(error)
                if batch.search is None:
                    del self._batches[key]
        if self.observe is not None:
            self.observe(Turn(rows, tokens))

    def _admit(self, batch: RunningBatch, jobs: list[Job], retry: bool = True) -> None:
        """Let jobs join a batch; `retry`: once more if memory ran out. If it fails with several, each is tried alone.

        A job that cannot join ends with the error.
        """
        try:
            batch.admit(jobs)
        except Exception as error:
            if self._release(error) and retry:
                self._admit(batch, jobs, retry=False)
            elif len(jobs) > 1:
                for job in jobs:
                    self._admit(batch, [job], retry=False)
            else:
                jobs[0].on_update(JobUpdate(jobs[0].number, outcome=error))

    def _release(self, error: Exception) -> bool:
        """Free memory if the error is that there is none left; return whether it is."""
        if is_out_of_memory(error):
            self.runner.release()
            return True
        return False

    def _arrivals(self) -> dict[object, list[Job]]:
        """Take the jobs that join now, by their keys."""
        arrivals: dict[object, list[Job]] = {}
        free_rows, budget = self.rows - self.running, PREFILL_TOKENS[self.device.type]
        with self._changed:
            self._joining = []
            while self._waiting and free_rows > 0 and budget > 0:
                caller = self._waiting.popleft()
                job = caller.popleft()
                self._count -= 1
                if caller:
                    self._waiting.append(caller)
                self._joining.append(job)
                if not job.cancelled:
                    arrivals.setdefault(job.key, []).append(job)
                    free_rows, budget = free_rows - 1, budget - len(job.source)
        return arrivals


def _constraints_of(constraints: Constraints, number: int) -> Constraints:
    """The constraints of one sentence of a search."""
    selected = constraints.select(torch.tensor([number], device=constraints.limit.device))
    terms = None if selected.terms is None or not selected.terms.any_term else selected.terms
    return replace(selected, longest=int(selected.limit), terms=terms)


class EngineRunner:
    """Runs searches in the batches of an engine; pass it to `search` as `run`, with a source on the host.

    A watched search has one beam. Its watcher is called in the thread of the caller.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(
        self, model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None
    ) -> Results:
        events: SimpleQueue[JobUpdate | None] = SimpleQueue()
        jobs = self._jobs(request, constraints, events.put, watch is not None)
        results: Results = {}
        pending = {job.number: PendingJob(job, watch) for job in jobs}
        with cancel.woken(lambda: events.put(None)) as is_woken:
            self.engine.submit(jobs)
            try:
                while len(results) < len(jobs):
                    cancel.check()
                    with suppress(Empty):
                        update = events.get(timeout=None if is_woken else CANCEL_SECONDS)
                        if update is not None and update.number not in results:
                            outcome = pending[update.number].receive(update)
                            results |= {} if outcome is None else {update.number: outcome}
            except BaseException:
                self.engine.withdraw(jobs)
                raise
        return results

    def _jobs(
        self, request: SearchRequest, constraints: Constraints, on_update: Callable[[JobUpdate], None], streams: bool
    ) -> list[Job]:
        first, lines, seeds, banned = request.first_tokens(), request.line_numbers(), request.seeds(), request.banned
        jobs = []
        if not isinstance(request.source, PackedTokens):
            raise TypeError("continuous batching is for sources of tokens")
        for n, source in enumerate(request.source.layout.split(request.source.ids)):
            job = Job(
                n, source.tolist(), request.settings, request.nbest, _constraints_of(constraints, n), first[n],
                lines[n], seeds[n], tuple(banned), on_update, streams,
            )  # fmt: skip
            if streams and job.beams > 1:
                raise ValueError("a watched search in an engine has one beam")
            jobs.append(job)
        return jobs


@dataclass
class PendingJob:
    """A job that its caller waits for, and its tokens so far."""

    job: Job
    watch: Watch | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def receive(self, update: JobUpdate) -> list[Hypothesis] | None:
        """Return the outcome if the job has ended, also because the watcher stops it."""
        if isinstance(update.outcome, Exception):
            raise update.outcome
        if self.watch is None:
            return update.outcome
        new, logprobs = update.tokens, update.logprobs
        if update.outcome is not None:  # the last token ends the hypothesis; on a GPU there may be others before it
            best = update.outcome[0]
            rest = slice(len(self.tokens), len(best.logprobs) - 1)
            new, logprobs = best.tokens[rest], best.logprobs[rest]
        for token, logprob in zip(new, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            beams = Beams(torch.tensor([[self.tokens]]), torch.ones(1, 1, dtype=torch.bool))
            stopped = self.watch([self.job.number], beams)
            if stopped is not None and bool(stopped.any()):
                self.job.cancelled = True
                alpha = self.job.settings.length_penalty
                return [Hypothesis.of(self.tokens, self.logprobs, alpha, finished=False)]
        return update.outcome
