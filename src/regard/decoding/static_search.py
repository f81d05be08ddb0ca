"""The search of `SearchState` in fixed shapes, as CUDA graphs require.

`run_eagerly` lets sentences leave after every step and grows the model's state. Here a sentence that is done stays
where it is and is left alone, the model's state has a fixed capacity, and the host looks at what is done only now and
then. So a step can be captured once and replayed (`cuda_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import cancel
from regard.decoding.beam_state import SearchState
from regard.decoding.constraints import NONE, Constraints
from regard.decoding.search import CAPACITY, Results, SearchRequest, Stepper, Watch, run_eagerly
from regard.models.base import SequenceModel, StaticShape, StaticState

POLL_STEPS = 8  # steps between two looks at which sentences are done
MIN_BEAMS_TO_SHRINK = 128  # beams up to which a step takes the same time however many they are


def rounded(size: int, least: int = 1) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few sizes, so that a captured step serves many searches.

    >>> [rounded(n) for n in (1, 5, 9, 13, 17, 25)], rounded(3, least=16)
    ([1, 6, 12, 16, 24, 32], 16)
    """
    size = max(size, least)
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


@dataclass(eq=False)
class StaticSearch:
    """A whole search, of hypotheses and the model's state. A step changes it in place."""

    beams: SearchState
    state: StaticState

    def advance(self, model: Any) -> None:
        """One step. No branch depends on the value of a tensor on a GPU."""
        logits, state = model.step(self.state, self.beams.last)
        self.state = state.reorder(self.beams.advance(logits))

    def tensors(self) -> Iterator[Tensor]:
        """All that it consists of, in a fixed order."""
        yield from self.beams.tensors()
        yield from self.state.tensors()

    @property
    def kind(self) -> tuple[object, ...]:
        """Searches of one kind take the same step."""
        shapes = tuple((tuple(x.shape), x.dtype) for x in self.tensors())
        return self.beams.key, type(self.state), shapes

    def load(self, other: StaticSearch) -> None:
        """Become as another of the same kind, in the tensors that are here."""
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(new)
        self.beams.keys = other.beams.keys

    def keep(self, sentences: list[int]) -> StaticSearch:
        """A new search with these sentences only."""
        index = torch.tensor(sentences, device=self.beams.done.device)
        return StaticSearch(self.beams.keep(index), self.state.keep(index))

    def grown(self, capacity: int) -> StaticSearch:
        """A new search with capacity for so many tokens."""
        return StaticSearch(self.beams.grown(capacity), self.state.grown(capacity))


@dataclass(frozen=True)
class Setup:
    """A request, laid out for a search in fixed shapes: sentences to spare repeat the last one."""

    request: SearchRequest
    constraints: Constraints
    begin: Tensor  # [N]
    lines: list[int]
    shape: StaticShape
    watched: bool

    def create(self, state: StaticState) -> StaticSearch:
        request = self.request
        beams = SearchState.create(
            request.settings, request.nbest, self.constraints, self.shape.capacity, watched=self.watched, static=True
        )
        beams.restart(self.constraints, self.begin, self.lines, request.seed)
        return StaticSearch(beams, state)


