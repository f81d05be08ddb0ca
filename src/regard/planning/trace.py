"""One training step on tensors without data: what it stores, computes and moves.

The model, the optimizer and the step are those of training (`regard.accelerate`, `regard.training.step`), with batches
of the shapes that the packer makes of synthetic sentences. Only the data are missing, so a step of any model takes
about a second on a laptop. Memory is counted as PyTorch's allocator counts it, in blocks of 512 bytes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from statistics import mean
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from regard import accelerate, kernels, tasks, torch_private
from regard.data.stream import generator
from regard.data.token_store import Array, CorpusReport, Ragged, TokenStore
from regard.errors import UserError
from regard.models import SequenceModel, build, flops
from regard.nn import lora
from regard.packed import Batch
from regard.planning.hardware import EFFICIENCY
from regard.recipes.schema import Recipe
from regard.registry import OPTIMIZERS
from regard.run_dir import RunDir
from regard.tasks.base import Dataset
from regard.tasks.text import TextTask, TokenDataset
from regard.text import train as train_tokenizer
from regard.training.checkpoint import EMA
from regard.training.static_batch import StaticBatchShape
from regard.training.step import TrainingStep

BLOCK = 512  # bytes: the allocator rounds up to multiples of this
PAIR_TOKENS = 27  # mean tokens of a sentence, if not given: those of WMT'14 English-German in subwords
SYNTHETIC_TOKEN = 5  # the token of synthetic sentences: any ordinary one
BATCHES = 5  # number of batches of synthetic sentences
LENGTH_SPREAD = 0.55  # standard deviation of the logarithm of a length
GATHERS = ("embedding", "index_select", "gather", "index")  # read as many bytes of their first input as they write


@dataclass(frozen=True)
class Kernel:
    """The arithmetic and the memory traffic of one operator."""

    name: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class StepTrace:
    """A training step on one device, in bytes and FLOPs."""

    shapes: list[tuple[torch.Size, str]]  # each parameter's shape, and the name of the block or module that owns it
    parameters: int  # elements
    weights: int  # bytes
    optimizer: int  # with a moving average of the weights
    copies: int  # bf16 copies of the weights
    gradients: int
    activations: int  # activations and temporary tensors alive at the peak, without the logits
    logits: int  # logits and their gradient, alive at the peak
    peak: int
    backend: str
    targets: float  # tokens that count in the loss, on average
    model_flops: float  # by formula, as `regard bench` counts them
    micro_batches: int  # micro-batches traced: 2 where gradients are accumulated
    step: list[Kernel]  # kernels of the forward and backward passes of these micro-batches
    update: list[Kernel]  # kernels of clipping, the optimizer and the moving average

    @property
    def persistent(self) -> int:
        """Bytes that are allocated between steps."""
        return self.weights + self.optimizer + self.copies


class Ledger:
    """Counts the storages that are alive, and records kernels."""

    def __init__(self, keys: float = 0.0) -> None:
        self.keys = keys  # mean number of keys per query, without a mask
        self.alive: Counter[str] = Counter()  # bytes by the operator that made them
        self.total = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.recorded: list[Kernel] = []
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def watch(self, func: Any, given: Any, result: Any) -> None:
        name = _name(func)
        reads = _tensors(given)
        for tensor in reads:
            self._add(tensor, "given")  # unless it is known already
        made = [tensor for tensor in _tensors(result) if self._add(tensor, name)]
        written = [given[0][i] for i in torch_private.mutated_arguments(func) if i < len(given[0])]
        changed = _tensors(written)
        if not (made or changed) or name.startswith(("empty", "new_empty", "detach", "resize")):
            return  # a view, or memory that no kernel writes
        written_bytes = _bytes(made) + _bytes(changed)
        read_bytes = _bytes(reads)
        if name in GATHERS and reads:
            read_bytes += written_bytes - _bytes(reads[:1])
        if name == "cross_entropy_with_grad":
            written_bytes *= 4  # a matmul writes the logits, and the kernel reads them twice and writes the gradient
        work = _flops(func, given[0], given[1], result, self.keys)
        self.recorded.append(Kernel(name, work, read_bytes + written_bytes))

    def _add(self, tensor: Tensor, name: str) -> bool:
        """Count the storage of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return False
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._known[storage] = size
        self.alive[name] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, self.alive.copy()
        weakref.finalize(storage, self._remove, name, size)
        return True

    def _remove(self, name: str, size: int) -> None:
        self.alive[name] -= size
        self.total -= size

    def restart(self) -> None:
        """Measure peak and kernels from here on."""
        self.peak, self.at_peak, self.recorded = self.total, self.alive.copy(), []


def _name(func: Any) -> str:
    """The name of an operator without namespace and overload: "mm"."""
    return str(func.name()).partition("::")[2].partition(".")[0]


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []


def _bytes(tensors: list[Tensor]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors)


