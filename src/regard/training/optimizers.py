"""Optimizers: Adam, AdamW, and Muon for the weights of linear layers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from regard import sharding, torch_private
from regard.attention import MultiHeadAttention
from regard.recipes.schema import TrainingSettings
from regard.registry import OPTIMIZERS

if TYPE_CHECKING:
    from regard.models import SequenceModel
    from regard.run_dir import RunDir

MOMENTUM = 0.95
ITERATIONS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steep at 0, and near 1 from 0.1 on after five iterations
EPS = 1e-7


def make_optimizer(model: SequenceModel, run: RunDir) -> torch.optim.Optimizer:
    """Create the optimizer that the recipe names. A new one is a function here, registered under its name."""
    settings = run.recipe.training
    optimizer: torch.optim.Optimizer = OPTIMIZERS[settings.optimizer](model, settings)
    return optimizer


@OPTIMIZERS.register("adam")
def adam(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Adam; weight decay, on matrices only, is an L2 penalty: part of the gradient, which Adam rescales."""
    return _adam(model, torch.optim.Adam, settings.betas, settings.weight_decay)


@OPTIMIZERS.register("adamw")
def adamw(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    return _adam(model, torch.optim.AdamW, settings.betas, settings.weight_decay)


@OPTIMIZERS.register("muon")
def muon(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Muon for the weights of linear layers, AdamW for the rest."""
    hidden = linear_weights(model)
    rest = _adam(model, torch.optim.AdamW, settings.betas, settings.weight_decay, without=hidden)
    return Muon(hidden, rest, settings.weight_decay)


def _adam(
    model: nn.Module, kind: Any, betas: tuple[float, float], decay: float, without: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """A fused optimizer for all parameters except `without`."""
    excluded = {id(p) for p in without}
    rest = [p for p in model.parameters() if id(p) not in excluded and p.requires_grad]
    matrices, vectors = [p for p in rest if p.dim() > 1], [p for p in rest if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if any(map(sharding.is_sharded, rest)):
        kind = torch_private.optimizer_of_parts(kind, sharding.local)
    optimizer: torch.optim.Optimizer = kind(groups, lr=0.0, betas=betas, eps=1e-9, fused=True)
    return optimizer


def linear_weights(model: nn.Module) -> dict[nn.Parameter, int]:
    """Map the weights of linear layers to the number of matrices that each stacks.

    Embedding tables, norms, biases and the gates of recurrent cells are not included.
    """
    stacked: dict[nn.Parameter, int] = {}
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            for name, rows in module.matrices.items():  # unequal ones (grouped queries) are taken as one
                stacked[getattr(module, name).weight] = len(rows) if len(set(rows)) == 1 else 1
    linear = [cast(nn.Parameter, module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    return {weight: stacked.get(weight, 1) for weight in linear if weight.requires_grad}


def orthogonalise(matrices: Tensor) -> Tensor:
    """[n, R, C] -> the same with all singular values near 1: five iterations of s <- a s + b s^3 + c s^5.

    In bf16 on a GPU, where matrix products are many times as fast; the result does not need more precision.
    """
    a, b, c = QUINTIC
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)  # no singular value exceeds 1 after this
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the weights of linear layers; another optimizer updates the rest.

    m <- 0.95 m + 0.05 g, and w <- w - rate (0.2 sqrt(max(R, C)) orthogonal(0.05 g + 0.95 m) + decay w) for a matrix of
    R rows and C columns: an entry changes by 0.2 of the rate on average, about as much as under Adam (Liu et al. 2025),
    so that both share a rate. Matrices of one shape are updated together. Weights that stack several matrices (queries,
    keys and values) are treated as separate matrices. Every process gathers the whole matrices of a sharded model.

    Not `torch.optim.Muon`, which ignores `found_inf` (it would apply a gradient that is not finite), reads its learning
    rate on the host (no CUDA graphs), updates one matrix at a time, and treats stacked queries, keys and values as one.
    """

    def __init__(self, hidden: dict[nn.Parameter, int], rest: torch.optim.Optimizer, weight_decay: float) -> None:
        super().__init__([{"params": list(hidden)}], {"lr": 0.0, "weight_decay": weight_decay})
        self.rest = rest
        rest.state = self.state  # shared, so that both are saved and loaded as one
        self.param_groups += rest.param_groups  # the same objects: a rate that is set here is set there
        self._groups = self._group(hidden)

    def _group(self, hidden: dict[nn.Parameter, int]) -> list[tuple[list[nn.Parameter], Tensor]]:
        """Group weights by shape, with the momentum [n, R, C] of all their matrices; that of one weight is a view."""
        by_shape: defaultdict[tuple[torch.Size, int], list[nn.Parameter]] = defaultdict(list)
        for weight, parts in hidden.items():
            by_shape[weight.shape, parts].append(weight)
        groups = []
        for (shape, parts), weights in by_shape.items():
            matrices = len(weights) * parts, shape[0] // parts, shape[1]
            if sharding.is_sharded(weights[0]):
                momentum = torch.empty(matrices, device="meta")  # each process has its part of each weight's
                self.state.update({weight: {"momentum": torch.zeros_like(weight)} for weight in weights})
            else:
                momentum = torch.zeros(len(weights), *shape, dtype=weights[0].dtype, device=weights[0].device)
                for weight, view in zip(weights, momentum, strict=True):
                    self.state[weight]["momentum"] = view
            groups.append((weights, momentum.view(matrices)))
        return groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        found_inf: Tensor | None = getattr(self, "found_inf", None)  # as in fused kernels: 1 skips the update
        for weights, momentum in self._groups:
            self._update(weights, momentum, found_inf)
        if found_inf is not None:
            self.rest.found_inf = found_inf  # type: ignore[attr-defined]
        self.rest.step()

    def _update(self, weights: list[nn.Parameter], momentum: Tensor, found_inf: Tensor | None) -> None:
        settings = self.param_groups[0]
        sharded = sharding.is_sharded(weights[0])
        grads = [w.grad if w.grad is not None else torch.zeros_like(w) for w in weights]
        tensors: list[Tensor] = [sharding.local(weight) for weight in weights]
        applied = torch.ones((), device=tensors[0].device)
        grad = torch.stack([sharding.local(g) for g in grads])
        momenta = torch.stack([sharding.local(self.state[w]["momentum"]) for w in weights]) if sharded else momentum
        grad = grad.view_as(momenta)
        if found_inf is not None:
            grad, applied = grad.where(found_inf == 0, 0.0), 1.0 - found_inf
        momenta.lerp_(grad, (1 - MOMENTUM) * applied)
        direction = grad.lerp(momenta, MOMENTUM)
        if sharded:  # singular values are those of whole matrices
            for weight, new in zip(weights, momenta, strict=True):
                sharding.local(self.state[weight]["momentum"]).copy_(new)
            gathered = [sharding.whole(sharding.as_shard(d, w)) for d, w in zip(direction, weights, strict=True)]
            direction = torch.stack(gathered).view_as(momentum)
        direction = orthogonalise(direction).float()
        rate = settings["lr"] * applied
        steps = direction * (-0.2 * math.sqrt(max(momentum.shape[1:])) * rate)
        if settings["weight_decay"]:
            torch_private.foreach_mul_(tensors, 1.0 - settings["weight_decay"] * rate)
        updates = steps.view(len(weights), *weights[0].shape)
        torch_private.foreach_add_(tensors, [sharding.shard_of(u, w) for u, w in zip(updates, weights, strict=True)])
