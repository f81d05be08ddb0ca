"""Search on a GPU: a step is recorded once as a CUDA graph and played again, so that the host has little left to do.

A decoding step of a small model is a few hundred tiny kernels, and starting one from Python takes longer than running
it. Recorded steps are kept, one for every kind of board (`static`), and sizes are rounded up so that there are few
kinds. Matrices are multiplied in bf16 where the precision says so, by a copy of the model whose matrices are bf16;
norms, positions and the residual stream stay in float32, as under autocast. Scores are summed in float32 either way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard import taps
from regard.attention.kernels import chosen
from regard.blocks import BatchNorm
from regard.decoding.penalties import Rules
from regard.decoding.search import Best, Ended, Random, Stepper, Task, step_by_step
from regard.decoding.static import Board, How, Static, tensors_of
from regard.decoding.steady import Caches, Padded, Parts, Shape, possible, reads_again
from regard.positions import Positions
from regard.rows import TokenRow
from regard.text import END

KEPT = 24  # recorded steps, of as many kinds of boards; those not used for longest are dropped
WORTH = 8  # steps from which on recording pays
EXACT = (nn.LayerNorm, nn.RMSNorm, BatchNorm, Positions)  # what stays in float32


class Replayed(Protocol):
    """Something that was done once and can be done again, with what is in the same tensors then."""

    def replay(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Recorded:
    """A step on this board, and on no other."""

    board: Board
    step: Replayed


@dataclass(eq=False)
class Opening:
    """The board of Transformers before the first step, which can be made so again for other sources."""

    board: Board
    source: TokenRow  # [N * S] ids, as `_padded` lays them
    begin: Tensor  # [N]
    again: Replayed | None = None

    def fill(self, source: TokenRow, begin: Tensor) -> None:
        self.source.ids.copy_(source.ids)
        self.source.rows.length.copy_(source.rows.length)
        self.begin.copy_(begin)

    def play(self, model: Any) -> None:
        """Read the sources, and lay everything out for the first step."""
        assert isinstance(self.board.state, Caches | Parts)
        self.board.state.restart(model, self.source.ids, self.source.rows.length)
        self.board.restart(self.begin)


def _padded(source: TokenRow, shape: Shape) -> TokenRow:
    """Sentences in rows of constant size; those to spare are a single token."""
    ids = source.ids.new_full((shape.sentences, shape.source), END)
    length = source.rows.length.new_ones(shape.sentences)
    rows = source.rows.pad(source.ids)  # [N, L]
    ids[: len(rows), : rows.shape[1]] = rows
    length[: len(rows)] = source.rows.length
    return TokenRow(ids.flatten(), Padded(length, shape.source))


class Half:
    """A copy of a model with its matrices in bf16, brought up to date before it is used."""

    def __init__(self, model: nn.Module) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.model = deepcopy(model).eval().requires_grad_(False)
            for module in self.model.modules():
                if not isinstance(module, EXACT):
                    for parameter in module.parameters(recurse=False):
                        parameter.data = parameter.data.to(torch.bfloat16)
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()
        self.tensors = _tensors(self.model)

    def follow(self, tensors: list[Tensor]) -> None:
        """Take a model's weights as they are now, so that none is ever out of date."""
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for own, new in zip(self.tensors, tensors, strict=True):
            into, out_of = groups.setdefault((own.dtype, new.dtype), ([], []))
            into.append(own)
            out_of.append(new)
        for into, out_of in groups.values():  # of one dtype each, so that many tensors are one kernel
            torch._foreach_copy_(into, out_of)


def _tensors(model: nn.Module) -> list[Tensor]:
    """All weights and buffers, in one walk; what is shared, as often as it is used."""
    each = ((*module._parameters.values(), *module._buffers.values()) for module in model.modules())
    return [tensor for tensors in each for tensor in tensors if tensor is not None]


