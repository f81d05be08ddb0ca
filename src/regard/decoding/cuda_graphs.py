"""Search on a GPU: each step is captured once as a CUDA graph and replayed, which leaves the host little to do.

A decoding step of a small model is a few hundred tiny kernels, and launching one from Python takes longer than running
it. One graph is kept per kind of search (`StaticSearch.key`), and sizes are rounded up so that there are few kinds.
In bf16, matmuls use a copy of the model with bf16 matrices; norms, positions and the residual stream stay in float32,
as under autocast. Scores are summed in float32 in any case.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from regard.decoding.search import Results, SearchRequest, Stepper, run_eagerly
from regard.decoding.static_search import Setup, StaticRunner, StaticSearch, step_key
from regard.decoding.watching import Watch
from regard.models.base import SequenceModel
from regard.models.decoder_state import StaticShape
from regard.nn.norms import BatchNorm
from regard.nn.positions import PositionEncoding
from regard.packed import PackedLayout, PackedRows

MAX_GRAPHS = 24  # captured steps to keep; the least recently used is dropped
MIN_STEPS = 8  # shorter searches are not worth capturing
FLOAT32 = (nn.LayerNorm, nn.RMSNorm, BatchNorm, PositionEncoding)  # modules that stay in float32


class Graph(Protocol):
    """A captured sequence of kernels, which reads and writes the same tensors whenever it is replayed."""

    def replay(self) -> None: ...


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A captured step of one search."""

    search: StaticSearch
    graph: Graph


@dataclass(eq=False)
class CapturedPrefill:
    """A search before its first step, and the graph that restarts it with other sources."""

    search: StaticSearch
    source: PackedRows  # [N * S] rows, from `_padded`
    begin: Tensor  # [N]
    graph: Graph | None = None

    def fill(self, setup: Setup, source: PackedRows) -> None:
        self.source.rows.copy_(source.rows)
        self.source.layout.length.copy_(source.layout.length)
        self.begin.copy_(setup.begin)
        self.search.hypotheses.restart(setup.constraints, setup.begin, setup.lines, setup.seeds)

    def run(self, model: Any) -> None:
        """Encode the sources and initialise the search."""
        layout = PaddedLayout(self.source.layout.length, self.source.layout.max_len)  # a new one: it caches tensors
        model.restart(self.search.state, self.source.with_rows(self.source.rows, layout))
        self.search.hypotheses.reset(self.begin)


