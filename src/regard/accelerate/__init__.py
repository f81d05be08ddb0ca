"""Faster execution of finished models: the one place that decides how a model runs on a device.

Models are defined plainly (`regard.nn`, `regard.models`). `for_training` and `for_inference` replace parts of them by
faster equivalents, without changing parameters or their names:

- fused blocks on a GPU with Triton (`fused`)
- torch.compile, block by block (`compile`); the whole step is then captured as a CUDA graph (`training.step`)
- activation checkpointing (`recompute`)
- several devices: DDP, FSDP2 (`parallel`); DDP of captured steps (`overlapped_sums`)
- bf16 working copies of the weights (`bf16_weights`)
- prepacked or int8 linear layers on a CPU (`linear_backends`); decoding steps with fewer operators (`decoding_blocks`)

Tests compare each of them with the plain definition.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from regard import distributed, kernels
from regard.accelerate import linear_backends
from regard.accelerate.bf16_weights import Bf16Weights
from regard.accelerate.compile import compile_parts, is_compiled, remove_compiled
from regard.accelerate.decoding_blocks import use_step_blocks
from regard.accelerate.fused import deferred_biases, fuse
from regard.accelerate.overlapped_sums import OverlappedSums
from regard.accelerate.parallel import DataParallel, Replicated, Sharded, can_capture, is_sharded, shard, shards
from regard.accelerate.recompute import checkpoint_activations
from regard.errors import UserError, first_line
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.precision import autocast, in_bf16
from regard.recipes.schema import TrainingSettings

# Ways to run a training step, the fastest first. All but plain need static batches, whose shapes never change; "static"
# is for sharded models whose steps are not captured.
BACKENDS = ("compiled", "captured", "static", "plain")
LONG_JOB = 1e17  # FLOPs (minutes on a large GPU) from which compilation saves more time than it takes


def for_inference(model: SequenceModel, precision: str = "fp32") -> None:
    """Prepare a model for decoding and evaluation on its device; `precision` (fp32 or int8) is for CPUs."""
    if next(model.parameters()).device.type == "cpu":
        linear_backends.prepare(model, precision)
        use_step_blocks(model)
    elif kernels.available():
        fuse(model)


def requested_backend(settings: TrainingSettings, model: SequenceModel, device: torch.device) -> str:
    """The backend for training steps: the recipe's, or for "auto" captured if device and model allow, else plain."""
    can = device.type == "cuda" and model.static_shapes and not settings.checkpoint_activations and kernels.available()
    if settings.backend == "auto":
        return ("captured" if can_capture(settings) else "static") if can else "plain"
    if settings.backend != "plain" and not can:
        raise UserError(
            f'training.backend = "{settings.backend}" needs a GPU with Triton and a C compiler, a Transformer, GPT, '
            'BERT or ViT without a sparse mask, and no checkpoint_activations: try "auto"'
        )
    return settings.backend


def for_training(
    model: SequenceModel,
    settings: TrainingSettings,
    device: torch.device,
    backend: str = "plain",
    batch: SeqBatch | None = None,
    say: Callable[[str], None] = print,
) -> str:
    """Prepare a model for training steps on its device; return the backend that works, and log it in one line.

    A backend other than plain is tried on a static batch; if it fails, the next slower one is used. With "auto", a
    captured step is also compiled if the job is long. The trial changes no gradients, running statistics or generators.
    """
    applied = []
    sharded = shards(settings)
    if settings.checkpoint_activations:
        checkpoint_activations(model)  # plain blocks only: the pending sums of fused ones would take more memory
        applied.append("activation checkpointing")
    elif device.type == "cuda" and kernels.available():
        fuse(model, sharded)
        applied.append("fused blocks")
    if sharded:
        shard(model, settings, device)
        applied.append(f"fsdp on {distributed.world_size()} devices")
    elif distributed.is_initialised():
        applied.append(f"ddp on {distributed.world_size()} devices")
    if backend != "plain" and settings.backend == "auto" and worth_compiling(model, settings):
        backend = "compiled"
    if backend == "captured" and not can_capture(settings):
        devices = distributed.world_size()
        say(f"steps under FSDP are captured only if training.accumulate is at most {devices}, the number of devices")
    for name in BACKENDS[BACKENDS.index(backend) :]:
        if name == ("static" if can_capture(settings) else "captured"):
            continue
        backend = name
        if name == "plain" or (batch is not None and _works(name, model, batch, settings, device, say)):
            break
    if backend != "plain" and _uses_bf16_weights(settings, device):
        applied.append("bf16 weights")
    if device.type == "cuda" and not kernels.available():
        say(f"training on this GPU will be much slower than it could be: {kernels.why_not()}")
    elif device.type == "cuda" or distributed.is_initialised():
        say(f"training step: {', '.join([backend, *applied])}")
    return backend


