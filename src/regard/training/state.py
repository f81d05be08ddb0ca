"""What a training run has to remember to go on from the exact batch, and how that is written down."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard import weights
from regard.data.packing import Position
from regard.recipes.schema import Training


@dataclass
class Progress:
    """The numbers of a run between two updates; everything else follows from the recipe and these."""

    step: int = 0
    position: Position = field(default_factory=lambda: Position(0, 0))
    seconds: float = 0.0
    tokens: int = 0
    best: float | None = None  # higher is better: BLEU, the share that is exact, or minus the loss
    best_step: int = 0
    best_is: str = ""  # which weights those were: "step", "ema" or "average of" so many
    looks_since_best: int = 0
    validated: int = 0  # the step of the last validation
    window_loss: float = 0.0  # loss and tokens since the last line of metrics
    window_tokens: int = 0
    finished: bool = False
    static: bool = False  # how batches are packed: a run keeps to it on whichever device it goes on
    data: str = ""  # digests of what is trained on, and of what is held out: they stay the same, too
    held_out: str = ""

    def limit(self, settings: Training) -> str:
        """What ends a run here, and would have to be raised for it to go on; nothing if it goes on anyhow."""
        if self.step >= settings.steps:
            return "training.steps"
        return "training.patience" if 0 < settings.patience <= self.looks_since_best else ""

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Progress:
        return cls(**{**facts, "position": Position(**facts["position"])})


class Average:
    """A running average of the weights: each update moves it by (1 - decay) towards the newest ones."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: tensor.clone() for name, tensor in weights.of_model(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        new = weights.of_model(model)
        floats = [name for name, tensor in new.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([self.tensors[n] for n in floats], [new[n] for n in floats], 1 - self.decay)


def save(
    writer: weights.Writer,
    path: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Average | None,
) -> None:
    """One file, replaced whole: weights, optimiser state, average and progress are always of the same step."""
    tensors = {f"model.{name}": tensor for name, tensor in weights.of_model(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    if ema is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in ema.tensors.items()}
    writer.save(path, tensors, asdict(progress))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Average | None) -> Progress:
    """Put everything back where `save` found it."""
    tensors, facts = weights.load(path)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "ema": {}}
    for name, tensor in tensors.items():
        part, rest = name.split(".", 1)
        parts[part][rest] = tensor
    weights.into_model(model, parts["model"], path)
    parameters = dict(model.named_parameters())
    for name, tensor in parts["optimizer"].items():
        owner, key = name.rsplit(".", 1)
        known = optimizer.state[parameters[owner]]
        if key in known:  # Muon's momentum is there from the start, a part of a larger tensor
            known[key].copy_(tensor)
        else:
            known[key] = tensor.to(parameters[owner].device)
    if ema is not None:
        for name, tensor in ema.tensors.items():
            tensor.copy_(parts["ema"][name])
    return Progress.from_json(facts)
