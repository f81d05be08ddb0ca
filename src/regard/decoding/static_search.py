"""Search with static shapes, as CUDA graphs require.

In `run_eagerly`, done sentences leave after every step and the model's state grows. Here they stay in the batch, the
model's state has a fixed capacity, and the host reads which sentences are done only every few steps. So a step can be
captured once and replayed (`cuda_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import cancel
from regard.decoding.beam_state import SearchState, num_beams
from regard.decoding.constraints import Constraints
from regard.decoding.results import read_results
from regard.decoding.search import CAPACITY, Results, SearchRequest, Stepper, run_eagerly, state_class
from regard.decoding.watching import Watch, call_watcher
from regard.models.base import SequenceModel
from regard.models.decoder_state import StaticShape, StaticState
from regard.recipes.schema import DecodingSettings

POLL_STEPS = 8  # steps between two reads of which sentences are done
MIN_BEAMS_TO_SHRINK = 128  # with fewer beams in the batch, a smaller batch is no faster


def rounded(size: int, least: int = 1) -> int:
    """Round up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few sizes, so that a captured step serves many searches.

    >>> [rounded(n) for n in (1, 5, 9, 13, 17, 25)], rounded(3, least=16)
    ([1, 6, 12, 16, 24, 32], 16)
    """
    size = max(size, least)
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


def padded_tokens(tokens: int) -> int:
    """Round up to a multiple of 8 tokens, or of an eighth of the next power of two: few sizes with little padding.

    >>> [padded_tokens(n) for n in (1, 17, 65, 129)]
    [8, 24, 80, 160]
    """
    step = max(8, (1 << (tokens - 1).bit_length()) // 8) if tokens else 1
    return -(-tokens // step) * step


def step_key(settings: DecodingSettings, *flags: object) -> tuple[object, ...]:
    """Identify the steps that are equal but for their tensors."""
    outside = {"max_ratio", "max_extra", "batch_tokens"}  # they determine limits and shapes, not a step
    return (*sorted(settings.model_dump(exclude=outside).items()), *flags)


class Sizes(NamedTuple):
    """Capacities in tokens: of the outputs, of the sources, of forced prefixes, and of prompts."""

    capacity: int
    source: int = 0
    prefix: int = 0
    prompt: int = 0


@dataclass(eq=False)
class StaticSearch:
    """The hypotheses of a search and the decoding state of the model. A step changes both in place."""

    hypotheses: SearchState
    state: StaticState

    def advance(self, model: Any) -> None:
        """Take one step. No branch depends on the value of a tensor."""
        logits, state = model.step(self.state, self.hypotheses.last)
        self.state = state.reorder(self.hypotheses.advance(logits))

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the search, in a fixed order."""
        yield from self.hypotheses.tensors()
        yield from self.state.tensors()

    @property
    def key(self) -> tuple[object, ...]:
        """Searches with equal keys can use the same captured step."""
        hypotheses, shapes = self.hypotheses, tuple((tuple(x.shape), x.dtype) for x in self.tensors())
        kind = step_key(hypotheses.settings, hypotheses.nbest, hypotheses.history is not None)
        return kind, type(self.state), shapes

    def load(self, other: StaticSearch) -> None:
        """Copy another search with the same key into the tensors of this one."""
        for old, new in zip(self.tensors(), other.tensors(), strict=True):
            old.copy_(new)

    def select(self, sentences: list[int]) -> StaticSearch:
        """Return a new search with these sentences only."""
        index = torch.tensor(sentences, device=self.hypotheses.done.device)
        return StaticSearch(self.hypotheses.select(index), self.state.select(index))

    def resized(self, sizes: Sizes) -> StaticSearch:
        """Return a new search with these sizes, which are at least the present ones."""
        hypotheses = self.hypotheses.grown(sizes.capacity, sizes.prefix, sizes.prompt)
        return StaticSearch(hypotheses, self.state.grown(sizes.capacity, sizes.source))

    def write(self, rows: Tensor, other: StaticSearch) -> None:
        """Replace the sentences `rows` [M] by the first M of another search with the same sizes."""
        sentences, count = len(self.hypotheses.done), len(other.hypotheses.done)
        pairs = zip(self._sentence_tensors(), other._sentence_tensors(), strict=True)
        for old, new in pairs:
            old.unflatten(0, (sentences, -1)).index_copy_(0, rows, new.unflatten(0, (count, -1))[: len(rows)])

    def _sentence_tensors(self) -> Iterator[Tensor]:
        yield from self.hypotheses.sentence_tensors()
        yield from self.state.tensors()


@dataclass(frozen=True)
class Setup:
    """A request in static shapes: the last sentence is repeated to fill the batch."""

    request: SearchRequest
    constraints: Constraints
    begin: Tensor  # [N]
    lines: list[int]
    seeds: list[int]
    shape: StaticShape
    watched: bool
    softmax_last: bool = True

    def create(self, state: StaticState) -> StaticSearch:
        request, capacity = self.request, self.shape.capacity
        hypotheses = state_class(request.settings, self.constraints).create(
            request.settings,
            request.nbest,
            self.constraints,
            capacity,
            watched=self.watched,
            static=True,
            softmax_last=self.softmax_last,
        )
        hypotheses.restart(self.constraints, self.begin, self.lines, self.seeds)
        return StaticSearch(hypotheses, state)


