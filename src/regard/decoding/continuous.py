"""Continuous batching: a sentence joins a running search between two steps, and leaves it when it is done.

`Lane` is such a search: the rows of its batch belong to sentences at different steps. It is the static search
(`StaticSearch`), in which a row that is done is overwritten by the next sentence. `Engine` holds the queue, and a lane
for every kind of search; `EngineRunner` is a `Runner` over it, so that whatever calls `search` can share its batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Condition, Thread

import torch

from regard import cancel
from regard.decoding.beam_state import Beams, Hypothesis
from regard.decoding.constraints import Constraints
from regard.decoding.cuda_graphs import CapturedRunner
from regard.decoding.search import Results, SearchRequest, Stepper, Watch
from regard.decoding.static_search import Sizes, StaticRunner, StaticSearch, step_key
from regard.errors import UserError
from regard.models.base import SequenceModel
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings

MAX_ROWS = 64  # sentences in all batches together
PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}  # source tokens that may join between two steps, which others wait for
STEPS = {"cpu": 1, "cuda": 4}  # between two reads of which sentences are done
COMPACT_TURNS = 8  # between two times that entries of the KV cache are dropped that no beam needs, on a CPU
CANCEL_SECONDS = 0.2  # between two looks at whether a caller still waits

Outcome = tuple[list[Hypothesis], float]  # hypotheses, best first, and the smallest margin


@dataclass(frozen=True)
class News:
    """What the engine tells the caller of a job: new tokens of the first beam, or how it ended."""

    number: int  # of the job, for its caller
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    outcome: Outcome | Exception | None = None


@dataclass(eq=False)
class Job:
    """One sentence to search for. `news` is called from the engine's thread."""

    number: int
    source: list[int]
    settings: DecodingSettings
    nbest: int
    constraints: Constraints  # of one sentence, on the host
    begin: int
    line: int
    seed: int
    banned: tuple[int, ...]
    news: Callable[[News], None]
    margins: bool = False
    streams: bool = False  # whether new tokens are news
    cancelled: bool = False  # set by the caller: it no longer waits
    told: int = 0  # tokens that were news

    @property
    def key(self) -> tuple[object, ...]:
        """Jobs with equal keys can be searched in one batch."""
        terms = None if self.constraints.terms is None else self.constraints.terms.patterns.shape[1:]
        flags = self.nbest, self.banned, self.constraints.prefix.shape[1] > 0, self.margins, terms
        return step_key(self.settings, *flags)

    @property
    def beams(self) -> int:
        return self.settings.beam if self.settings.method == "beam" else self.nbest


