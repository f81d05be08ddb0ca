"""The same search as `search.step_by_step`, in tensors whose shapes never change from step to step.

There, slots multiply, sentences leave and histories grow, and the host decides after every step. Here everything lies
on a board of constant size: all K slots are there from the beginning (the spare ones empty), a sentence that is done
stays where it is and is left alone, histories have room for a while, and where the search stands is a number on the
device. So a step can be recorded once and played again (`captured`), and the host looks only now and then.

Shapes: N sentences on the board, K slots each, T tokens there is room for, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard import cancel
from regard.decoding.greatest import greatest, log_sum
from regard.decoding.hypotheses import Slots
from regard.decoding.penalties import NONE, WORST, Rules, among, length_penalties
from regard.decoding.sampling import Words, draw, keys, uniforms
from regard.decoding.search import Best, Ended, Random, Stepper, Task, Watch, step_by_step
from regard.decoding.steady import Shape, Steady, possible, reads_on, steady
from regard.recipes.schema import Decoding
from regard.rows import TokenRow
from regard.text import END

EVERY = 8  # steps between two looks at whether all is done
ROOM = 64  # tokens there is room for at first; then twice as many, and so on
FEW = 128  # slots up to which a step takes the same time however many they are, so that none are taken off the board


def rounded(size: int, least: int = 1) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few sizes, so that what was recorded for one is used again.

    >>> [rounded(n) for n in (1, 5, 9, 13, 17, 25)], rounded(3, least=16)
    ([1, 6, 12, 16, 24, 32], 16)
    """
    size = max(size, least)
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


def repeats_at(history: Tensor, step: Tensor, size: int, vocabulary: int) -> Tensor:
    """`penalties.repeats` for a history [N, K, T] of which `step` [1] tokens are written, the rest being NONE."""
    grams = history.unfold(-1, size, 1)  # those with a place that is not written end in NONE, which is no id
    last = (step + torch.arange(1 - size, 0, device=step.device)).clamp(min=0)
    context = history.index_select(-1, last)  # [N, K, size - 1]
    seen = (grams[..., :-1] == context[..., None, :]).all(-1) & (step >= size)
    return among(torch.where(seen, grams[..., -1], NONE), vocabulary)


@dataclass(frozen=True)
class How:
    """What makes one step different from another besides its tensors: the chooser's settings, and how many it wants."""

    settings: tuple[tuple[str, object], ...]
    wanted: int

    @classmethod
    def of(cls, chooser: Best | Random) -> How:
        outside = {"max_ratio", "max_extra", "batch_tokens"}  # of the limits and the shapes, not of a step
        settings = tuple(sorted(chooser.settings.model_dump(exclude=outside).items()))
        return cls(settings, chooser.wanted if isinstance(chooser, Best) else chooser.samples)


