"""Search on a GPU: a step is captured once as a CUDA graph and replayed, so that the host has little left to do.

A decoding step of a small model is a few hundred tiny kernels, and launching one from Python takes longer than running
it. Graphs are kept, one for every kind of search (`StaticSearch.key`), and sizes are rounded up so that there are few
kinds. Matrices are multiplied in bf16 where the precision says so, by a copy of the model whose matrices are bf16;
norms, positions and the residual stream stay in float32, as under autocast. Scores are summed in float32 either way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard import taps, torch_private
from regard.attention.backends import requested_backend
from regard.decoding.constraints import Constraints
from regard.decoding.search import Results, SearchRequest, Stepper, Watch, run_eagerly
from regard.decoding.static_search import Setup, StaticRunner, StaticSearch, step_key
from regard.models.base import SequenceModel
from regard.models.decoder_state import StaticShape
from regard.nn.norms import BatchNorm
from regard.nn.positions import PositionEncoding
from regard.packed import PackedLayout, PackedTokens
from regard.text import EOS

MAX_GRAPHS = 24  # captured steps, of as many kinds of searches; the least recently used are dropped
MIN_STEPS = 8  # steps from which on capturing pays
EXACT = (nn.LayerNorm, nn.RMSNorm, BatchNorm, PositionEncoding)  # what stays in float32


class Graph(Protocol):
    """Something that was done once and can be done again, with what is in the same tensors then."""

    def replay(self) -> None: ...


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A step of this search, and of no other."""

    search: StaticSearch
    graph: Graph


@dataclass(eq=False)
class CapturedPrefill:
    """A search before its first step, which can be made so again for other sources."""

    search: StaticSearch
    source: PackedTokens  # [N * S] ids, as `_padded` lays them
    begin: Tensor  # [N]
    graph: Graph | None = None

    def fill(self, setup: Setup, source: PackedTokens) -> None:
        self.source.ids.copy_(source.ids)
        self.source.layout.length.copy_(source.layout.length)
        self.begin.copy_(setup.begin)
        self.search.beams.restart(setup.constraints, setup.begin, setup.lines, setup.request.seed)

    def run(self, model: Any) -> None:
        """Encode the sources, and lay everything out for the first step."""
        rows = PaddedLayout(
            self.source.layout.length, self.source.layout.max_len
        )  # new ones: rows cache what they compute
        model.restart(self.search.state, PackedTokens(self.source.ids, rows))
        self.search.beams.reset(self.begin)


class PaddedLayout(PackedLayout):
    """Rows of which the host knows only how many sentences they have, and how long these may be.

    Every sentence has `longest` positions, of which the first `length` [N] are real and the rest is padding.
    """

    def __init__(self, length: Tensor, longest: int) -> None:
        super().__init__([longest] * len(length), device=length.device)
        self.length = length

    @property
    def equal_lengths(self) -> bool:
        return False

    @property
    def may_have_padding(self) -> bool:
        return True

    @cached_property
    def is_token(self) -> Tensor:
        return self.padded_is_token.flatten()

    @cached_property
    def position(self) -> Tensor:
        place = torch.arange(self.max_len, device=self.device)
        return torch.where(
            self.padded_is_token, place, 0
        ).flatten()  # padding may go beyond the positions that a model has

    @cached_property
    def segment_ids(self) -> Tensor:
        return torch.arange(len(self), device=self.device)[:, None].expand(-1, self.max_len).flatten()

    def pad(self, flat: Tensor) -> Tensor:
        return flat.unflatten(0, (len(self), self.max_len))

    def flatten(self, padded: Tensor) -> Tensor:
        return padded.flatten(0, 1)


def _padded(source: PackedTokens, shape: StaticShape) -> PackedTokens:
    """Sentences in rows of constant size; those to spare are a single token."""
    ids = source.ids.new_full((shape.sentences, shape.source), EOS)
    length = source.layout.length.new_ones(shape.sentences)
    rows = source.layout.pad(source.ids)  # [N, L]
    ids[: len(rows), : rows.shape[1]] = rows
    length[: len(rows)] = source.layout.length
    return PackedTokens(ids.flatten(), PaddedLayout(length, shape.source))


class Bf16Copy:
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
            torch_private.foreach_copy_(into, out_of)


def _tensors(model: nn.Module) -> list[Tensor]:
    """All weights and buffers, in one walk; what is shared, as often as it is used."""
    each = ((*module._parameters.values(), *module._buffers.values()) for module in model.modules())
    return [tensor for tensors in each for tensor in tensors if tensor is not None]


