"""Beam search (one beam: greedy) and sampling, over any model with `start` and `step`.

One step: the model computes logits, the constraints mask them, the best candidates are selected or random ones drawn,
ended hypotheses join the finished ones, a watcher may stop others, sentences that are done leave the batch, and the
model's state is reordered. `SearchState` does the arithmetic of a step; this module has the loop around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard import cancel
from regard.decoding.beam_state import SearchState
from regard.decoding.constraints import Constraints
from regard.decoding.results import Hypothesis, read_results
from regard.decoding.sample_search import SampleState
from regard.decoding.term_search import TermSearchState
from regard.decoding.terms import Term, TermTable, TokenClasses
from regard.decoding.watching import Watch, call_watcher
from regard.errors import UserError
from regard.packed import PackedRows
from regard.recipes.schema import DecodingSettings
from regard.text import BOS

CAPACITY = 64  # initial capacity of a search in tokens; doubled when it is full


class Stepper(Protocol):
    """The part of a model's interface that a search needs."""

    def start(self, source: Any) -> Any: ...

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """The same as `SequenceModel.step`. The search overwrites the logits."""
        ...


@dataclass(frozen=True)
class SearchRequest:
    """Search for the `nbest` best outputs of each sentence of `source`."""

    source: PackedRows  # tokens (EOS included) or features, on the model's device
    settings: DecodingSettings
    nbest: int = 1  # hypotheses per sentence; in sampling, samples per sentence
    begin: Sequence[int] | None = None  # the token that each sentence's first step is fed (None: BOS)
    prefixes: Sequence[Sequence[int]] | None = None  # tokens that each output must begin with
    prompts: Sequence[Sequence[int]] | None = None  # tokens that the repetition penalty counts as generated
    banned: Sequence[int] = ()  # ids that are never generated
    terms: Sequence[Sequence[Term]] | None = None  # that each output must or must not contain
    classes: TokenClasses | None = None  # of the vocabulary, if terms name them
    max_length: int | Sequence[int] | None = None  # maximum output length of the model, for all or for each
    seed: int | Sequence[int] = 0  # of all sentences, or of each
    lines: Sequence[int] | None = None  # line numbers of the sentences; with `seed` they key random draws

    def __post_init__(self) -> None:
        count = len(self.source.layout)
        if self.settings.method == "beam" and self.nbest > self.settings.beam:
            raise UserError(
                f"the {self.nbest} best of {self.settings.beam} hypotheses: beam must be at least {self.nbest}"
            )
        seeds = None if isinstance(self.seed, int) else self.seed
        if self.terms is not None and any(self.terms) and self.settings.method != "beam":
            raise UserError("required and avoided terms need a beam search, not sampling")
        counted = {"line numbers": self.lines, "first tokens": self.begin, "seeds": seeds, "terms": self.terms}
        for name, values in counted.items():
            if values is not None and len(values) != count:
                raise ValueError(f"{len(values)} {name} for {count} sentences")

    def constraints(self) -> Constraints:
        device = self.source.layout.device
        return Constraints.of(
            self.settings,
            self.source.layout.lengths,
            device,
            prefixes=self.prefixes,
            banned=self.banned,
            prompts=self.prompts,
            capacity=self.max_length,
            terms=None if self.terms is None else TermTable.of(self.terms, device, self.classes),
        )

    def first_tokens(self) -> list[int]:
        return [BOS] * len(self.source.layout) if self.begin is None else list(self.begin)

    def line_numbers(self) -> Sequence[int]:
        return range(len(self.source.layout)) if self.lines is None else self.lines

    def seeds(self) -> Sequence[int]:
        return [self.seed] * len(self.source.layout) if isinstance(self.seed, int) else self.seed


Results = dict[int, list[Hypothesis]]  # the hypotheses of each sentence, best first, by its number


class Runner(Protocol):
    """Runs the steps of a search. `run_eagerly` is the definition; the others are tested against it."""

    def __call__(
        self, model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None
    ) -> Results:
        """Return the results of all sentences of the request."""
        ...


def search(
    model: Stepper,
    request: SearchRequest,
    *,
    watch: Watch | None = None,
    run: Runner | None = None,
) -> list[list[Hypothesis]]:
    """Return up to `nbest` hypotheses per sentence of the request's source, best first; fewer only if fewer exist.

    `watch` is called after every step with the numbers of the sentences still searched and their beams, and may return
    which beams [N, K] to stop there. `run` runs the steps (None: `run_eagerly`; `select_runner` returns a faster one
    for GPUs). The result of a sentence does not depend on the rest of the batch.

    >>> search(model, SearchRequest(source, DecodingSettings(beam=4)))[0][0].tokens  # doctest: +SKIP
    (17, 4, 250)
    """
    count = len(request.source.layout)
    if count == 0:
        return []
    with torch.no_grad():  # not inference_mode: tensors that the source's layout caches may be needed in training
        results = (run_eagerly if run is None else run)(model, request, request.constraints(), watch)
    return [results[n] for n in range(count)]


def state_class(settings: DecodingSettings, constraints: Constraints) -> type[SearchState]:
    """The class of a search's state: by the method, and whether outputs must or must not contain terms."""
    if settings.method == "sample":
        return SampleState
    return SearchState if constraints.terms is None else TermSearchState


def run_eagerly(model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None) -> Results:
    """Step until every sentence is done; done sentences leave the batch."""
    device = request.source.layout.device
    begin = torch.tensor(request.first_tokens(), device=device)
    capacity = min(CAPACITY, constraints.longest)
    hypotheses = state_class(request.settings, constraints).create(
        request.settings, request.nbest, constraints, capacity, watched=watch is not None
    )
    hypotheses.restart(constraints, begin, request.line_numbers(), request.seed)
    state, tokens = model.start(request.source), begin[:, None]  # one beam; the first step makes K of it
    sentences = list(range(len(begin)))  # numbers of the sentences in the batch
    results: Results = {}
    while True:
        cancel.check()
        logits, state = model.step(state, tokens)
        parents = hypotheses.advance(logits)
        if watch is not None:
            call_watcher(watch, hypotheses, sentences)
        reorder = hypotheses.reorders or tokens.shape != parents.shape
        done = hypotheses.done.tolist()
        if any(done):
            rows = [n for n, is_done in enumerate(done) if is_done]
            results.update(zip([sentences[n] for n in rows], read_results(hypotheses, rows), strict=True))
            if all(done):
                return results
            rows = [n for n, is_done in enumerate(done) if not is_done]
            sentences, index = [sentences[n] for n in rows], torch.tensor(rows, device=device)
            hypotheses, state, parents = hypotheses.select(index), state.select(index), parents[index]
        if reorder:
            state = state.reorder(parents)
        tokens = hypotheses.last
        if hypotheses.steps_taken == hypotheses.capacity:
            hypotheses = hypotheses.grown(min(2 * hypotheses.capacity, constraints.longest))


def select_runner(model: nn.Module, precision: str = "auto") -> Runner | None:
    """Return the fastest runner for a model on its device: CUDA graphs on a GPU; None (eager) on a CPU."""
    if next(model.parameters()).device.type != "cuda":
        return None
    from regard.decoding.cuda_graphs import captured  # slow to import, and not needed on a CPU

    return captured(model, precision)
