"""A running search that sentences join and leave between two steps (continuous batching).

The rows of its batch belong to sentences at different steps. It is the static search (`StaticSearch`), in which a row
that is done is overwritten by the next sentence. `continuous.Engine` fills batches from a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from regard.decoding.beam_state import num_beams
from regard.decoding.constraints import Constraints
from regard.decoding.results import Hypothesis, read_results
from regard.decoding.search import SearchRequest
from regard.decoding.static_search import Sizes, StaticRunner, StaticSearch, step_key
from regard.errors import UserError
from regard.models.base import SequenceModel
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings

STEPS = {"cpu": 1, "cuda": 4}  # between two reads of which sentences are done
COMPACT_TURNS = 8  # between two times that entries of the KV cache are dropped that no beam needs, on a CPU


@dataclass(frozen=True)
class JobUpdate:
    """A report to the caller of a job: new tokens of the first beam, or how it ended."""

    number: int  # of the job, for its caller
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    outcome: list[Hypothesis] | Exception | None = None  # hypotheses, best first


@dataclass(eq=False)
class Job:
    """One sentence to search for. `on_update` is called from the engine's thread."""

    number: int
    source: list[int]
    settings: DecodingSettings
    nbest: int
    constraints: Constraints  # of one sentence, on the host
    begin: int
    line: int
    seed: int
    banned: tuple[int, ...]
    on_update: Callable[[JobUpdate], None]
    streams: bool = False  # whether updates have the tokens so far, not only the outcome
    cancelled: bool = False  # set by the caller: it no longer waits
    reported: int = 0  # tokens that were in updates

    @property
    def key(self) -> tuple[object, ...]:
        """Jobs with equal keys can be searched in one batch."""
        terms = None if self.constraints.terms is None else self.constraints.terms.shape
        flags = self.nbest, self.banned, self.constraints.prefix.shape[1] > 0, terms
        return step_key(self.settings, *flags)

    @property
    def beams(self) -> int:
        return num_beams(self.settings, self.nbest)


def _joined(each: Sequence[Constraints]) -> Constraints:
    """The constraints of several searches with equal settings and sizes of terms as those of one search."""
    prefix, prompt = max(c.prefix.shape[1] for c in each), max(c.prompt.shape[1] for c in each)
    rows = zip(*(c.widened(prefix, prompt).sentence_tensors() for c in each), strict=True)
    limit, prefixes, prompts, *terms = map(torch.cat, rows)
    joined = replace(each[0], limit=limit, prefix=prefixes, prompt=prompts, longest=max(c.longest for c in each))
    return joined if joined.terms is None else replace(joined, terms=joined.terms.with_sentences(*terms))