def worth_compiling(model: SequenceModel, settings: TrainingSettings) -> bool:
    """Return whether a job is long, by the estimate of six FLOPs per weight and token.

    `models.flops` is exact, but needs sentence lengths on the host, which static batches do not have.
    """
    weights, passes = sum(p.numel() for p in model.parameters()), 2 if settings.r_drop else 1
    return 6.0 * weights * passes * settings.batch_tokens * settings.accumulate * settings.steps >= LONG_JOB


def data_parallel(
    model: SequenceModel, settings: TrainingSettings, device: torch.device, backend: str
) -> DataParallel | None:
    """The sum of gradients over processes during the backward pass; None without a process group."""
    if not distributed.is_initialised():
        return None
    if shards(settings):
        return Sharded(model, settings)
    if backend == "plain":
        return Replicated(model, device)
    return OverlappedSums(model, bf16_weights(model, settings, device))


def bf16_weights(model: SequenceModel, settings: TrainingSettings, device: torch.device) -> Bf16Weights | None:
    """bf16 copies of the weights for static steps, if training is in bf16; FSDP gathers bf16 weights itself."""
    if not _uses_bf16_weights(settings, device):
        return None
    return Bf16Weights(model, deferred_biases(model), adds=settings.accumulate > 1)


def bf16_context(copies: Bf16Weights | None) -> AbstractContextManager[None]:
    """Let the model use the copies, if there are any, while the context lasts."""
    return nullcontext() if copies is None else copies.active()


def _uses_bf16_weights(settings: TrainingSettings, device: torch.device) -> bool:
    return in_bf16(settings.precision, device) and not shards(settings)


def _works(
    backend: str,
    model: SequenceModel,
    batch: SeqBatch,
    settings: TrainingSettings,
    device: torch.device,
    say: Callable[[str], None],
) -> bool:
    """Try a backend; if it fails, log why and undo it."""
    if backend == "compiled":
        say("compiling the training step")
        torch.compiler.reset()  # code compiled earlier in this process would count towards the recompilation limit
        compile_parts(model)
    try:
        _try(model, batch, settings, device)
    except Exception as error:  # compilers raise many kinds
        say(f"the training step cannot be {backend} here, and goes on without: {first_line(error)}")
        remove_compiled(model)
        return False
    return True


def _try(model: SequenceModel, batch: SeqBatch, settings: TrainingSettings, device: torch.device) -> None:
    """Run one forward and backward pass without side effects."""
    model.train()
    before = [buffer.clone() for buffer in model.buffers()]
    copies = bf16_weights(model, settings, device)
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    try:
        with random, bf16_context(copies), autocast(settings.precision, device):
            model(batch, settings.label_smoothing, settings.r_drop).backward()
    finally:
        model.zero_grad(set_to_none=True)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


__all__ = [
    "BACKENDS",
    "Bf16Weights",
    "DataParallel",
    "bf16_context",
    "bf16_weights",
    "checkpoint_activations",
    "compile_parts",
    "data_parallel",
    "for_inference",
    "for_training",
    "fuse",
    "is_compiled",
    "is_sharded",
    "remove_compiled",
    "requested_backend",
    "shards",
    "use_step_blocks",
    "worth_compiling",
]