class PaddedLayout(PackedLayout):
    """A layout of N sentences of `max_len` positions each, whose lengths [N] are known only to the device."""

    def __init__(self, length: Tensor, max_len: int) -> None:
        super().__init__([max_len] * len(length), device=length.device)
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
        index = torch.arange(self.max_len, device=self.device)
        return torch.where(self.padded_is_token, index, 0).flatten()  # padding may exceed the model's positions

    @cached_property
    def segment_ids(self) -> Tensor:
        return torch.arange(len(self), device=self.device)[:, None].expand(-1, self.max_len).flatten()

    def pad(self, flat: Tensor) -> Tensor:
        return self.zero_padding(flat).unflatten(0, (len(self), self.max_len))

    def zero_padding(self, flat: Tensor) -> Tensor:
        return flat.where(self.is_token.view(-1, *[1] * (flat.dim() - 1)), 0)

    def flatten(self, padded: Tensor) -> Tensor:
        return padded.flatten(0, 1)

    def convolved(self, kernel: int, stride: int = 1, padding: int = 0) -> PaddedLayout:
        extra = 2 * padding - kernel + stride
        length = torch.where(self.length > 0, (self.length + extra).clamp(min=0) // stride, 0)
        return PaddedLayout(length, max((self.max_len + extra) // stride, 0))


def _padded(source: PackedRows, shape: StaticShape) -> PackedRows:
    """Pad the source to a static shape; the sentences that fill the batch are a single row of zeros."""
    rows = source.rows.new_zeros(shape.sentences, shape.source, *source.rows.shape[1:])
    length = source.layout.length.new_ones(shape.sentences)
    padded = source.layout.pad(source.rows)  # [N, L, ...]
    rows[: len(padded), : padded.shape[1]] = padded
    length[: len(padded)] = source.layout.length
    return source.with_rows(rows.flatten(0, 1), PaddedLayout(length, shape.source))


class Bf16Copy:
    """A copy of a model with its matrices in bf16, updated before each search."""

    def __init__(self, model: nn.Module) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.model = deepcopy(model).eval().requires_grad_(False)
            for module in self.model.modules():
                if not isinstance(module, FLOAT32):
                    for parameter in module.parameters(recurse=False):
                        parameter.data = parameter.data.to(torch.bfloat16)
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()
        self.tensors = _tensors(self.model)

    def update(self, tensors: list[Tensor]) -> None:
        """Copy the current weights of the original."""
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for copy, original in zip(self.tensors, tensors, strict=True):
            copies, originals = groups.setdefault((copy.dtype, original.dtype), ([], []))
            copies.append(copy)
            originals.append(original)
        for copies, originals in groups.values():  # one kernel for all tensors of a dtype
            torch_private.foreach_copy_(copies, originals)


def _tensors(model: nn.Module) -> list[Tensor]:
    """All weights and buffers; shared ones as often as they are used."""
    lists = ((*module._parameters.values(), *module._buffers.values()) for module in model.modules())
    return [tensor for tensors in lists for tensor in tensors if tensor is not None]


class CapturedRunner(StaticRunner):
    """Runs searches of one model by replaying captured steps; searches that cannot be captured run eagerly."""

    ahead = 1  # so that the GPU is busy while the host reads which sentences are done

    def __init__(self, bf16: bool, coarse: bool = False) -> None:
        """`coarse`: round sizes to powers of 4, for searches whose number of sentences changes all the time."""
        super().__init__(round_sizes=True)
        self.bf16, self.coarse = bf16, coarse
        self.steps: dict[object, CapturedStep] = {}  # by `StaticSearch.key`, the most recently used last
        self.prefills: dict[object, CapturedPrefill] = {}
        self.copy: Bf16Copy | None = None
        self.failed = False
        self._lock = Lock()  # a captured search serves one request at a time
        self._stream: torch.cuda.Stream | None = None  # shared by all graphs, and so is its memory
        self._addresses: list[int] = []  # where graphs read the weights
        self._weights: list[Tensor] = []  # of the model itself
        self._obstacle: str | None = None  # why the model cannot be captured

    def __call__(
        self, model: Stepper, request: SearchRequest, constraints: Constraints, watch: Watch | None
    ) -> Results:
        if self.failed or constraints.longest < MIN_STEPS or not is_inference(model):
            return run_eagerly(model, request, constraints, watch)
        assert isinstance(model, nn.Module)
        device = request.source.layout.device
        with self._exclusive(device):
            for _ in range(2):
                try:
                    stepped = self._prepare(model)
                    if self._obstacle is not None:
                        break
                    with self._precision(device.type):
                        return self._run(stepped, request, constraints, watch)
                except torch.OutOfMemoryError:  # try again without the graphs of other searches
                    self.release()
            else:
                self._warn("there is not enough GPU memory")
        return run_eagerly(model, request, constraints, watch)

    def size(self, size: int, least: int) -> int:
        return max(least, 4 ** math.ceil(math.log(size, 4))) if self.coarse and size else super().size(size, least)

    @contextmanager
    def session(self, model: SequenceModel) -> Iterator[Stepper]:
        device = next(model.parameters()).device
        with self._exclusive(device):
            if not self._addresses:  # the weights of a session do not move
                self._prepare(model)
            with self._precision(device.type):
                yield model if self.copy is None else self.copy.model  # type: ignore[misc]

    @contextmanager
    def _exclusive(self, device: torch.device) -> Iterator[None]:
        """Let one thread at a time capture and replay, on this device."""
        with self._lock, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield

    def _prepare(self, model: nn.Module) -> Stepper:
        """Return the model to step: the given one, or its bf16 copy, which `_update_copy` then updates."""
        self._weights = _tensors(model)
        addresses = [tensor.data_ptr() for tensor in self._weights]
        if self._addresses != addresses:  # the weights are not where the graphs read them
            self._clear()
            self._addresses, self._obstacle, self.copy = [], obstacle(model), None
            self.copy = Bf16Copy(model) if self.bf16 and self._obstacle is None else None
            if self._obstacle is not None:
                self._warn(self._obstacle)
            self._addresses = addresses  # last, so that this is tried again if memory runs out
        return model if self.copy is None else self.copy.model  # type: ignore[return-value]

    def _update_copy(self) -> None:
        if self.copy is not None:
            self.copy.update(self._weights)

    def _precision(self, device: str) -> AbstractContextManager[object]:
        """Set the requested precision, independent of the caller's autocast."""
        return torch.autocast(device, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def opened(self, model: SequenceModel, setup: Setup) -> StaticSearch:
        """Create the first search of a kind; from the second on, restarting it with other sources is captured."""
        if self.failed or not model.can_restart:
            self._update_copy()
            return super().opened(model, setup)
        request, source = setup.request, _padded(setup.request.source, setup.shape)
        key: tuple[object, ...] = step_key(request.settings, request.nbest, setup.watched), setup.shape
        key = *key, tuple(x.shape for x in setup.constraints.tensors())
        prefill = self.prefills.pop(key, None)
        if prefill is None:
            self._update_copy()
            shared = replace(request, source=source, lines=None, begin=None, seed=0, terms=None)
            padded = replace(setup, request=shared)
            prefill = CapturedPrefill(super().opened(model, padded), source, setup.begin)
        else:
            prefill.fill(setup, source)
            if prefill.graph is None:
                prefill.graph = self._captured(partial(self._refill, prefill, model))
            else:
                prefill.graph.replay()
        self.prefills[key] = prefill
        _drop_oldest(self.prefills)
        return prefill.search

    def _refill(self, prefill: CapturedPrefill, model: Any) -> None:
        self._update_copy()
        prefill.run(model)

    def _poll(self, search: StaticSearch) -> Callable[[], list[bool]]:
        if not search.hypotheses.done.is_cuda:
            return super()._poll(search)
        done, copied = search.hypotheses.done.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()

        def poll() -> list[bool]:
            copied.synchronize()
            return done.tolist()

        return poll

    def advance(self, model: Stepper, search: StaticSearch, count: int) -> StaticSearch:
        if self.failed or not count:
            return super().advance(model, search, count)
        key = search.key
        step = self.steps.pop(key, None)
        if step is None:
            graph, count = self._captured(partial(search.advance, model)), count - 1
            if graph is None:
                return super().advance(model, search, count)
            step = CapturedStep(search, graph)
        elif step.search is not search:
            step.search.load(search)
        self.steps[key] = step
        _drop_oldest(self.steps)
        for _ in range(count):
            step.graph.replay()
        return step.search

    def _captured(self, action: Callable[[], None]) -> Graph | None:
        """Run an action, which initialises the libraries, then capture it. None if that fails; it is not retried."""
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

    def release(self) -> None:
        self._clear()
        torch.cuda.empty_cache()

    def _clear(self) -> None:
        self.steps.clear()
        self.prefills.clear()

    def _warn(self, why: str) -> None:
        print(f"regard: decoding on the GPU is slower than it could be: {why}", file=sys.stderr)


def _drop_oldest(kept: dict[object, Any]) -> None:
    """Drop the least recently used entry if there are too many."""
    if len(kept) > MAX_GRAPHS:
        del kept[next(iter(kept))]


_runners: WeakKeyDictionary[nn.Module, dict[bool, CapturedRunner]] = WeakKeyDictionary()


def obstacle(model: nn.Module) -> str | None:
    """Return why a model's steps cannot be captured; None: they can."""
    if not isinstance(model, SequenceModel) or not model.has_static_state:
        return f"{type(model).__name__} has no decoding state with static shapes"
    if not all(type(parameter) is nn.Parameter for parameter in model.parameters()):
        return "the model's weights are not plain tensors on one GPU"
    return None


def is_inference(model: object) -> bool:
    """Return whether a model is in evaluation mode, no tap listens, and no attention backend is requested by name."""
    return (
        isinstance(model, nn.Module)
        and not model.training
        and not taps.has_listeners()
        and requested_backend() == "auto"
    )


def captured(model: nn.Module, precision: str = "auto") -> CapturedRunner:
    """Return the runner of a model, with the graphs it has captured; precision "auto" means bf16."""
    bf16 = precision in ("auto", "bf16")
    return _runners.setdefault(model, {}).setdefault(bf16, CapturedRunner(bf16))