class RunningBatch:
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
        """Add jobs to the batch: encode their sources, and write them into free rows. If it fails, others stay."""
        arrived, new_sizes = self._open(jobs)
        sizes = Sizes(*map(max, zip(new_sizes, self.sizes, strict=True)))
        if self.search is None:
            rows = list(range(len(jobs)))
            self.search = arrived.select([*rows, *[0] * (self._rounded(len(jobs)) - len(jobs))])
            self.search.hypotheses.drop(slice(len(jobs), None))
            self.jobs, self.steps = [None] * len(self.search.hypotheses.done), [0] * len(self.search.hypotheses.done)
        else:
            self._resize(sizes)
            self._extend(len(jobs))
            rows = [row for row, job in enumerate(self.jobs) if job is None][: len(jobs)]
            try:
                index = torch.tensor(rows, device=self.device)
                self.search.write(index, arrived if new_sizes == sizes else arrived.resized(sizes))
            except Exception:  # a row without a job must stay done
                self.search.hypotheses.drop(rows)
                raise
        self.sizes = sizes
        for row, job in zip(rows, jobs, strict=True):
            self.jobs[row], self.steps[row] = job, 0

    def _open(self, jobs: Sequence[Job]) -> tuple[StaticSearch, Sizes]:
        """A search for these jobs before its first step, and its sizes."""
        first = jobs[0]
        tokens = sum(len(job.source) for job in jobs)
        request = SearchRequest(
            PackedTokens.from_lists([job.source for job in jobs], self.runner.source_size(tokens)).to(self.device),
            first.settings,
            first.nbest,
            begin=[job.begin for job in jobs],
            seed=[job.seed for job in jobs],
            lines=[job.line for job in jobs],
        )
        constraints = _joined([job.constraints for job in jobs]).to(self.device)
        setup = self.runner.setup(request, constraints, watched=False)
        if self.runner.round_sizes:  # with the sizes of the batch, so that nothing is padded later
            shape, sizes = setup.shape, self.sizes
            shape = replace(shape, capacity=max(shape.capacity, sizes.capacity), source=max(shape.source, sizes.source))
            setup = replace(setup, shape=shape, constraints=setup.constraints.widened(sizes.prefix, sizes.prompt))
        wide, shape = setup.constraints, setup.shape
        sizes = Sizes(shape.capacity, shape.source, wide.prefix.shape[1], wide.prompt.shape[1])
        return self.runner.opened(self.model, setup), sizes

    def _extend(self, count: int) -> None:
        """Add rows until `count` more sentences fit."""
        assert self.search is not None
        rows, missing = len(self.jobs), count - self.jobs.count(None)
        if missing > 0:
            more = self._rounded(rows + missing) - rows
            self.search = self.search.select([*range(rows), *[0] * more])
            self.search.hypotheses.drop(slice(rows, None))
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
        """Take a step (on a GPU a few), and report to the callers; return how many tokens were generated."""
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
        steps, done = self.search.hypotheses.step.tolist(), self.search.hypotheses.done.tolist()
        tokens = 0
        for row in live:
            tokens, self.steps[row] = tokens + steps[row] - self.steps[row], steps[row]
        self._report_tokens([row for row in live if not done[row]])
        self._report_results([row for row in live if done[row]])
        self._shrink()
        return tokens

    def _report_tokens(self, rows: list[int]) -> None:
        assert self.search is not None
        streamed = [(row, job) for row in rows if (job := self.jobs[row]) is not None and job.streams]
        if streamed:
            hypotheses, index = self.search.hypotheses, torch.tensor([row for row, _ in streamed], device=self.device)
            trails = hypotheses.tokens[index, 0].tolist(), hypotheses.logprobs[index, 0].tolist()
            for (row, job), tokens, logprobs in zip(streamed, *trails, strict=True):
                new, job.reported = slice(job.reported, self.steps[row]), self.steps[row]
                job.on_update(JobUpdate(job.number, tokens[new], logprobs[new]))

    def _report_results(self, rows: list[int]) -> None:
        assert self.search is not None
        for row, outcome in zip(rows, self._results(rows), strict=True):
            job = self.jobs[row]
            assert job is not None
            self.jobs[row] = None  # first, so that a caller that has its result finds the row free
            job.on_update(JobUpdate(job.number, outcome=outcome))

    def _results(self, rows: list[int]) -> Sequence[list[Hypothesis] | Exception]:
        assert self.search is not None
        try:
            return read_results(self.search.hypotheses, rows) if rows else []
        except UserError as error:  # a sentence whose scores are not numbers fails alone
            return [error] if len(rows) == 1 else [self._results([row])[0] for row in rows]

    def _drop_cancelled(self) -> None:
        assert self.search is not None
        rows = [row for row, job in enumerate(self.jobs) if job is not None and job.cancelled]
        if rows:
            self.search.hypotheses.drop(rows)
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
            self.search = self.search.select([*live, *[live[0]] * (size - len(live))])
            self.search.hypotheses.drop(slice(len(live), None))
            spare = size - len(live)
            self.jobs = [*(self.jobs[row] for row in live), *[None] * spare]
            self.steps = [*(self.steps[row] for row in live), *[0] * spare]

    def fail(self, error: Exception) -> None:
        """End all jobs with an error."""
        for row in self.live:
            job = self.jobs[row]
            assert job is not None
            job.on_update(JobUpdate(job.number, outcome=error))
        self.search, self.sizes, self.jobs, self.steps = None, Sizes(0), [], []
