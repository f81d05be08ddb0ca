"""One pass of a model over one input and its output, teacher-forced and listened to; and passes under changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from regard import cancel
from regard.decoding.constraints import max_length
from regard.interpret import interventions as changing
from regard.interpret.interventions import Intervention
from regard.interpret.recorder import RecordedAttention, Recorder
from regard.interpret.trace.tasks import Output, TokenSides, TraceTask
from regard.packed import SeqBatch
from regard.runs import LoadedRun
from regard.text import Tokenizer

EXTRA = 8  # an output that is written freely, pass by pass, ends at twice the original length and so many tokens


@dataclass(frozen=True)
class ForwardPass:
    """One teacher-forced pass over one sentence, and what was heard at its taps."""

    batch: SeqBatch
    sides: TokenSides
    said: Output
    seen: Recorder
    logits: Tensor  # [target tokens, V]

    def logp(self, tokenizer: Tokenizer) -> list[float | None]:
        """The log-probability of each target token; None for those of another vocabulary than the output's."""
        ids = self.sides.target.ids_of(tokenizer)
        index = torch.tensor([token or 0 for token in ids], device=self.logits.device)[:, None]
        found = functional.log_softmax(self.logits, -1).gather(1, index)[:, 0].tolist()
        return [None if token is None else value for token, value in zip(ids, found, strict=True)]

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Heads, queries and keys of every attention."""
        return {name: shape_of(attended) for name, attended in self.seen.attention.items()}


def shape_of(attended: RecordedAttention) -> tuple[int, int, int]:
    """Heads, queries and keys, without computing any weights."""
    query, key = attended.offered.query, attended.offered.key  # [1, H, Q, D], [1, H, K, D]
    return query.shape[-3], query.shape[-2], key.shape[-2]


@dataclass(frozen=True)
class Forwards:
    """The pass to show and, where something was changed, the one before it and its output held under the change.

    Where the output to show is a forced one, `free` is what the model writes by itself under the same changes.
    """

    now: ForwardPass
    before: ForwardPass | None = None
    held: ForwardPass | None = None
    free: ForwardPass | None = None


@dataclass(frozen=True)
class TraceRequest:
    """What is to be written: the model's own output, a target, or one token after those so far; under which changes."""

    target: str | None = None
    after: Sequence[int] | None = None
    changes: tuple[Intervention, ...] = ()


def run_passes(loaded: LoadedRun, task: TraceTask, tokens: list[int], asked: TraceRequest) -> Forwards:
    """Let the model write, and record what it wrote; with changes also as it was, and as that is under them.

    A row replaced belongs to a position of the original output, so that output is then forced, and what the model
    writes by itself is recorded beside it.
    """
    before = one_pass(loaded, task, tokens, _output(loaded, task, tokens, asked))
    if not asked.changes:
        return Forwards(before)
    shapes = before.shapes()
    for change in asked.changes:
        change.check(shapes)
    changed = changing.hidden(tokens, asked.changes, task.source, task.reads)
    held = one_pass(loaded, task, changed, before.said, asked.changes)
    if asked.target is not None:
        return Forwards(held, before, held)
    if any(isinstance(change, changing.ReplaceRow) for change in asked.changes):
        with changing.applied(loaded.module, asked.changes):
            said = _greedy(loaded, task, changed, asked, len(before.said.tokens))
        return Forwards(held, before, held, one_pass(loaded, task, changed, said, asked.changes))
    with changing.applied(loaded.module, asked.changes):
        said = _output(loaded, task, changed, asked)
    return Forwards(one_pass(loaded, task, changed, said, asked.changes), before, held)


def _scores(loaded: LoadedRun, batch: SeqBatch) -> Tensor:
    cancel.check()
    found: Tensor = loaded.module.logits(batch.to(loaded.device))
    return found.float()


def _output(loaded: LoadedRun, task: TraceTask, tokens: list[int], asked: TraceRequest) -> Output:
    scores = partial(_scores, loaded)
    if asked.target is not None:
        return task.given(tokens, asked.target)
    return task.own(tokens, scores) if asked.after is None else task.going_on(tokens, asked.after, scores)


def _greedy(loaded: LoadedRun, task: TraceTask, tokens: list[int], asked: TraceRequest, length: int) -> Output:
    """The likeliest token after token, each from a pass over the whole: rows cannot be replaced in a cached search.

    It ends with EOS, or where a search would end: `length` tokens of a continuation, by the recipe of a translation.
    """
    if task.kind == "fill" or asked.after is not None:
        return _output(loaded, task, tokens, asked)
    limit = max_length(loaded.recipe.decoding, len(tokens))
    most = length if task.kind == "generate" else min(limit, 2 * length + EXTRA)
    written: list[int] = []
    while True:
        said = task.going_on(tokens, written, partial(_scores, loaded))
        written = list(said.tokens)[len(said.tokens) - len(written) - 1 :]
        if written[-1] == task.last or len(written) >= most:
            return replace(said, given=said.given - len(written) + 1)


def one_pass(
    loaded: LoadedRun, task: TraceTask, tokens: list[int], said: Output, changes: Sequence[Intervention] = ()
) -> ForwardPass:
    """Run what was read and said through the model once. The recorder hears what the changes have made of it."""
    cancel.check()
    batch = task.batch(tokens, said.tokens).to(loaded.device)
    with changing.applied(loaded.module, changes), Recorder(loaded.module) as seen:
        logits = loaded.module.logits(batch)
    if task.one_row:  # every place predicts the next, those of the source too
        last = [value for name, value in seen.values.items() if name.endswith("feed_forward_residual.stream")][-1]
        logits = loaded.module.logit_lens(last, batch)
    return ForwardPass(batch, task.sides(tokens, said), said, seen, logits.float())