@dataclass(eq=False)
class Board:
    """A whole search: slots, rules, random numbers and the model's state. A step changes it in place."""

    settings: Decoding
    how: How
    slots: Slots  # [N, K, T]: tokens are NONE where nothing is written yet
    done: Tensor  # [N] bool: left alone
    step: Tensor  # [1] tokens written so far
    last: Tensor  # [N, K] the token that each slot is fed next
    rules: Rules
    most: Tensor  # [N] the length penalty of the longest output
    penalty: Tensor  # [T + 1]
    keys: Words | None  # [N, K] what random draws are keyed by, on the host
    uniform: Tensor  # [N, K, T] the random numbers of every step; T is 0 where nothing is drawn
    state: Steady

    @classmethod
    def of(
        cls, rules: Rules, chooser: Best | Random, lines: Sequence[int], shape: Shape, state: Steady, begin: Tensor
    ) -> Board:
        """Before the first step, for which each sentence is fed `begin` [N]. `lines` are the sentences' numbers."""
        device, settings, size = rules.limit.device, chooser.settings, (shape.sentences, shape.beams)
        slots = Slots(
            tokens=torch.empty(*size, shape.room, dtype=torch.long, device=device),
            logprobs=torch.empty(*size, shape.room, device=device),
            total=torch.empty(size, device=device),
            length=torch.empty(size, dtype=torch.long, device=device),
            live=torch.empty(size, dtype=torch.bool, device=device),
            margin=torch.empty(shape.sentences, device=device),
        )
        board = cls(
            settings=settings,
            how=How.of(chooser),
            slots=slots,
            done=torch.empty(shape.sentences, dtype=torch.bool, device=device),
            step=torch.empty(1, dtype=torch.long, device=device),
            last=torch.empty_like(slots.length),
            rules=rules,
            most=torch.empty_like(slots.margin),
            penalty=length_penalties(settings.length_penalty, shape.room).to(device),
            keys=None,
            uniform=torch.empty(*size, 0 if isinstance(chooser, Best) else shape.room, device=device),
            state=state,
        )
        board.take(rules, chooser, lines)
        board.restart(begin)
        return board

    def __post_init__(self) -> None:
        device = self.done.device
        self._slot = torch.arange(self.last.shape[1], device=device)  # [K]
        self._first = torch.arange(self.last.shape[1] + 1, device=device) == 0  # [K + 1]

    def take(self, rules: Rules, chooser: Best | Random, lines: Sequence[int]) -> None:
        """What the host says of these sentences."""
        for own, new in zip(tensors_of(self.rules), tensors_of(rules), strict=True):
            own.copy_(new)
        if isinstance(chooser, Best):
            self.most.copy_(chooser.penalty[rules.limit])
        else:
            self.keys = keys(chooser.seed, lines, chooser.samples)
            self.uniform.copy_(_draws(self.keys, self.uniform.shape[-1]))

    def restart(self, begin: Tensor) -> None:
        """Before the first step. Beam search begins with one slot, the others empty; samples have one each."""
        slots, first = self.slots, 1 if self.settings.method == "beam" else self.last.shape[1]
        slots.tokens.fill_(NONE)
        slots.logprobs.zero_()
        slots.total.fill_(-math.inf)[:, :first] = 0
        slots.length.zero_()
        slots.live.fill_(False)[:, :first] = True
        slots.margin.fill_(math.inf)
        self.done.fill_(False)
        self.step.zero_()
        self.last.copy_(begin[:, None].expand_as(self.last))

    # -- its tensors ---------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """All that it consists of, in a fixed order."""
        yield from vars(self.slots).values()
        yield from (self.done, self.step, self.last, self.most, self.penalty, self.uniform)
        yield from tensors_of(self.rules)
        yield from self.state.tensors()

    @property
    def kind(self) -> tuple[object, ...]:
        """Boards of one kind take the same step."""
        shapes = tuple((tuple(x.shape), x.dtype) for x in self.tensors())
        return self.how, type(self.state), shapes

    def load(self, other: Board) -> None:
        """Be as another of the same kind, in the tensors that are here."""
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(new)
        self.keys = other.keys

    def keep(self, sentences: list[int]) -> Board:
        """A new board with these sentences only."""
        index = torch.tensor(sentences, device=self.done.device)
        return replace(
            self,
            slots=self.slots.keep(index),
            step=self.step.clone(),
            rules=self.rules.keep(index),
            keys=None if self.keys is None else self.keys[sentences],
            state=self.state.keep(index),
            **{name: getattr(self, name)[index] for name in ("done", "last", "most", "uniform")},
        )

    def grown(self, room: int) -> Board:
        """A new board with room for so many tokens."""
        more = room - self.slots.tokens.shape[-1]
        slots = replace(
            self.slots,
            tokens=F.pad(self.slots.tokens, (0, more), value=NONE),
            logprobs=F.pad(self.slots.logprobs, (0, more)),
        )
        penalty = length_penalties(self.settings.length_penalty, room).to(self.penalty.device)
        uniform = self.uniform if self.keys is None else _draws(self.keys, room).to(self.uniform.device)
        return replace(self, slots=slots, penalty=penalty, uniform=uniform, state=self.state.grown(room))

    def written(self, sentences: list[int], tokens: int) -> Slots:
        """The slots of some sentences, of whose histories so many tokens are written, as `step_by_step` has them.

        A copy, on the host.
        """
        kept = self.slots.on_host().keep(torch.tensor(sentences))
        return replace(kept, tokens=kept.tokens[..., :tokens], logprobs=kept.logprobs[..., :tokens])

    # -- one step ------------------------------------------------------------------------------------------------------

    def advance(self, model: Any) -> None:
        """One step. No branch depends on what is in a tensor."""
        self.decide(self.state.feed(model, self.last))

    def decide(self, logits: Tensor) -> None:
        """From the logits [N, K, V] to the slots after the step: discourage, strike out, choose, write down."""
        if self.rules.repetition != 1:
            logits = self.rules.discourage(logits.float(), self.slots.tokens)
        choose = self._best if self.settings.method == "beam" else self._drawn
        self._write(*choose(logits))
        self.settle()

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The best candidates of each sentence, as `search.Best` chooses them: parents, tokens, gains [N, K], margins.

        The K + 1 best of all are among the K + 1 best of every slot. Log-probabilities are less than the logits by the
        same for all of a slot, so they are worked out for the best alone.
        """
        slots, beams, less = self.slots, self.last.shape[1], log_sum(logits)
        forced, end = self._forced(logits, less), self._strike(logits, less)
        value, token = greatest(logits, beams + 1)  # [N, K, at most K + 1]
        value = value - less[..., None]
        alone, only, worth = self._alone(value[..., 0], forced, end)
        first = torch.where(self._first[: value.shape[-1]], worth[..., None], -math.inf)
        value = torch.where(alone[..., None], first, value)
        token = torch.where(alone[..., None], only[..., None], token)
        penalty = self.penalty[slots.length + slots.live]  # only live ones grow longer
        score = ((slots.total[..., None] + value) / penalty[..., None]).flatten(1)
        top = score.topk(min(beams + 1, score.shape[1]))
        chosen, margin = top.indices[:, :beams], torch.full_like(slots.margin, math.inf)
        if top.values.shape[1] > beams:
            kept, rejected = top.values[:, beams - 1], top.values[:, beams]
            margin = (kept - rejected).masked_fill_(rejected == -math.inf, math.inf)
        parents = chosen // value.shape[-1]
        return parents, token.flatten(1).gather(1, chosen), value.flatten(1).gather(1, chosen), margin

    def _drawn(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A random token for every slot, as `search.Random` draws it."""
        logp = F.log_softmax(logits, -1, dtype=torch.float32)
        forced, end = self._forced(logp, 0.0), self._strike(logp, 0.0)
        alone, only, worth = self._alone(logp.amax(-1), forced, end)
        nothing = torch.full_like(logp, -math.inf)
        logp = torch.where(alone[..., None], nothing.scatter_(-1, only[..., None], worth[..., None]), logp)
        choice = draw(logp, self.uniform.index_select(-1, self.step).squeeze(-1), self.settings)
        gained = logp.gather(-1, choice.tokens[..., None]).squeeze(-1)
        return choice.parents, choice.tokens, gained, choice.margin

    def _forced(self, logits: Tensor, less: Tensor | float) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where a prefix leaves no choice [N, 1], its token and that token's log-probability, logit - less, [N, K]."""
        width = self.rules.prefix.shape[1]
        if not width:
            return None
        token = self.rules.prefix.index_select(1, self.step.clamp(max=width - 1))
        inside = (token >= 0) & (self.step < width)
        token = token.clamp(min=0).expand_as(self.last)
        return inside, token, (logits.gather(-1, token[..., None]).squeeze(-1) - less).clamp(min=WORST)

    def _strike(self, logits: Tensor, less: Tensor | float) -> Tensor:
        """Put -inf where a token may not follow, in place; what ending would cost, [N, K], from before."""
        rules = self.rules
        end = (logits[..., END] - less).clamp(min=WORST)
        logits.index_fill_(-1, rules.forbidden, -math.inf)
        if rules.min_length:
            logits[..., END].masked_fill_(self.step < rules.min_length, -math.inf)
        if 0 < rules.no_repeat <= self.slots.tokens.shape[-1]:
            logits.masked_fill_(repeats_at(self.slots.tokens, self.step, rules.no_repeat, logits.shape[-1]), -math.inf)
        return end

    def _alone(
        self, best: Tensor, forced: tuple[Tensor, Tensor, Tensor] | None, end: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Slots with one candidate: [N, K] which they are, its token, and its log-probability.

        Where the `best` is impossible the hypothesis ends; a prefix forces its own; a slot that is not live goes on
        with the end mark, for nothing.
        """
        over = ~self.slots.live
        alone, token = (best == -math.inf) | over, torch.full_like(self.last, END)
        if forced is not None:
            inside, named, said = forced
            token, end = torch.where(inside & ~over, named, token), torch.where(inside, said, end)
            alone = alone | inside
        return alone, token, end.masked_fill(over, 0.0)

    def _write(self, parents: Tensor, tokens: Tensor, gained: Tensor, margin: Tensor) -> None:
        """Let the slots and the model's state follow a choice; a sentence that is done goes on from itself for nothing.

        What its slots say of a hypothesis stays the same: tokens past its length are not read.
        """
        slots, done = self.slots, self.done[:, None]
        parents, gained = torch.where(done, self._slot, parents), gained.masked_fill(done, 0.0)
        extended = slots.live.gather(1, parents) & ~done
        past = parents[..., None].expand_as(slots.tokens)
        for history, new in ((slots.tokens, tokens), (slots.logprobs, gained)):
            history.copy_(history.gather(1, past))
            history.index_copy_(2, self.step, new[..., None])
        torch.add(slots.total.gather(1, parents), gained, out=slots.total)
        torch.add(slots.length.gather(1, parents), extended, out=slots.length)
        torch.logical_and(extended & (tokens != END), slots.total > -math.inf, out=slots.live)
        torch.minimum(slots.margin, margin.masked_fill(self.done, math.inf), out=slots.margin)
        self.state.follow(parents)
        self.last.copy_(tokens)
        self.step.add_(1)

    def settle(self) -> None:
        """Sentences for which going on would change nothing are done; as `search.Best` and `search.Random` say it."""
        slots = self.slots
        if self.settings.method == "beam" and self.settings.early_stopping:
            bound = (slots.total / self.most[:, None]).masked_fill_(~slots.live, -math.inf).amax(1)
            score = (slots.total / self.penalty[slots.length]).masked_fill_(slots.live, -math.inf)
            wanted = min(self.how.wanted, score.shape[1])
            over = (score.amax(1) if wanted == 1 else score.topk(wanted).values[:, -1]) >= bound
        else:
            over = ~slots.live.any(1)
        self.done.logical_or_(over | (self.rules.limit <= self.step))

    def stop(self, sentences: list[int], where: Tensor) -> None:
        """The slots `where` [M, K] of these sentences are to be extended no further."""
        index = torch.tensor(sentences, device=self.done.device)
        self.slots.live.index_copy_(0, index, self.slots.live[index] & ~where.to(index.device))
        self.settle()


def tensors_of(rules: Rules) -> tuple[Tensor, ...]:
    return rules.limit, rules.prefix, rules.prompt, rules.forbidden


def _draws(keyed: Words, room: int) -> Tensor:
    """[N, K, T] the random numbers of T steps."""
    return uniforms(keyed[..., None], np.arange(room, dtype=np.uint64))


class Static:
    """Runs a search on a board; to be given to `search` as its `run`. Models that cannot do it go step by step.

    `sizes`: whether to round sizes up, so that boards of few kinds serve all searches.
    """

    ahead = 0  # steps taken before the answer to whether all is done has come; one that was not needed changes nothing

    def __init__(self, sizes: bool = False) -> None:
        self.sizes = sizes

    def __call__(self, model: Stepper, task: Task) -> Ended:
        return self._searched(model, task) if possible(model) else step_by_step(model, task)

    def _searched(self, model: Stepper, task: Task) -> Ended:
        if not isinstance(task.chooser, Best | Random):
            return step_by_step(model, task)
        with torch.inference_mode():
            board, places = self._board(model, task, task.chooser)
            return self._run(model, board, len(task.begin), places, task.watch)

    def _size(self, size: int, least: int) -> int:
        return rounded(size, least) if self.sizes else size

    def _board(self, model: Stepper, task: Task, chooser: Best | Random) -> tuple[Board, range]:
        """The board before the first step, and the places from the first token's to one past the last's.

        Spare sentences are as the last, and done from the beginning.
        """
        source, begin, rules, lines = task.source, task.begin, task.rules, task.lines
        count, before = len(begin), source.rows.longest if reads_on(model) else 0
        places = range(before, before + rules.longest)
        shape = Shape(
            sentences=self._size(count, 1),
            beams=chooser.settings.beam if isinstance(chooser, Best) else chooser.samples,
            room=min(self._size(before + ROOM, 16), self._size(places.stop, 16)),
            source=self._size(source.rows.longest, 16),
        )
        every = [*range(count), *[count - 1] * (shape.sentences - count)]
        filled = torch.tensor(every, device=rules.limit.device)
        fed = torch.tensor([begin[n] for n in every], device=rules.limit.device)
        narrow = self._narrowed(rules if len(every) == count else rules.keep(filled))
        board = self.opened(model, source, fed, narrow, chooser, [lines[n] for n in every], shape)
        board.done[count:] = True
        return board, places

    def opened(
        self,
        model: Stepper,
        source: TokenRow,
        begin: Tensor,
        rules: Rules,
        chooser: Best | Random,
        lines: Sequence[int],
        shape: Shape,
    ) -> Board:
        """A board of this shape, which may have sentences to spare after those of the source."""
        with torch.inference_mode(False), torch.no_grad():  # maps that the source's rows keep may be wanted in training
            state = model.start(source)
            if len(source.rows) < shape.sentences:
                spare = torch.arange(shape.sentences, device=begin.device).clamp(max=len(source.rows) - 1)
                state = state.keep(spare)
        return Board.of(rules, chooser, lines, shape, steady(model, state, shape), begin)

    def _narrowed(self, rules: Rules) -> Rules:
        """Prompts only where they count, and prefixes of few widths."""
        prefix, prompt = rules.prefix, rules.prompt[:, :0] if rules.repetition == 1 else rules.prompt

        def wide(x: Tensor) -> Tensor:
            return F.pad(x, (0, self._size(x.shape[1], 8) - x.shape[1]), value=NONE) if x.shape[1] else x

        return replace(rules, prefix=wide(prefix), prompt=wide(prompt))

    def _run(self, model: Stepper, board: Board, count: int, places: range, watch: Watch | None) -> Ended:
        inside = list(range(count))  # the sentences on the board, spare ones not counted
        going = list(range(count))  # those of them that are not done, by their places on the board
        steps, ended = 0, []
        while True:
            cancel.check()
            room = board.slots.tokens.shape[-1]
            end = min(room - places.start, len(places))  # steps for which there is room, and a use
            many = min(EVERY if watch is None else 1, end - steps)
            board, steps = self.steps(model, board, many), steps + many
            if watch is not None:
                stopped = watch([inside[n] for n in going], board.written(going, steps))
                if stopped is not None:
                    board.stop(going, stopped)
            look = self._look(board)
            more = min(self.ahead, end - steps) if watch is None else 0
            board, steps = self.steps(model, board, more), steps + more
            done = look()
            going = [n for n in going if not done[n]]
            if not going:
                ended.append((inside, board.written(list(range(len(inside))), steps)))
                return ended
            size, beams = self._size(len(going), 1), board.last.shape[1]
            if 2 * size <= len(done) and len(done) * beams > FEW:  # most are done: the others go on by themselves
                gone = [n for n in range(len(inside)) if done[n]]
                ended.append(([inside[n] for n in gone], board.written(gone, steps)))
                board = board.keep([*going, *[going[-1]] * (size - len(going))])
                board.done[len(going) :] = True
                inside, going = [inside[n] for n in going], list(range(len(going)))
            if places.start + steps == room < places.stop:
                board = board.grown(min(2 * room, self._size(places.stop, 16)))

    def _look(self, board: Board) -> Callable[[], list[bool]]:
        """Ask which sentences are done now. The answer may be waited for when something else is under way."""
        done = board.done.tolist()
        return lambda: done

    def steps(self, model: Stepper, board: Board, count: int) -> Board:
        """The board after so many steps; it may be another one, of the same kind."""
        for _ in range(count):
            board.advance(model)
        return board