class Lane:
    """A running search for jobs with equal keys. The results are those of separate searches."""

    def __init__(self, model: SequenceModel, runner: StaticRunner, device: torch.device) -> None:
        self.model, self.runner, self.device = model, runner, device
        self.search: StaticSearch | None = None
        self.sizes = Sizes(0)
        self.jobs: list[Job | None] = []  # of each row
        self.steps: list[int] = []  # of each row, at most
        self.turns = 0

    @property
    def live(self) -> list[int]:
        """The rows that belong to a job."""
        return [row for row, job in enumerate(self.jobs) if job is not None]

    # -- joining -------------------------------------------------------------------------------------------------------

    def admit(self, jobs: Sequence[Job]) -> None:
        """Add jobs to the batch: encode their sources, and write them into free rows."""
        arrived, own = self._open(jobs)
        sizes = Sizes(*map(max, zip(own, self.sizes, strict=True)))
        if self.search is None:
            rows = list(range(len(jobs)))
            self.search = arrived.keep([*rows, *[0] * (self._rounded(len(jobs)) - len(jobs))])
            self.search.beams.drop(slice(len(jobs), None))
            self.jobs, self.steps = [None] * len(self.search.beams.done), [0] * len(self.search.beams.done)
        else:
            self._resize(sizes)
            self._extend(len(jobs))
            rows = [row for row, job in enumerate(self.jobs) if job is None][: len(jobs)]
            self.search.write(
                torch.tensor(rows, device=self.device), arrived if own == sizes else arrived.resized(sizes)
            )
        self.sizes = sizes
        for row, job in zip(rows, jobs, strict=True):
            self.jobs[row], self.steps[row] = job, 0

    def _open(self, jobs: Sequence[Job]) -> tuple[StaticSearch, Sizes]:
        """A search for these jobs before its first step, and its sizes."""
        first = jobs[0]
        request = SearchRequest(
            PackedTokens.from_lists([job.source for job in jobs]).to(self.device),
            first.settings,
            first.nbest,
            begin=[job.begin for job in jobs],
            seed=[job.seed for job in jobs],
            lines=[job.line for job in jobs],
            margins=first.margins,
        )
        constraints = Constraints.joined([job.constraints for job in jobs]).to(self.device)
        setup = self.runner.setup(request, constraints, watched=False)
        if self.runner.round_sizes:  # with the sizes of the lane at once, so that nothing is padded later
            shape, sizes = setup.shape, self.sizes
            shape = replace(shape, capacity=max(shape.capacity, sizes.capacity), source=max(shape.source, sizes.source))
            setup = replace(setup, shape=shape, constraints=setup.constraints.widened(sizes.prefix, sizes.prompt))
        wide, shape = setup.constraints, setup.shape
        sizes = Sizes(shape.capacity, shape.source, wide.prefix.shape[1], wide.prompt.shape[1])
        return self.runner.opened(self.model, setup), sizes

    def _extend(self, count: int) -> None:
        """Make room for so many more sentences."""
        assert self.search is not None
        rows, missing = len(self.jobs), count - self.jobs.count(None)
        if missing > 0:
            more = self._rounded(rows + missing) - rows
            self.search = self.search.keep([*range(rows), *[0] * more])
            self.search.beams.drop(slice(rows, None))
            self.jobs += [None] * more
            self.steps += [0] * more

    def _rounded(self, rows: int) -> int:
        return self.runner.size(rows, 1)

    def _resize(self, sizes: Sizes) -> None:
        assert self.search is not None
        if sizes != self.sizes:
            self.search, self.sizes = self.search.resized(sizes), sizes

    # -- steps ---------------------------------------------------------------------------------------------------------

    def advance(self) -> int:
        """Take a step (on a GPU a few), and tell the news; return how many tokens jobs have got."""
        assert self.search is not None
        self._drop_cancelled()
        live = self.live
        if not live:
            self._shrink()
            return 0
        limits = {row: job.constraints.longest for row in live if (job := self.jobs[row]) is not None}
        left = max(limits[row] - self.steps[row] for row in live)
        many = min(STEPS[self.device.type], left)
        needed = max(min(self.steps[row] + many, limits[row]) for row in live)
        if needed > self.sizes.capacity:
            self._resize(self.sizes._replace(capacity=self.runner.size(max(needed, 2 * self.sizes.capacity), 16)))
        self.search = self.runner.advance(self.model, self.search, many)
        self.turns += 1
        if self.device.type == "cpu" and self.turns % COMPACT_TURNS == 0:
            self.search.state.compact()
        steps, done = self.search.beams.step.tolist(), self.search.beams.done.tolist()
        tokens = 0
        for row in live:
            tokens, self.steps[row] = tokens + steps[row] - self.steps[row], steps[row]
        self._tell_tokens([row for row in live if not done[row]])
        self._tell_results([row for row in live if done[row]])
        self._shrink()
        return tokens

    def _tell_tokens(self, rows: list[int]) -> None:
        assert self.search is not None
        streamed = [(row, job) for row in rows if (job := self.jobs[row]) is not None and job.streams]
        if streamed:
            beams, index = self.search.beams, torch.tensor([row for row, _ in streamed], device=self.device)
            trails = beams.tokens[index, 0].tolist(), beams.logprobs[index, 0].tolist()
            for (row, job), tokens, logprobs in zip(streamed, *trails, strict=True):
                new, job.told = slice(job.told, self.steps[row]), self.steps[row]
                job.news(News(job.number, tokens[new], logprobs[new]))

    def _tell_results(self, rows: list[int]) -> None:
        assert self.search is not None
        for row, outcome in zip(rows, self._results(rows), strict=True):
            job = self.jobs[row]
            assert job is not None
            job.news(News(job.number, outcome=outcome))
            self.jobs[row] = None

    def _results(self, rows: list[int]) -> Sequence[Outcome | Exception]:
        assert self.search is not None
        try:
            return self.search.beams.results(rows) if rows else []
        except UserError as error:  # a sentence whose scores are not numbers fails alone
            return [error] if len(rows) == 1 else [self._results([row])[0] for row in rows]

    def _drop_cancelled(self) -> None:
        assert self.search is not None
        rows = [row for row, job in enumerate(self.jobs) if job is not None and job.cancelled]
        if rows:
            self.search.beams.drop(rows)
            for row in rows:
                self.jobs[row] = None

    def _shrink(self) -> None:
        """Drop rows without a job if there are many: they cost as much as others."""
        assert self.search is not None
        live, rows = self.live, len(self.jobs)
        if not live:
            self.search, self.sizes, self.jobs, self.steps = None, Sizes(0), [], []
            return
        size = self._rounded(len(live))
        if 4 * size <= 3 * rows:
            self.search = self.search.keep([*live, *[live[0]] * (size - len(live))])
            self.search.beams.drop(slice(len(live), None))
            spare = size - len(live)
            self.jobs = [*(self.jobs[row] for row in live), *[None] * spare]
            self.steps = [*(self.steps[row] for row in live), *[0] * spare]

    def fail(self, error: Exception) -> None:
        """End all jobs with an error."""
        for row in self.live:
            job = self.jobs[row]
            assert job is not None
            job.news(News(job.number, outcome=error))
        self.search, self.sizes, self.jobs, self.steps = None, Sizes(0), [], []


