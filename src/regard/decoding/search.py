"""Beam search (one beam: greedy) and sampling, over any model with `start` and `step`.

One step: the model gives logits, the rules discourage what was said and strike out what may not follow, a chooser picks
(the best candidates, or random ones), the slots follow the choice, whoever watches may stop some, sentences that are
done leave, and the model's state follows the rest.
Shapes: N sentences still searched, K slots (beams or samples) each, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard import cancel, taps
from regard.decoding.greatest import greatest
from regard.decoding.hypotheses import Choice, Hypothesis, Report, Slots, ranking_margin
from regard.decoding.penalties import Rules, length_penalties
from regard.decoding.sampling import draw, keys, uniforms
from regard.errors import UserError
from regard.recipes.schema import Decoding
from regard.rows import PairBatch, TokenRow
from regard.text import BEGIN


class Stepper(Protocol):
    """As much of a model as a search needs."""

    def start(self, source: TokenRow) -> Any: ...

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """As a `Translator`'s. The logits are the search's to write over."""
        ...


Watch = Callable[[list[int], Slots], Tensor | None]


def search(
    model: Stepper,
    source: TokenRow,
    settings: Decoding,
    *,
    begin: Sequence[int] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    forbidden: Sequence[int] = (),
    prefixes: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    lines: Sequence[int] | None = None,
    nbest: int = 1,
    longest: int | Sequence[int] | None = None,
    watch: Watch | None = None,
    report: Report | None = None,
    run: Run | None = None,
) -> list[list[Hypothesis]]:
    """Per sentence of `source` (on the model's device, end marks included) up to `nbest` hypotheses, best first.

    There are fewer only where fewer exist. `begin` is the token each sentence's first step is fed (None: the begin
    mark); `prompts` are the tokens that count as said already for the repetition penalty; `forbidden` ids are never
    generated; `prefixes` are what the outputs have to begin with, one a sentence; `seed` and `lines`, the sentences'
    numbers in the whole text, key the random draws; `nbest` random samples are drawn; `longest` is the most tokens the
    model can write, for all or for each. `watch` is called after every step with the numbers in `source` of the
    sentences still searched and their slots, and may return which slots [N, K] to stop there. `run` carries the steps
    out (None: `step_by_step`; `decoding.captured` has a quicker one for GPUs). What a sentence gets does not depend on
    the rest of the batch.

    >>> search(model, source, Decoding(beam=4))[0][0].tokens  # doctest: +SKIP
    (17, 4, 250)
    """
    count, device = len(source.rows), source.ids.device
    if settings.method == "beam" and nbest > settings.beam:
        raise UserError(f"the {nbest} best of {settings.beam} hypotheses: beam must be at least {nbest}")
    lines = range(count) if lines is None else lines
    begin = [BEGIN] * count if begin is None else begin
    for what, given in (("line numbers", lines), ("first tokens", begin)):
        if len(given) != count:
            raise ValueError(f"{len(given)} {what} for {count} sentences")
    if count == 0:
        return []
    rules = Rules.of(settings, source.rows.lengths, prefixes, forbidden, device, prompts, longest)
    penalty = length_penalties(settings.length_penalty, rules.longest)
    best = settings.method == "beam"
    chooser: Chooser = Best(settings, penalty.to(device), nbest) if best else Random(settings, seed, nbest)
    with torch.no_grad():  # not inference_mode: maps that the source's rows keep may be wanted in training
        ended = (step_by_step if run is None else run)(model, Task(source, begin, rules, chooser, lines, watch))
    results: list[list[Hypothesis]] = [[] for _ in range(count)]
    margins = [math.inf] * count
    for sentences, slots in ended:
        slots = slots.on_host()
        ranked, closest = slots.hypotheses(penalty, nbest + 1), slots.margin.tolist()  # one more, for the margin
        for sentence, hypotheses, margin in zip(sentences, ranked, closest, strict=True):
            results[sentence] = hypotheses[:nbest]
            margins[sentence] = min(margin, ranking_margin(hypotheses, nbest))
    if report is not None:
        report.margins.extend(margins)
    return results


@dataclass(frozen=True, eq=False)
class Task:
    """What is searched: from which sentences, begun how, by what rules; see `search`."""

    source: TokenRow
    begin: Sequence[int]
    rules: Rules
    chooser: Chooser
    lines: Sequence[int]
    watch: Watch | None


Ended = list[tuple[list[int], Slots]]  # groups of sentence numbers and their final slots, in the order they left


def step_by_step(model: Stepper, task: Task) -> Ended:
    """Step until every sentence is done."""
    source, rules, chooser, watch = task.source, task.rules, task.chooser, task.watch
    device = source.ids.device
    inside = list(range(len(source.rows)))  # the sentences still searched
    slots = Slots.start(len(inside), device)
    state, tokens = model.start(source), torch.tensor(task.begin, device=device)[:, None]
    ended: Ended = []
    while True:
        cancel.check()
        logits, state = model.step(state, tokens)
        logits = rules.discourage(logits.float(), slots.tokens)
        logp = rules.apply(_log_softmax(logits), slots.tokens)
        logp = slots.only_end_where_over(logp)
        choice = chooser.choose(slots, logp, [task.lines[sentence] for sentence in inside])
        slots = slots.advance(choice)
        if watch is not None and (stopped := watch(inside, slots)) is not None:
            slots = slots.stop(stopped)
        done = (chooser.done(slots, rules) | (rules.limit <= slots.tokens.shape[-1])).tolist()
        parents, tokens = choice.parents, choice.tokens
        if any(done):
            gone = [n for n, out in enumerate(done) if out]
            ended.append(([inside[n] for n in gone], slots.keep(torch.tensor(gone, device=device))))
            if all(done):
                return ended
            stay = torch.tensor([n for n, out in enumerate(done) if not out], device=device)
            inside = [sentence for sentence, out in zip(inside, done, strict=True) if not out]
            slots, rules, state = slots.keep(stay), rules.keep(stay), state.keep(stay)
            parents, tokens = parents[stay], tokens[stay]
        if choice.moved:
            state = state.reorder(parents)


def _log_softmax(logits: Tensor) -> Tensor:
    """In the logits' own memory on a CPU, where new memory costs a third more; unless somebody looks at them."""
    if not logits.is_cpu or not logits.is_contiguous() or taps.listening():
        return functional.log_softmax(logits, -1)
    return torch._log_softmax(logits, -1, False, out=logits)


