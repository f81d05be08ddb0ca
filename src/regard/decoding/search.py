"""Beam search (one beam: greedy) and sampling, over any model with `start` and `step`.

One step: the model gives logits, the constraints mask them, the best candidates are chosen or random ones drawn, those
that end are put with the finished ones, a watcher may stop some, sentences that are done leave the batch, and the
model's state follows the rest. The arithmetic of a step is `SearchState`'s; here is the loop around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard import cancel
from regard.decoding.beam_state import Beams, Hypothesis, Report, SearchState
from regard.decoding.constraints import Constraints
from regard.errors import UserError
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import DecodingSettings
from regard.text import BOS

CAPACITY = 64  # tokens of capacity that a search begins with; it doubles as they are used up


class Stepper(Protocol):
    """As much of a model as a search needs."""

    def start(self, source: PackedTokens) -> Any: ...

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """As a `SequenceModel`'s. The logits are the search's to write over."""
        ...


@dataclass(frozen=True)
class SearchRequest:
    """What to search for: one output, or the `nbest` best, for each sentence of `source`."""

    source: PackedTokens  # on the model's device, EOS included
    settings: DecodingSettings
    nbest: int = 1  # hypotheses per sentence; so many samples are drawn
    begin: Sequence[int] | None = None  # the token that each sentence's first step is fed (None: BOS)
    prefixes: Sequence[Sequence[int]] | None = None  # what each output has to begin with
    prompts: Sequence[Sequence[int]] | None = None  # tokens that the repetition penalty counts as said
    banned: Sequence[int] = ()  # ids that are never generated
    max_length: int | Sequence[int] | None = None  # the most tokens the model can generate, for all or for each
    seed: int = 0
    lines: Sequence[int] | None = None  # the sentences' numbers in the text, which with `seed` key random draws

    def __post_init__(self) -> None:
        count = len(self.source.layout)
        if self.settings.method == "beam" and self.nbest > self.settings.beam:
            raise UserError(
                f"the {self.nbest} best of {self.settings.beam} hypotheses: beam must be at least {self.nbest}"
            )
        for what, given in (("line numbers", self.lines), ("first tokens", self.begin)):
            if given is not None and len(given) != count:
                raise ValueError(f"{len(given)} {what} for {count} sentences")

    def constraints(self) -> Constraints:
        return Constraints.of(
            self.settings,
            self.source.layout.lengths,
            self.source.ids.device,
            prefixes=self.prefixes,
            banned=self.banned,
            prompts=self.prompts,
            most=self.max_length,
        )

    def first_tokens(self) -> list[int]:
        return [BOS] * len(self.source.layout) if self.begin is None else list(self.begin)

    def line_numbers(self) -> Sequence[int]:
        return range(len(self.source.layout)) if self.lines is None else self.lines


Watch = Callable[[list[int], Beams], Tensor | None]
Results = dict[int, tuple[list[Hypothesis], float]]  # hypotheses and the smallest margin, by the sentence's number


class Runner(Protocol):
    """Carries out the steps of a search. `run_eagerly` is the definition; any other is tested against it."""

    def __call__(
        self, model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None
    ) -> Results:
        """The results of all sentences of the request."""
        ...


def search(
    model: Stepper,
    request: SearchRequest,
    *,
    watch: Watch | None = None,
    report: Report | None = None,
    run: Runner | None = None,
) -> list[list[Hypothesis]]:
    """Per sentence of the request's source up to `nbest` hypotheses, best first; fewer only where fewer exist.

    `watch` is called after every step with the numbers of the sentences still searched and their beams, and may return
    which beams [N, K] to stop there. `run` carries out the steps (None: `run_eagerly`; `select_runner` knows a quicker
    one for GPUs). What a sentence gets does not depend on the rest of the batch.

    >>> search(model, SearchRequest(source, DecodingSettings(beam=4)))[0][0].tokens  # doctest: +SKIP
    (17, 4, 250)
    """
    count = len(request.source.layout)
    if count == 0:
        return []
    with torch.no_grad():  # not inference_mode: tables that the source's rows cache may be needed in training
        results = (run_eagerly if run is None else run)(model, request, request.constraints(), watch)
    if report is not None:
        report.margins.extend(results[n][1] for n in range(count))
    return [results[n][0] for n in range(count)]


def run_eagerly(model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None) -> Results:
    """Step until every sentence is done; those that are leave the batch."""
    device = request.source.ids.device
    begin = torch.tensor(request.first_tokens(), device=device)
    capacity = min(CAPACITY, constraints.longest)
    beams = SearchState.create(request.settings, request.nbest, constraints, capacity, watched=watch is not None)
    beams.restart(constraints, begin, request.line_numbers(), request.seed)
    state, tokens = model.start(request.source), begin[:, None]
    inside = list(range(len(begin)))  # the sentences still searched
    results: Results = {}
    while True:
        cancel.check()
        logits, state = model.step(state, tokens)
        parents = beams.advance(logits)
        if watch is not None and (stopped := watch(inside, beams.view())) is not None:
            beams.stop(stopped)
        done = beams.done.tolist()
        if any(done):
            gone = [n for n, over in enumerate(done) if over]
            results.update(zip([inside[n] for n in gone], beams.results(gone), strict=True))
            if all(done):
                return results
            stay = torch.tensor([n for n, over in enumerate(done) if not over], device=device)
            inside = [sentence for sentence, over in zip(inside, done, strict=True) if not over]
            beams, state, parents = beams.keep(stay), state.keep(stay), parents[stay]
        if beams.moved:
            state = state.reorder(parents)
        tokens = beams.last
        if beams.fed == beams.capacity:
            beams = beams.grown(min(2 * capacity, constraints.longest))
            capacity = beams.capacity


def select_runner(model: nn.Module, precision: str = "auto") -> Runner | None:
    """How to run searches with a model where it is: CUDA graphs on a GPU; None, eagerly, on a CPU."""
    if next(model.parameters()).device.type != "cuda":
        return None
    from regard.decoding.cuda_graphs import captured  # slow to import, and not needed on a CPU

    return captured(model, precision)


def score(logits_of: Callable[[SeqBatch], Tensor], batch: SeqBatch) -> list[list[float]]:
    """The log-probability of every target token of every pair, that of EOS last, given those before it.

    `logits_of` gives logits [T, V], as `SequenceModel.logits` does; the arithmetic after it is in float32.
    """
    rows = batch.inputs.layout
    with torch.no_grad():
        logits = logits_of(batch)[: rows.tokens].float()
        logp = -functional.cross_entropy(logits, batch.labels[: rows.tokens], reduction="none")
    return [sentence.tolist() for sentence in rows.split(logp)]