def _flops(func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any, keys: float) -> float:
    """FLOPs of matmuls, by PyTorch's formulas, and of the kernels that contain some.

    Our attention kernel computes `keys` keys for each query on average, of which a causal one needs half, and a tile
    more; PyTorch's reads all keys of a window.
    """
    name = _name(func)
    if name in ("cross_entropy_with_grad", "linear_relu"):
        return 2.0 * args[0].numel() * len(args[1])
    if is_attention(name):
        backward = name.endswith("backward")
        query, causal = args[backward], any(argument is True for argument in args)
        keys = keys if name.startswith("varlen") else args[backward + 1].shape[-2]
        tile = EFFICIENCY.tile if name.startswith("varlen") else 0
        return (10.0 if backward else 4.0) * query.numel() * (keys * (0.5 if causal else 1.0) + tile)
    formula = flop_registry.get(func.overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **named, out_val=result))


def is_attention(name: str) -> bool:
    """Whether an operator is an attention kernel."""
    return name.startswith(("varlen_attention", "_scaled_dot_product"))


@dataclass(eq=False)
class _TracedStep(TrainingStep):
    """The step of training, captured or plain, with the kernels of both parts apart."""

    shape: StaticBatchShape[Any] | None = None
    working: Any = nullcontext  # the context of `Bf16Weights`
    ledger: Ledger = field(default_factory=Ledger)
    computing: list[Kernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape is not None:
            self.buffer = torch.zeros(self.shape.size, dtype=torch.uint8, device=self.device)

    def run(self, batch: Batch, micro_batches: int) -> None:
        """Like `__call__`, which would count the targets: there is nothing to count."""
        self._upload_scalars(1.0, 0.0, 1)
        for _ in range(micro_batches):
            self._accumulate(batch)
        self._update()

    def _accumulate(self, batch: Batch) -> None:
        with self.working():
            self._backward(batch if self.shape is None else self.shape.unflatten(self.buffer))

    def _update(self) -> None:
        self.computing, self.ledger.recorded = self.ledger.recorded, []
        super()._update()


def trace(recipe: Recipe, *, gpu: bool = True, length: int | None = None, sharded: bool = False) -> StepTrace:
    """Trace a step of a recipe on a GPU, or on a CPU; `length` is the mean length of a sentence in tokens.

    The blocks of a `sharded` model gather bf16 weights, as `accelerate.parallel.shard` makes it.
    """
    _refuse_old_libraries(gpu)
    example, settings = Example.of(recipe, gpu, length, sharded), recipe.training
    batch, shape = example.batch, example.shape
    target = torch.device("cuda" if gpu else "cpu")
    precision = "bf16" if settings.precision == "bf16" or (gpu and settings.precision == "auto") else "fp32"
    settings = settings.model_copy(update={"precision": precision})
    host = torch.device("cpu")  # the device that tensors without data report
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        if gpu:
            stack.enter_context(kernels.simulated())
        stack.enter_context(torch_private.fake_tensors())
        ledger = Ledger(mean_keys(batch))
        stack.enter_context(torch_private.watch_operators(ledger.watch))
        model = example.model(recipe)
        if sharded and gpu and not settings.checkpoint_activations:
            accelerate.fuse(model, sharded)
        else:
            accelerate.for_training(model, settings, target, "plain", say=lambda line: None)
        optimizer = OPTIMIZERS[settings.optimizer](model, settings)
        average = EMA(model, settings.ema) if settings.ema else None
        copies = ledger.total
        working: Any = nullcontext
        if sharded and precision == "bf16":
            working = accelerate.Bf16Weights(model).active  # in place of gathered weights
        elif shape is not None:
            working = partial(accelerate.bf16_context, accelerate.bf16_weights(model, settings, target))
        copies = ledger.total - copies
        step = _TracedStep(model, optimizer, average, settings, host, shape, working, ledger)
        try:
            step.run(batch, 1)  # makes the state of the optimizer
        except Exception as error:
            if operator := torch_private.needs_data(error):
                why = f"a result of {operator} depends on data, as in speech models with CTC"
                raise UserError(f"this model cannot be planned: {why}") from error
            raise
        ledger.restart()
        before = ledger.total
        step.run(batch, min(settings.accumulate, 2))
        return _summary(model, step, example, before, copies)


def _refuse_old_libraries(gpu: bool) -> None:
    if not torch_private.can_trace():
        raise UserError(f"planning needs tensors without data, which PyTorch {torch.__version__} does not offer")
    if gpu and find_spec("triton") is None:
        raise UserError("planning for a GPU needs Triton, whose kernels it counts: pip install triton (on Linux)")


def mean_keys(batch: Batch) -> float:
    """The mean over tokens of the length of their sentence."""
    layout = getattr(getattr(batch, "inputs", None), "layout", None)
    lengths = np.array(layout.lengths if layout is not None and len(layout) else [1])
    return float((lengths**2).sum() / max(lengths.sum(), 1))


def _summary(model: SequenceModel, step: _TracedStep, example: Example, before: int, copies: int) -> StepTrace:
    parameters, ledger = list(model.parameters()), step.ledger
    weights = sum(_rounded(t) for t in chain(parameters, model.buffers()))
    logits = ledger.at_peak["cross_entropy_with_grad"]
    # The compiler recomputes in the backward pass what is only a cast.
    recomputed = ledger.at_peak["_to_copy"] - copies if example.backend == "compiled" else 0
    return StepTrace(
        shapes=[(p.shape, _unit(name)) for name, p in model.named_parameters()],
        parameters=sum(p.numel() for p in parameters),
        weights=weights,
        optimizer=before - weights - copies,
        copies=copies,
        gradients=sum(_rounded(p) for p in parameters if p.requires_grad),
        activations=ledger.peak - before - logits - recomputed,
        logits=logits,
        peak=ledger.peak - recomputed,
        backend=example.backend,
        targets=example.targets,
        model_flops=example.flops,
        micro_batches=min(step.settings.accumulate, 2),
        step=step.computing,
        update=ledger.recorded,
    )


def _rounded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // BLOCK) * BLOCK


def _unit(name: str) -> str:
    """The part of the model that FSDP gathers at once: a block such as "encoder.3", or all that is in no block."""
    parts = name.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 and parts[1].isdigit() else ""


@dataclass(frozen=True)
class Example:
    """A batch as training packs it, and what else a step needs to know."""

    batch: Batch
    shape: StaticBatchShape[Any] | None  # shape of static batches
    backend: str
    source_size: int
    target_size: int  # tokens, or classes
    shared: bool
    targets: float  # mean number of targets of a batch
    flops: float  # mean FLOPs of an update

    @classmethod
    def of(cls, recipe: Recipe, gpu: bool, length: int | None = None, sharded: bool = False) -> Example:
        task = tasks.of(recipe)
        names, features, scales = task.class_names(), task.feature_names(), task.scales()
        labels = len(scales) or min(len(names), 1)  # number of labels of a text, if it has labels
        source_size = recipe.text.vocabulary if recipe.data.has_tokens else len(features)
        sizes = source_size, len(names) or len(scales) or recipe.text.vocabulary, recipe.text.shared and not names
        with torch.device("meta"):
            model = build(recipe.model, *sizes)
        with kernels.simulated() if gpu else nullcontext():
            backend = accelerate.requested_backend(recipe.training, model, torch.device("cuda" if gpu else "cpu"))
        if backend == "captured" and recipe.training.backend == "auto":
            long = accelerate.worth_compiling(model, recipe.training)
            backend = "compiled" if long else "static" if sharded else "captured"
        tokenizer = train_tokenizer(["a"], "char", 300, list(recipe.model.extra_tags))
        known = {"tokenizers": (tokenizer, tokenizer), "classes": names, "features": features, "scales": scales}
        run = cast(RunDir, SimpleNamespace(**known, recipe=recipe))
        if isinstance(task, TextTask):
            dataset: Dataset = TokenDataset([synthetic(recipe, length, labels)] * len(task.weights))
        else:
            dataset = task.dataset(run)
        stream = task.stream(run, dataset, backend != "plain").batches()
        batches = [batch for batch, _ in islice(stream, BATCHES - 1)]
        shape = None if backend == "plain" else StaticBatchShape(batches[0])
        passes = 2 if recipe.training.r_drop else 1
        work = mean(passes * flops.update(recipe.model, batch, sizes[1]) for batch in batches)
        return cls(batches[0], shape, backend, *sizes, mean(batch.num_targets for batch in batches), work)

    def model(self, recipe: Recipe) -> SequenceModel:
        model, training = build(recipe.model, self.source_size, self.target_size, self.shared), recipe.training
        if training.adapter == "lora":
            lora.add_adapters(model, training.adapter_rank, training.adapter_alpha, training.adapter_targets)
        return model.train()


def synthetic(recipe: Recipe, length: int | None, labels: int = 0) -> TokenStore:
    """Sentences with log-normal lengths around a mean, enough for a few batches; their tokens do not matter.

    Targets are so many `labels` of each sentence, if there are any.
    """
    plain, tokens = recipe.data.kind == "text", recipe.training.batch_tokens
    context, random = recipe.model.max_positions, generator(1)
    longest = min(context, tokens if plain else recipe.data.max_length)
    middle = min(length or (context if plain else PAIR_TOKENS), longest)
    count = max(BATCHES * tokens // middle, 64)
    if plain and recipe.data.documents == "stream":
        targets = np.array([(BATCHES + 1) * max(tokens, context)])
    elif plain and middle == longest:
        targets = np.full(count, middle)
    else:
        targets = random.lognormal(np.log(middle) - LENGTH_SPREAD**2 / 2, LENGTH_SPREAD, count).round().clip(2, longest)
    sources = np.zeros_like(targets) if plain else (targets * random.lognormal(0, 0.15, count)).round().clip(2, longest)
    if labels:
        targets = np.full(len(targets), labels)
    source, target = (_ragged(lengths.astype(np.int64)) for lengths in (sources, targets))
    return TokenStore(source, target, CorpusReport(len(targets), 0, 0, len(source.ids), len(target.ids)))


def _ragged(lengths: Array) -> Ragged:
    """Sequences of these lengths, all of one token."""
    offsets = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    return Ragged(np.full(offsets[-1], SYNTHETIC_TOKEN, np.uint16), offsets)