class Run(Protocol):
    """Steps until every sentence is done. `step_by_step` is the definition; any other is held equal to it."""

    def __call__(self, model: Stepper, task: Task) -> Ended: ...


def quickest(model: nn.Module, precision: str = "auto") -> Run | None:
    """How to run searches with a model where it is: recorded steps on a GPU; None, step by step, on a CPU."""
    if next(model.parameters()).device.type != "cuda":
        return None
    from regard.decoding.captured import captured  # what it takes to load is not wanted on a CPU

    return captured(model, precision)


class Chooser(Protocol):
    """What tells beam search from sampling."""

    def choose(self, slots: Slots, logp: Tensor, lines: Sequence[int]) -> Choice:
        """Fill the slots from the candidates `logp` [N, K, V]; `lines` are the sentences' numbers in the text."""
        ...

    def done(self, slots: Slots, rules: Rules) -> Tensor:
        """[N] True where going on would change nothing."""
        ...


class Best:
    """Beam search: the candidates with the best penalised scores."""

    def __init__(self, settings: Decoding, penalty: Tensor, wanted: int) -> None:
        self.settings, self.penalty, self.wanted = settings, penalty, wanted

    def choose(self, slots: Slots, logp: Tensor, lines: Sequence[int]) -> Choice:
        """The best of all K * V candidates, ranked by the score they would have if they ended there.

        Within a slot that is the order of their log-probabilities, so the best of all are among the best of each. The
        first step has one slot and V candidates, so the number of slots grows to the beam's; in a vocabulary smaller
        than the beam that takes several steps.
        """
        steps, tokens = greatest(logp, self.settings.beam + 1)  # [N, K, C]; one more than is kept, for the margin
        penalty = self.penalty[slots.length + slots.live]  # [N, K]: only live ones grow longer
        score = ((slots.total[..., None] + steps) / penalty[..., None]).flatten(1)  # [N, K * C]
        width = min(self.settings.beam, score.shape[1])
        top = score.topk(min(width + 1, score.shape[1]))
        kept = top.indices[:, :width]
        margin = torch.full_like(slots.margin, math.inf)
        if top.values.shape[1] > width:
            last, rejected = top.values[:, width - 1], top.values[:, width]
            margin = torch.where(rejected > -math.inf, last - rejected, math.inf)
        steps, tokens, each = steps.flatten(1).gather(1, kept), tokens.flatten(1).gather(1, kept), steps.shape[-1]
        return Choice(kept // each, tokens, steps, margin, moved=max(slots.total.shape[1], width) > 1)

    def done(self, slots: Slots, rules: Rules) -> Tensor:
        """No slot is live, or (early stopping) no live one can still get among the wanted.

        Log-probabilities are at most 0, so a hypothesis's total only falls; dividing what is at most 0 by the greatest
        penalty, that of the maximum length, gives the most it can ever score: total / penalty[limit]. The same bound
        holds for its scores on the way, so it cannot push the wanted ones out of their slots either, and stopping
        early gives what going on would have given.
        """
        if not self.settings.early_stopping:
            return ~slots.live.any(1)
        bound = (slots.total / self.penalty[rules.limit][:, None]).masked_fill(~slots.live, -math.inf).amax(1)
        score = (slots.total / self.penalty[slots.length]).masked_fill(~slots.over, -math.inf)
        return score.topk(min(self.wanted, score.shape[1])).values[:, -1] >= bound


class Random:
    """Sampling: every slot draws its own next token."""

    def __init__(self, settings: Decoding, seed: int, samples: int) -> None:
        self.settings, self.seed, self.samples = settings, seed, samples

    def choose(self, slots: Slots, logp: Tensor, lines: Sequence[int]) -> Choice:
        uniform = uniforms(keys(self.seed, lines, self.samples), slots.tokens.shape[-1])
        return draw(logp, uniform.to(logp.device), self.settings)

    def done(self, slots: Slots, rules: Rules) -> Tensor:
        return ~slots.live.any(1)


def score(model: Callable[[PairBatch], Tensor], batch: PairBatch) -> list[list[float]]:
    """The log-probability of every target token of every pair, the end mark's last, given those before it.

    `model(batch)` gives logits [T, V], as a `Translator` does; the arithmetic after it is in float32.
    """
    rows = batch.inputs.rows
    with torch.no_grad():
        logits = model(batch)[: rows.tokens].float()
        logp = -functional.cross_entropy(logits, batch.labels[: rows.tokens], reduction="none")
    return [sentence.tolist() for sentence in rows.split(logp)]
