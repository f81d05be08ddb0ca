"""The resume state of a run: what is saved to continue from the exact batch, and how."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard import sharding, tensor_io, torch_private
from regard.data.stream import StreamPosition
from regard.errors import UserError
from regard.files import errno_text, regular
from regard.recipes.schema import TrainingSettings
from regard.training.sharded_state import load_shards

LogState = list[Any]  # the length of a log in bytes, and its digest


class Log:
    """A file of JSON lines that grows during training. A resumed run cuts it back to the state that was saved."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._hash = path, 0, hashlib.blake2b(digest_size=16)
        self._on_disk = 0  # bytes that were synchronised

    def append(self, line: str) -> None:
        content = (line + "\n").encode()
        try:
            with open(self.path, "ab") as file:
                file.write(content)
        except OSError as error:
            raise UserError(f"{self.path} could not be written: {errno_text(error)}") from error
        self.size += len(content)
        self._hash.update(content)

    def state(self) -> LogState:
        """Length and digest of the file, after everything is on disk."""
        if self.size > self._on_disk:
            try:
                with open(self.path, "ab") as file:
                    os.fsync(file.fileno())
                self._on_disk = self.size
            except OSError as error:
                raise UserError(f"{self.path} could not be written: {errno_text(error)}") from error
        return [self.size, self._hash.hexdigest()]

    def restore(self, state: LogState | None) -> bool:
        """Cut the file back to a state (None: keep all of it); return False if its content has changed since."""
        try:
            if self.path.exists():
                if state is not None and self.path.stat().st_size > state[0]:
                    os.truncate(self.path, state[0])
                self._hash.update(regular(self.path).read_bytes())
                self.size = self.path.stat().st_size
        except OSError as error:
            raise UserError(f"{self.path} could not be read or shortened: {errno_text(error)}") from error
        return state is None or state == [self.size, self._hash.hexdigest()]


@dataclass
class TrainingProgress:
    """The state of a run between two steps, apart from its tensors; the rest follows from the recipe."""

    step: int = 0
    position: StreamPosition = field(default_factory=lambda: StreamPosition(0, 0))
    seconds: float = 0.0
    tokens: int = 0
    best: float | None = None  # higher is better: BLEU, the share of exact outputs, or minus the loss
    best_step: int = 0
    validations_since_best: int = 0
    validated: int = 0  # the step of the last validation
    window_loss: float = 0.0  # loss and tokens since the last line of metrics
    window_tokens: int = 0
    finished: bool = False
    static: bool = False  # whether batches are static: a resumed run keeps this on any device
    data: str = ""  # digests of the training and the held-out data: a resumed run has to find the same
    held_out: str = ""
    logs: dict[str, LogState] = field(default_factory=dict)  # states of the logs by name
    shards: dict[str, str] = field(
        default_factory=dict
    )  # files with the tensors of a sharded model (`tensor_io.SHARDS`)

    def limit(self, settings: TrainingSettings) -> str:
        """The setting that ends the run at this step, and would have to be raised to continue; "" if none does."""
        if self.step >= settings.steps:
            return "training.steps"
        return "training.patience" if 0 < settings.patience <= self.validations_since_best else ""

    @classmethod
    def from_json(cls, metadata: dict[str, Any]) -> TrainingProgress:
        """Read the result of `asdict`; unknown names and wrong types are a TypeError."""
        defaults = {**asdict(cls()), "best": 0.0}
        for name, value in [*metadata.items(), *metadata["position"].items()]:
            kind = type(defaults.get(name, 0))  # epoch and batch are integers
            if not isinstance(value, int | float if kind is float else kind) and (name, value) != ("best", None):
                raise TypeError(f"{name} is {value!r:.40}")
        return cls(**{**metadata, "position": StreamPosition(**metadata["position"])})

    @classmethod
    def read(cls, path: Path) -> TrainingProgress:
        """Read the progress from a resume file, without its tensors."""
        try:
            return cls.from_json(tensor_io.read_metadata(path))
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} does not hold the state of a run: {error}") from error


class EMA:
    """An exponential moving average of the weights: each step moves it by (1 - decay) towards the newest ones."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: tensor.clone() for name, tensor in tensor_io.model_tensors(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        new = tensor_io.model_tensors(model)
        floats = [name for name, tensor in new.items() if tensor.is_floating_point()]
        averages, newest = ([sharding.local(tensors[n]) for n in floats] for tensors in (self.tensors, new))
        torch_private.foreach_lerp_(averages, newest, 1 - self.decay)


class StateSaver(Protocol):
    """Writes the state of a run."""

    def save_state(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None: ...


def save(
    writer: StateSaver,
    path: Path,
    progress: TrainingProgress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: EMA | None,
) -> None:
    """Save weights, optimizer state, moving average and progress together, so that all are of the same step."""
    tensors = {f"model.{name}": tensor for name, tensor in tensor_io.model_tensors(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    if ema is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in ema.tensors.items()}
    writer.save_state(path, tensors, asdict(progress))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None) -> TrainingProgress:
    """Load what `save` saved into the model, the optimizer and the moving average.

    The state may be whole or in shards, and so may the model: each process then reads what it needs.
    """
    metadata = tensor_io.read_metadata(path)
    in_place = bool(metadata.get(tensor_io.SHARDS)) and any(map(sharding.is_sharded, model.parameters()))
    stored = tensor_io.stored_in_shards(path, metadata) if in_place else tensor_io.load(path)[0]
    targets = _targets(path, stored, model, optimizer, ema)
    if in_place:
        load_shards(path, metadata, targets)
    else:
        for name, target in targets.items():
            sharding.fill(target, stored[name])
    try:
        return TrainingProgress.from_json({**metadata, tensor_io.SHARDS: {}})  # the next state has files of its own
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} does not hold the state of a run: {error}") from error


def _targets(
    path: Path, stored: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None
) -> dict[str, Tensor]:
    """The tensors that stored ones are to be copied into, by name, after all of them were checked."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "ema": {}}
    for name, tensor in stored.items():
        part, _, rest = name.partition(".")
        if part not in parts:
            raise UserError(f"{path} does not hold the state of a run: it has a tensor {name:.80}")
        parts[part][rest] = tensor
    weights, parameters = tensor_io.model_tensors(model), dict(model.named_parameters())
    tensor_io.check_names(weights, parts["model"], path)
    targets = {f"model.{name}": tensor for name, tensor in weights.items()}
    for name, tensor in parts["optimizer"].items():
        owner, _, key = name.rpartition(".")
        if owner not in parameters or tensor.shape not in ((), parameters[owner].shape):
            raise UserError(f"{path}: optimizer.{name:.80} does not fit the model")
        state, like = optimizer.state[parameters[owner]], parameters[owner].detach()
        if key not in state:  # Muon's momentum exists from the start, as a view of a larger tensor
            whole = tensor.shape == like.shape
            state[key] = torch.zeros_like(like) if whole else torch.zeros_like(tensor, device=like.device)
        targets[f"optimizer.{name}"] = state[key]
    for name, tensor in ema.tensors.items() if ema is not None else ():
        if name not in parts["ema"] or parts["ema"][name].shape != tensor.shape:
            raise UserError(f"{path}: ema.{name} is missing or does not fit the model")
        targets[f"ema.{name}"] = tensor
    return targets