class Captured(Static):
    """Runs searches with recorded steps; one for each model (`quickest`). What cannot be recorded goes step by step."""

    ahead = 1  # so that the GPU has work while the host looks

    def __init__(self, bf16: bool) -> None:
        super().__init__(sizes=True)
        self.bf16 = bf16
        self.records: dict[object, Recorded] = {}  # by the kind of board; the last used comes last
        self.openings: dict[object, Opening] = {}  # by the kind of search
        self.half: Half | None = None
        self.failed = False
        self._lock = Lock()  # a board serves one search at a time
        self._stream: torch.cuda.Stream | None = None  # what is recorded shares it, and so its memory too
        self._where: list[int] = []  # the addresses that what is recorded reads weights from
        self._weights: list[Tensor] = []  # the model's own
        self._fit = False  # whether the model with those can be recorded

    def __call__(self, model: Stepper, task: Task) -> Ended:
        if self.failed or task.rules.longest < WORTH or not undisturbed(model):
            return step_by_step(model, task)
        assert isinstance(model, nn.Module)
        device = task.source.ids.device
        with self._lock, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for _ in range(2):
                try:
                    used = self._ready(model)
                    if not self._fit:
                        break
                    with self._precision(device.type):
                        return self._searched(used, task)
                except torch.OutOfMemoryError:  # once more without what was kept for other searches
                    self._clear()
                    torch.cuda.empty_cache()
            else:
                self._say("the GPU has not enough memory for it")
        return step_by_step(model, task)

    def _ready(self, model: nn.Module) -> Stepper:
        """The model to step: itself, or its copy in bf16, which is to follow it before it is used."""
        self._weights = _tensors(model)
        where = [tensor.data_ptr() for tensor in self._weights]
        if self._where != where:  # weights that moved are not where what is recorded looks for them
            self._clear()
            self._where, self._fit, self.half = [], fit(model), None
            self.half = Half(model) if self.bf16 and self._fit else None
            self._where = where  # last: where there was no memory for all this, it is tried again
        return model if self.half is None else self.half.model  # type: ignore[return-value]

    def _follow(self) -> None:
        """Bring the copy in bf16, if there is one, up to date."""
        if self.half is not None:
            self.half.follow(self._weights)

    def _precision(self, device: str) -> AbstractContextManager[object]:
        """Whatever the precision around this is: the one that was asked for."""
        return torch.autocast(device, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False)

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
        """The first board of a kind is made as usual; after that, reading other sources is recorded on it, too."""
        if self.failed or not reads_again(model):
            self._follow()
            return super().opened(model, source, begin, rules, chooser, lines, shape)
        kind = How.of(chooser), shape, tuple(x.shape for x in tensors_of(rules))
        opening, source = self.openings.pop(kind, None), _padded(source, shape)
        if opening is None:
            self._follow()
            opening = Opening(super().opened(model, source, begin, rules, chooser, lines, shape), source, begin)
        else:
            opening.board.take(rules, chooser, lines)
            opening.fill(source, begin)
            if opening.again is None:
                opening.again = self._recorded(partial(self._reopen, opening, model))
            else:
                opening.again.replay()
        self.openings[kind] = opening
        _forget(self.openings)
        return opening.board

    def _reopen(self, opening: Opening, model: Any) -> None:
        self._follow()
        opening.play(model)

    def _look(self, board: Board) -> Callable[[], list[bool]]:
        if not board.done.is_cuda:
            return super()._look(board)
        done, copied = board.done.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()

        def look() -> list[bool]:
            copied.synchronize()
            return done.tolist()

        return look

    def steps(self, model: Stepper, board: Board, count: int) -> Board:
        if self.failed or not count:
            return super().steps(model, board, count)
        kind = board.kind
        found = self.records.pop(kind, None)
        if found is None:
            step, count = self._recorded(partial(board.advance, model)), count - 1
            if step is None:
                return super().steps(model, board, count)
            found = Recorded(board, step)
        elif found.board is not board:
            found.board.load(board)
        self.records[kind] = found
        _forget(self.records)
        for _ in range(count):
            found.step.replay()
        return found.board

    def _recorded(self, action: Callable[[], None]) -> Replayed | None:
        """Do something, which readies the libraries, and record it. None where that fails, once and for all."""
        outside = torch.cuda.current_stream()
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            action()
            stream.synchronize()
            try:
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    action()
                finally:
                    graph.capture_end()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.failed = True
                self._say(str(error).partition("\n")[0])
        outside.wait_stream(stream)
        return None if self.failed else graph

    def _clear(self) -> None:
        self.records.clear()
        self.openings.clear()

    def _say(self, why: str) -> None:
        print(f"regard: decoding on the GPU will be slower than it could be: {why}", file=sys.stderr)


def _forget(kept: dict[object, Any]) -> None:
    """What was not used for longest goes when there is too much."""
    if len(kept) > KEPT:
        del kept[next(iter(kept))]


_runs: WeakKeyDictionary[nn.Module, dict[bool, Captured]] = WeakKeyDictionary()


def fit(model: nn.Module) -> bool:
    """Whether a model's steps can be recorded: it has a state of constant shapes, and is on one GPU as a whole."""
    return possible(model) and all(type(parameter) is nn.Parameter for parameter in model.parameters())


def undisturbed(model: object) -> bool:
    """Whether a model is at work, and nobody wants to see inside it."""
    return isinstance(model, nn.Module) and not model.training and not taps.listening() and chosen() == "auto"


def captured(model: nn.Module, precision: str = "auto") -> Captured:
    """What runs the searches of a model on its GPU, with all that it has recorded; "auto" is bf16."""
    bf16 = precision in ("auto", "bf16")
    return _runs.setdefault(model, {}).setdefault(bf16, Captured(bf16))