@dataclass
class Turn:
    """What one turn of the engine did."""

    rows: int  # sentences in the batches
    tokens: int  # that sentences have got


class Engine:
    """Searches with one model for many callers at once, in continuous batches; start its thread with `start`.

    Every turn, waiting jobs join, first come first served, and each lane takes a step. The number of sentences in the
    batches is limited; the callers limit how many wait (`waiting`).
    """

    def __init__(
        self,
        model: SequenceModel,
        *,
        precision: str = "auto",
        rows: int = MAX_ROWS,
        observe: Callable[[Turn], None] | None = None,
        runner: StaticRunner | None = None,
    ) -> None:
        self.device = next(model.parameters()).device
        if not model.has_static_state:
            raise UserError(f"{type(model).__name__} has no decoding state that sentences can join")
        self.model, self.rows, self.observe = model, rows, observe
        if runner is None:
            on_gpu = self.device.type == "cuda"
            runner = CapturedRunner(precision in ("auto", "bf16"), coarse=True) if on_gpu else StaticRunner(lazy=False)
        self.runner = runner
        self._waiting: deque[Job] = deque()
        self._joining: list[Job] = []  # those that this turn has taken
        self._lanes: dict[object, Lane] = {}
        self._changed, self._closed = Condition(), False
        self._thread = Thread(target=self._run, name="regard-engine", daemon=True)

    @property
    def waiting(self) -> int:
        """Jobs that have not joined a batch."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sentences in the batches."""
        return sum(len(lane.live) for lane in list(self._lanes.values()))

    def start(self) -> Engine:
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread; jobs that are not done fail."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, jobs: Iterable[Job]) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._waiting.extend(jobs)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting or self._lanes)
                if self._closed:
                    break
            try:
                self.turn()
            except Exception as error:
                self._fail(error)
        ended = RuntimeError("the engine was closed")
        for lane in self._lanes.values():
            lane.fail(ended)
        for job in self._waiting:
            job.news(News(job.number, outcome=ended))

    def _fail(self, error: Exception) -> None:
        """End all jobs with an error, and begin again without lanes."""
        with self._changed:
            jobs = [job for lane in self._lanes.values() for job in lane.jobs if job is not None]
            jobs = list(dict.fromkeys([*jobs, *self._joining, *self._waiting]))
            self._lanes, self._joining = {}, []
            self._waiting.clear()
        for job in jobs:
            with suppress(Exception):  # a caller that cannot be told does not keep the others from it
                job.news(News(job.number, outcome=error))

    def turn(self) -> None:
        """Let jobs join, and take a step in every lane."""
        tokens, rows = 0, 0
        with torch.inference_mode(), self.runner.session(self.model) as model:
            for key, jobs in self._arrivals().items():
                lane = self._lanes.get(key) or Lane(model, self.runner, self.device)
                self._lanes[key] = lane
                try:
                    lane.admit(jobs)
                except Exception as error:
                    for job in jobs:
                        job.news(News(job.number, outcome=error))
                    lane.fail(error)
            for key, lane in list(self._lanes.items()):
                rows += len(lane.live)
                try:
                    tokens += lane.advance() if lane.search is not None else 0
                except Exception as error:
                    lane.fail(error)
                if lane.search is None:
                    del self._lanes[key]
        if self.observe is not None:
            self.observe(Turn(rows, tokens))

    def _arrivals(self) -> dict[object, list[Job]]:
        """Take the jobs that join now, by their keys."""
        arrivals: dict[object, list[Job]] = {}
        room, budget = self.rows - self.running, PREFILL_TOKENS[self.device.type]
        with self._changed:
            self._joining = []
            while self._waiting and room > 0 and budget > 0:
                job = self._waiting.popleft()
                self._joining.append(job)
                if not job.cancelled:
                    arrivals.setdefault(job.key, []).append(job)
                    room, budget = room - 1, budget - len(job.source)
        return arrivals


