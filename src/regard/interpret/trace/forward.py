"""Recorded forward passes over one input and its output, teacher-forced, with and without interventions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard import cancel
from regard.errors import UserError
from regard.interpret.explain.models import Vocabulary
from regard.interpret.interventions import Applied, Intervention, ReplaceRow, apply
from regard.interpret.recorder import RecordedAttention, Recorder
from regard.interpret.trace.adapter import Output, TraceAdapter, TraceSides
from regard.runs import LoadedRun


@dataclass(frozen=True)
class ForwardPass:
    """One teacher-forced pass over one example, with the values at its taps."""

    batch: Any
    sides: TraceSides
    output: Output
    recorder: Recorder
    logits: Tensor  # [target tokens, V]

    def logp(self, tokenizer: Vocabulary) -> list[float | None]:
        """The log-probability of each target token; None for tokens of another vocabulary than the output's."""
        ids = self.sides.target.ids_of(tokenizer)
        index = torch.tensor([token or 0 for token in ids], device=self.logits.device)[:, None]
        values = functional.log_softmax(self.logits, -1).gather(1, index)[:, 0].tolist()
        return [None if token is None else value for token, value in zip(ids, values, strict=True)]

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Heads, queries and keys of every attention."""
        return {name: shape_of(attention) for name, attention in self.recorder.attention.items()}


def shape_of(attention: RecordedAttention) -> tuple[int, int, int]:
    """Heads, queries and keys, without computing any weights."""
    query, key = attention.offered.query, attention.offered.key  # [1, H, Q, D], [1, H, K, D]
    return query.shape[-3], query.shape[-2], key.shape[-2]


@dataclass(frozen=True)
class Forwards:
    """The pass to show and, under an intervention, the passes to compare it with.

    `before` is the pass without the intervention, `held` the original output under the intervention. Where the output
    to show is a forced one, `free` is the one that the model writes under the intervention.
    """

    now: ForwardPass
    before: ForwardPass | None = None
    held: ForwardPass | None = None
    free: ForwardPass | None = None


@dataclass(frozen=True)
class TraceRequest:
    """The output (the model's own, a `target`, or one token after the ids `after`) and the interventions."""

    target: str | None = None
    after: Sequence[int] | None = None
    changes: tuple[Intervention, ...] = ()


def run_passes(loaded: LoadedRun, adapter: TraceAdapter, given: Any, request: TraceRequest) -> Forwards:
    """Record the output; with interventions also the original output, without them and under them.

    A replaced attention row belongs to a position of the original output, so that output is then forced, and the one
    that the model writes under the intervention is recorded beside it.
    """
    before = forward(loaded, adapter, given, _output(loaded, adapter, given, request))
    if not request.changes:
        return Forwards(before)
    shapes = before.shapes()
    for change in request.changes:
        change.check(shapes)
        if isinstance(change, ReplaceRow) and before.recorder.attention[change.attention].edge_mask is not None:
            raise UserError("attention along edges has no rows to replace: hide a node or an edge instead")
    changed, changes = adapter.hide(given, request.changes)
    held = forward(loaded, adapter, changed, before.output, changes)
    if request.target is not None:
        return Forwards(held, before, held)
    if any(isinstance(change, ReplaceRow) for change in changes):
        with apply(loaded.module, changes):
            output = _greedy(loaded, adapter, changed, request, len(before.output.tokens))
        return Forwards(held, before, held, forward(loaded, adapter, changed, output, changes))
    with apply(loaded.module, changes):
        output = _output(loaded, adapter, changed, request)
    return Forwards(forward(loaded, adapter, changed, output, changes), before, held)


def _logits(loaded: LoadedRun, batch: Any) -> Tensor:
    cancel.check()
    logits: Tensor = loaded.module.logits(batch.to(loaded.device))
    return logits.float()


def _output(loaded: LoadedRun, adapter: TraceAdapter, given: Any, request: TraceRequest) -> Output:
    logits = partial(_logits, loaded)
    if request.target is not None:
        return adapter.encode_target(given, request.target)
    return adapter.decode(given, logits) if request.after is None else adapter.extend(given, request.after, logits)


def _greedy(loaded: LoadedRun, adapter: TraceAdapter, given: Any, request: TraceRequest, original: int) -> Output:
    """Write greedily, with a pass over the whole sequence per token: a cached search cannot replace attention rows."""
    if not adapter.extends or request.after is not None:
        return _output(loaded, adapter, given, request)
    limit = adapter.max_output(given, original)
    written: list[int] = []
    while True:
        output = adapter.extend(given, written, partial(_logits, loaded))
        written = list(output.tokens)[len(output.tokens) - len(written) - 1 :]
        if written[-1] == adapter.last or len(written) >= limit:
            return replace(output, given=output.given - len(written) + 1)


def forward(
    loaded: LoadedRun, adapter: TraceAdapter, given: Any, output: Output, changes: Sequence[Applied] = ()
) -> ForwardPass:
    """Run and record one teacher-forced pass, under interventions."""
    cancel.check()
    batch = adapter.batch(given, output.tokens).to(loaded.device)
    with apply(loaded.module, changes), Recorder(loaded.module) as recorder:
        logits = loaded.module.logits(batch)
    if adapter.spec.joined:  # every position predicts the next, those of the source too
        last = [value for name, value in recorder.values.items() if name.endswith("feed_forward_residual.stream")][-1]
        logits = loaded.module.logit_lens(last, batch)
    logits = adapter.output_logits(logits, output.tokens)
    return ForwardPass(batch, adapter.sides(given, output), output, recorder, logits.float())