class StaticRunner:
    """Runs searches in fixed shapes; to be given to `search` as its `run`. Models that cannot do it run eagerly.

    `sizes`: whether to round sizes up, so that searches of few kinds serve all requests.
    """

    ahead = 0  # steps taken before the answer to what is done has come; one that was not needed changes nothing

    def __init__(self, sizes: bool = False) -> None:
        self.sizes = sizes

    def __call__(
        self, model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None
    ) -> Results:
        run = self._run if isinstance(model, SequenceModel) and model.has_static_state else run_eagerly
        return run(model, request, constraints, watch)

    def _size(self, size: int, least: int) -> int:
        return rounded(size, least) if self.sizes else size

    def _setup(self, request: SearchRequest, constraints: Constraints, watched: bool) -> Setup:
        count, rows = len(request.source.layout), request.source.layout
        capacity = min(self._size(CAPACITY, 16), self._size(constraints.longest, 16))
        sentences = self._size(count, 1)
        beams = request.settings.beam if request.settings.method == "beam" else request.nbest
        every = [*range(count), *[count - 1] * (sentences - count)]
        device = constraints.limit.device
        if sentences > count:
            constraints = constraints.keep(torch.tensor(every, device=device))
        first, lines = request.first_tokens(), request.line_numbers()
        return Setup(
            request,
            self._padded(constraints),
            torch.tensor([first[n] for n in every], device=device),
            [lines[n] for n in every],
            StaticShape(sentences, beams, capacity, self._size(rows.max_len, 16)),
            watched,
        )

    def _padded(self, constraints: Constraints) -> Constraints:
        """Prompts only where they count, and prefixes of few widths."""
        prefix = constraints.prefix
        prompt = constraints.prompt[:, :0] if constraints.repetition == 1 else constraints.prompt

        def wide(x: Tensor) -> Tensor:
            return F.pad(x, (0, self._size(x.shape[1], 8) - x.shape[1]), value=NONE) if x.shape[1] else x

        return replace(constraints, prefix=wide(prefix), prompt=wide(prompt))

    def opened(self, model: SequenceModel, setup: Setup) -> StaticSearch:
        """The search before its first step."""
        source, shape = setup.request.source, setup.shape
        with torch.inference_mode(False), torch.no_grad():  # tables that the source's rows cache may be kept
            state = model.start(source)
            if len(source.layout) < shape.sentences:
                spare = torch.arange(shape.sentences, device=setup.begin.device).clamp(max=len(source.layout) - 1)
                state = state.keep(spare)
        return setup.create(model.static_state(state, shape))

    def _run(self, model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None) -> Results:
        assert isinstance(model, SequenceModel)
        with torch.inference_mode():
            setup = self._setup(request, constraints, watch is not None)
            running = self.opened(model, setup)
            count = len(request.source.layout)
            running.beams.done[count:] = True
            return self._steps(model, running, count, constraints.longest, watch)

    def _steps(self, model: Stepper, running: StaticSearch, count: int, longest: int, watch: Watch | None) -> Results:
        inside = list(range(count))  # the sentences in the batch, spare ones not counted
        going = list(range(count))  # those of them that are not done, by their rows in the batch
        results: Results = {}
        steps = 0
        while True:
            cancel.check()
            capacity = running.beams.capacity
            end = min(capacity, longest)  # steps for which there is capacity, and a use
            many = min(POLL_STEPS if watch is None else 1, end - steps)
            running, steps = self.advance(model, running, many), steps + many
            if watch is not None:
                stopped = watch([inside[n] for n in going], running.beams.view(going))
                if stopped is not None:
                    running.beams.stop(stopped, going)
            poll = self._poll(running)
            more = min(self.ahead, end - steps) if watch is None else 0
            running, steps = self.advance(model, running, more), steps + more
            done = poll()
            going = [n for n in going if not done[n]]
            if not going:
                results.update(zip(inside, running.beams.results(range(len(inside))), strict=True))
                return results
            size, beams = self._size(len(going), 1), running.beams.beams
            if 2 * size <= len(done) and len(done) * beams > MIN_BEAMS_TO_SHRINK:  # most are done: the others go on
                gone = [n for n in range(len(inside)) if done[n]]
                results.update(zip([inside[n] for n in gone], running.beams.results(gone), strict=True))
                running = running.keep([*going, *[going[-1]] * (size - len(going))])
                running.beams.done[len(going) :] = True
                inside, going = [inside[n] for n in going], list(range(len(going)))
            if steps == capacity < longest:
                running = running.grown(min(2 * capacity, self._size(longest, 16)))

    def _poll(self, running: StaticSearch) -> Callable[[], list[bool]]:
        """Ask which sentences are done now. The answer may be waited for while something else runs."""
        done = running.beams.done.tolist()
        return lambda: done

    def advance(self, model: Stepper, running: StaticSearch, count: int) -> StaticSearch:
        """The search after so many steps; it may be another object, of the same kind."""
        for _ in range(count):
            running.advance(model)
        return running