class EngineRunner:
    """Runs searches in the batches of an engine; pass it to `search` as `run`, with a source on the host.

    A watched search has one beam. Its watcher is called in the thread of the caller.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(
        self, model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None
    ) -> Results:
        events: SimpleQueue[News] = SimpleQueue()
        jobs = self._jobs(request, constraints, events.put, watch is not None)
        results: Results = {}
        waits = {job.number: Waiting(job, watch) for job in jobs}
        self.engine.submit(jobs)
        try:
            while len(results) < len(jobs):
                cancel.check()
                try:
                    news = events.get(timeout=CANCEL_SECONDS)
                except Empty:
                    continue
                outcome = waits[news.number].receive(news) if news.number not in results else None
                if outcome is not None:
                    results[news.number] = outcome
        finally:
            for job in jobs:
                job.cancelled = True  # without effect on those that are done
        return results

    def _jobs(
        self, request: SearchRequest, constraints: Constraints, news: Callable[[News], None], streams: bool
    ) -> list[Job]:
        first, lines, seeds, banned = request.first_tokens(), request.line_numbers(), request.seeds(), request.banned
        jobs = []
        for n, source in enumerate(request.source.layout.split(request.source.ids)):
            own = constraints.sentence(n)
            job = Job(
                n, source.tolist(), request.settings, request.nbest, own, first[n], lines[n], seeds[n],
                tuple(banned), news, request.margins, streams,
            )  # fmt: skip
            if streams and job.beams > 1:
                raise ValueError("a watched search in an engine has one beam")
            jobs.append(job)
        return jobs


@dataclass
class Waiting:
    """A job as its caller sees it."""

    job: Job
    watch: Watch | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def receive(self, news: News) -> Outcome | None:
        """Return the outcome if the job has ended, also because the watcher stops it."""
        if isinstance(news.outcome, Exception):
            raise news.outcome
        if self.watch is None:
            return news.outcome
        new, logprobs, margin = news.tokens, news.logprobs, math.nan
        if news.outcome is not None:  # the last token ends the hypothesis; on a GPU there may be others before it
            (best, *_), margin = news.outcome
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
                return [Hypothesis.of(self.tokens, self.logprobs, alpha, finished=False)], margin
        return news.outcome