class StaticRunner:
    """Runs searches in static shapes; pass it to `search` as `run`. Models without static states run eagerly.

    `round_sizes`: whether to round sizes up, so that few captured steps serve all requests. `softmax_last`: whether
    to normalise only the selected logits of a step, which is faster on a GPU.
    """

    ahead = 0  # steps to start while waiting for which sentences are done; unneeded ones change nothing

    def __init__(self, round_sizes: bool = False, softmax_last: bool = True) -> None:
        self.round_sizes, self.softmax_last = round_sizes, softmax_last

    def __call__(
        self, model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None
    ) -> Results:
        run = self._run if isinstance(model, SequenceModel) and model.has_static_state else run_eagerly
        return run(model, request, constraints, watch)

    def session(self, model: SequenceModel) -> AbstractContextManager[Any]:
        """A context for `opened` and `advance`; it returns the model to call them with."""
        return nullcontext(model)

    def size(self, size: int, least: int) -> int:
        """The size of a tensor for `size` sentences or tokens, at least `least`."""
        return rounded(size, least) if self.round_sizes else size

    def source_size(self, tokens: int) -> int:
        """The size of a packed batch of `tokens` source tokens.

        Sources arrive in all lengths, and oneDNN compiles code for every number of rows of a matrix. With
        `round_sizes`, sources are padded anyway.
        """
        return tokens if self.round_sizes else padded_tokens(tokens)

    def release(self) -> None:
        """Free what can be made again, because memory has run out."""

    def setup(self, request: SearchRequest, constraints: Constraints, watched: bool) -> Setup:
        """The request in the sizes of this runner."""
        count, layout = len(request.source.layout), request.source.layout
        capacity = min(self.size(CAPACITY, 16), self.size(constraints.longest, 16))
        sentences = self.size(count, 1)
        beams = num_beams(request.settings, request.nbest)
        index = [*range(count), *[count - 1] * (sentences - count)]
        device = constraints.limit.device
        if sentences > count:
            constraints = constraints.select(torch.tensor(index, device=device))
        first, lines, seeds = request.first_tokens(), request.line_numbers(), request.seeds()
        return Setup(
            request,
            self._padded(constraints),
            torch.tensor([first[n] for n in index], device=device),
            [lines[n] for n in index],
            [seeds[n] for n in index],
            StaticShape(sentences, beams, capacity, self.size(layout.max_len, 16)),
            watched,
            self.softmax_last,
        )

    def _padded(self, constraints: Constraints) -> Constraints:
        """Round the widths of prefixes and prompts; drop prompts that no constraint reads."""
        prompt = constraints.prompt[:, :0] if constraints.repetition == 1 else constraints.prompt
        widths = (self.size(width, 8) if width else 0 for width in (constraints.prefix.shape[1], prompt.shape[1]))
        return replace(constraints, prompt=prompt).widened(*widths)

    def opened(self, model: SequenceModel, setup: Setup) -> StaticSearch:
        """Return the search before its first step."""
        source, shape = setup.request.source, setup.shape
        with torch.inference_mode(False), torch.no_grad():  # the source's layout may cache tensors
            state = model.start(source)
            if len(source.layout) < shape.sentences:
                index = torch.arange(shape.sentences, device=setup.begin.device).clamp(max=len(source.layout) - 1)
                state = state.select(index)
        return setup.create(model.static_state(state, shape))

    def _run(self, model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None) -> Results:
        assert isinstance(model, SequenceModel)
        with torch.inference_mode():
            setup = self.setup(request, constraints, watch is not None)
            search = self.opened(model, setup)
            count = len(request.source.layout)
            search.hypotheses.drop(slice(count, None))
            return self._steps(model, search, count, constraints.longest, watch)

    def _steps(self, model: Stepper, search: StaticSearch, count: int, longest: int, watch: Watch | None) -> Results:
        sentences = list(range(count))  # numbers of the sentences in the batch, without those that fill it
        live = list(range(count))  # rows of the batch that are not done
        results: Results = {}
        steps = 0
        while True:
            cancel.check()
            capacity = search.hypotheses.capacity
            end = min(capacity, longest)
            many = min(POLL_STEPS if watch is None else 1, end - steps)
            search, steps = self.advance(model, search, many), steps + many
            if watch is not None:
                call_watcher(watch, search.hypotheses, [sentences[n] for n in live], live)
            poll = self._poll(search)
            more = min(self.ahead, end - steps) if watch is None else 0
            search, steps = self.advance(model, search, more), steps + more
            done = poll()
            live = [n for n in live if not done[n]]
            if not live:
                results.update(zip(sentences, read_results(search.hypotheses, range(len(sentences))), strict=True))
                return results
            size, beams = self.size(len(live), 1), search.hypotheses.beams
            if 2 * size <= len(done) and len(done) * beams > MIN_BEAMS_TO_SHRINK:  # go on with a smaller batch
                rows = [n for n in range(len(sentences)) if done[n]]
                results.update(zip([sentences[n] for n in rows], read_results(search.hypotheses, rows), strict=True))
                search = search.select([*live, *[live[-1]] * (size - len(live))])
                search.hypotheses.drop(slice(len(live), None))
                sentences, live = [sentences[n] for n in live], list(range(len(live)))
            if steps == capacity < longest:
                search = search.resized(Sizes(min(2 * capacity, self.size(longest, 16))))

    def _poll(self, search: StaticSearch) -> Callable[[], list[bool]]:
        """Request which sentences are done now; the returned function waits for the answer."""
        done = search.hypotheses.done.tolist()
        return lambda: done

    def advance(self, model: Stepper, search: StaticSearch, count: int) -> StaticSearch:
        """Return the search after `count` steps; it may be another object with the same key."""
        for _ in range(count):
            search.advance(model)
        return search
