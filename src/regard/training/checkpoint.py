"""What a training run has to remember to go on from the exact batch, and how that is written down."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard import tensor_io, torch_private
from regard.data.packing import StreamPosition
from regard.errors import UserError
from regard.files import errno_text, regular
from regard.recipes.schema import TrainingSettings

Mark = list[Any]  # the length of a log in bytes, and its digest


class Log:
    """A file of JSON lines that grows while a run trains. What follows the last saved mark will be written again."""

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

    def mark(self) -> Mark:
        """Length and digest of the file, after everything is on disk."""
        if self.size > self._on_disk:
            try:
                with open(self.path, "ab") as file:
                    os.fsync(file.fileno())
                self._on_disk = self.size
            except OSError as error:
                raise UserError(f"{self.path} could not be written: {errno_text(error)}") from error
        return [self.size, self._hash.hexdigest()]

    def restore(self, mark: Mark | None) -> bool:
        """Cut the file back to a mark (None: keep all of it); false if it no longer is what was marked."""
        try:
            if self.path.exists():
                if mark is not None and self.path.stat().st_size > mark[0]:
                    os.truncate(self.path, mark[0])
                self._hash.update(regular(self.path).read_bytes())
                self.size = self.path.stat().st_size
        except OSError as error:
            raise UserError(f"{self.path} could not be read or shortened: {errno_text(error)}") from error
        return mark is None or mark == [self.size, self._hash.hexdigest()]


@dataclass
class TrainingProgress:
    """The numbers of a run between two updates; everything else follows from the recipe and these."""

    step: int = 0
    position: StreamPosition = field(default_factory=lambda: StreamPosition(0, 0))
    seconds: float = 0.0
    tokens: int = 0
    best: float | None = None  # higher is better: BLEU, the share that is exact, or minus the loss
    best_step: int = 0
    best_is: str = ""  # which weights those were: "step", "ema" or "average of" so many
    validations_since_best: int = 0
    validated: int = 0  # the step of the last validation
    window_loss: float = 0.0  # loss and tokens since the last line of metrics
    window_tokens: int = 0
    finished: bool = False
    static: bool = False  # how batches are packed: a run keeps to it on whichever device it goes on
    data: str = ""  # digests of what is trained on, and of what is held out: they stay the same, too
    held_out: str = ""
    logs: dict[str, Mark] = field(default_factory=dict)  # how far the files of measurements had come, by name

    def limit(self, settings: TrainingSettings) -> str:
        """What ends a run here, and would have to be raised for it to go on; nothing if it goes on anyhow."""
        if self.step >= settings.steps:
            return "training.steps"
        return "training.patience" if 0 < settings.patience <= self.validations_since_best else ""

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> TrainingProgress:
        """The progress that `asdict` made these facts of; facts of other names or types are a TypeError."""
        usual = {**asdict(cls()), "best": 0.0}
        for name, value in [*facts.items(), *facts["position"].items()]:
            kind = type(usual.get(name, 0))  # epoch and batch are whole numbers
            if not isinstance(value, int | float if kind is float else kind) and (name, value) != ("best", None):
                raise TypeError(f"{name} is {value!r:.40}")
        return cls(**{**facts, "position": StreamPosition(**facts["position"])})

    @classmethod
    def read(cls, path: Path) -> TrainingProgress:
        """The progress that a resume file holds, without its tensors."""
        try:
            return cls.from_json(tensor_io.read_metadata(path))
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} does not hold the state of a run: {error}") from error


class EMA:
    """A running average of the weights: each update moves it by (1 - decay) towards the newest ones."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: tensor.clone() for name, tensor in tensor_io.model_tensors(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        new = tensor_io.model_tensors(model)
        floats = [name for name, tensor in new.items() if tensor.is_floating_point()]
        torch_private.foreach_lerp_([self.tensors[n] for n in floats], [new[n] for n in floats], 1 - self.decay)


class TensorSaver(Protocol):
    """What writes files of tensors."""

    def save(self, path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None: ...


def save(
    writer: TensorSaver,
    path: Path,
    progress: TrainingProgress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: EMA | None,
) -> None:
    """One file, replaced whole: weights, optimiser state, average and progress are always of the same step."""
    tensors = {f"model.{name}": tensor for name, tensor in tensor_io.model_tensors(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    if ema is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in ema.tensors.items()}
    writer.save(path, tensors, asdict(progress))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None) -> TrainingProgress:
    """Put everything back where `save` found it."""
    tensors, facts = tensor_io.load(path)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "ema": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part not in parts:
            raise UserError(f"{path} does not hold the state of a run: it has a tensor {name:.80}")
        parts[part][rest] = tensor
    tensor_io.load_into_model(model, parts["model"], path)
    parameters = dict(model.named_parameters())
    for name, tensor in parts["optimizer"].items():
        owner, _, key = name.rpartition(".")
        if owner not in parameters or tensor.shape not in ((), parameters[owner].shape):
            raise UserError(f"{path}: optimizer.{name:.80} does not fit the model")
        known = optimizer.state[parameters[owner]]
        if key in known:  # Muon's momentum is there from the start, a part of a larger tensor
            known[key].copy_(tensor)
        else:
            known[key] = tensor.to(parameters[owner].device)
    if ema is not None:
        for name, tensor in ema.tensors.items():
            if name not in parts["ema"] or parts["ema"][name].shape != tensor.shape:
                raise UserError(f"{path}: ema.{name} is missing or does not fit the model")
            tensor.copy_(parts["ema"][name])
    try:
        return TrainingProgress.from_json(facts)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} does not hold the state of a run: {error}") from error