class CapturedRunner(StaticRunner):
    """Runs searches by replaying captured steps, one runner a model. What cannot be captured runs eagerly."""

    ahead = 1  # so that the GPU has work while the host looks

    def __init__(self, bf16: bool) -> None:
        super().__init__(round_sizes=True)
        self.bf16 = bf16
        self.steps: dict[object, CapturedStep] = {}  # by the kind of search; the last used comes last
        self.prefills: dict[object, CapturedPrefill] = {}
        self.copy: Bf16Copy | None = None
        self.failed = False
        self._lock = Lock()  # a captured search serves one request at a time
        self._stream: torch.cuda.Stream | None = None  # graphs share it, and so its memory too
        self._where: list[int] = []  # the addresses that graphs read weights from
        self._weights: list[Tensor] = []  # the model's own
        self._obstacle: str | None = None  # why the model with those cannot be captured

    def __call__(
        self, model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None
    ) -> Results:
        if self.failed or constraints.longest < MIN_STEPS or not is_inference(model):
            return run_eagerly(model, request, constraints, watch)
        assert isinstance(model, nn.Module)
        device = request.source.ids.device
        with self._lock, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for _ in range(2):
                try:
                    used = self._ready(model)
                    if self._obstacle is not None:
                        break
                    with self._precision(device.type):
                        return self._run(used, request, constraints, watch)
                except torch.OutOfMemoryError:  # once more without what was kept for other searches
                    self._clear()
                    torch.cuda.empty_cache()
            else:
                self._warn("the GPU has not enough memory for it")
        return run_eagerly(model, request, constraints, watch)

    def _ready(self, model: nn.Module) -> Stepper:
        """The model to step: itself, or its copy in bf16, which is to follow it before it is used."""
        self._weights = _tensors(model)
        where = [tensor.data_ptr() for tensor in self._weights]
        if self._where != where:  # weights that moved are not where graphs read them
            self._clear()
            self._where, self._obstacle, self.copy = [], obstacle(model), None
            self.copy = Bf16Copy(model) if self.bf16 and self._obstacle is None else None
            if self._obstacle is not None:
                self._warn(self._obstacle)
            self._where = where  # last: where there was no memory for all this, it is tried again
        return model if self.copy is None else self.copy.model  # type: ignore[return-value]

    def _follow(self) -> None:
        """Bring the copy in bf16, if there is one, up to date."""
        if self.copy is not None:
            self.copy.follow(self._weights)

    def _precision(self, device: str) -> AbstractContextManager[object]:
        """Whatever the precision around this is: the one that was asked for."""
        return torch.autocast(device, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def opened(self, model: SequenceModel, setup: Setup) -> StaticSearch:
        """The first search of a kind is made as usual; after that, reading other sources is captured, too."""
        if self.failed or not model.can_restart:
            self._follow()
            return super().opened(model, setup)
        request, source = setup.request, _padded(setup.request.source, setup.shape)
        key = step_key(request.settings, request.nbest, setup.watched, request.margins), setup.shape
        kind = *key, tuple(x.shape for x in setup.constraints.tensors())
        prefill = self.prefills.pop(kind, None)
        if prefill is None:
            self._follow()
            padded = replace(setup, request=replace(request, source=source, lines=None, begin=None))
            prefill = CapturedPrefill(super().opened(model, padded), source, setup.begin)
        else:
            prefill.fill(setup, source)
            if prefill.graph is None:
                prefill.graph = self._captured(partial(self._refill, prefill, model))
            else:
                prefill.graph.replay()
        self.prefills[kind] = prefill
        _drop_oldest(self.prefills)
        return prefill.search

    def _refill(self, prefill: CapturedPrefill, model: Any) -> None:
        self._follow()
        prefill.run(model)

    def _poll(self, running: StaticSearch) -> Callable[[], list[bool]]:
        if not running.beams.done.is_cuda:
            return super()._poll(running)
        done, copied = running.beams.done.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()

        def poll() -> list[bool]:
            copied.synchronize()
            return done.tolist()

        return poll

    def advance(self, model: Stepper, running: StaticSearch, count: int) -> StaticSearch:
        if self.failed or not count:
            return super().advance(model, running, count)
        kind = running.key
        found = self.steps.pop(kind, None)
        if found is None:
            graph, count = self._captured(partial(running.advance, model)), count - 1
            if graph is None:
                return super().advance(model, running, count)
            found = CapturedStep(running, graph)
        elif found.search is not running:
            found.search.load(running)
        self.steps[kind] = found
        _drop_oldest(self.steps)
        for _ in range(count):
            found.graph.replay()
        return found.search

    def _captured(self, action: Callable[[], None]) -> Graph | None:
        """Do something, which initialises the libraries, and capture it. None where that fails, once and for all."""
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
                self._warn(str(error).partition("\n")[0])
        outside.wait_stream(stream)
        return None if self.failed else graph

    def _clear(self) -> None:
        self.steps.clear()
        self.prefills.clear()

    def _warn(self, why: str) -> None:
        print(f"regard: decoding on the GPU will be slower than it could be: {why}", file=sys.stderr)


def _drop_oldest(kept: dict[object, Any]) -> None:
    """Drop the least recently used when there are too many."""
    if len(kept) > MAX_GRAPHS:
        del kept[next(iter(kept))]


_runners: WeakKeyDictionary[nn.Module, dict[bool, CapturedRunner]] = WeakKeyDictionary()


def obstacle(model: nn.Module) -> str | None:
    """Why a model's steps cannot be captured; None: they can."""
    if not isinstance(model, SequenceModel) or not model.has_static_state:
        return f"{type(model).__name__} has no decoding state of constant shapes"
    if not all(type(parameter) is nn.Parameter for parameter in model.parameters()):
        return "the model's weights are not plain tensors on one GPU"
    return None


def is_inference(model: object) -> bool:
    """Whether a model is in evaluation mode, no tap listens, and no attention kernel is asked for by name."""
    return (
        isinstance(model, nn.Module)
        and not model.training
        and not taps.has_listeners()
        and requested_backend() == "auto"
    )


def captured(model: nn.Module, precision: str = "auto") -> CapturedRunner:
    """The runner of a model's searches on its GPU, with all the graphs it has; "auto" is bf16."""
    bf16 = precision in ("auto", "bf16")
    return _runners.setdefault(model, {}).setdefault(bf16, CapturedRunner(bf16))
