"""Low-rank adapters (Hu et al. 2022): W x + (alpha / r) B A x, where only A [r, in] and B [out, r] are trained.

A linear layer that stacks several matrices has an adapter for each of them, as if they were layers of their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import MultiHeadAttention
from regard.nn.blocks import FeedForward

TARGETS = ("query", "key", "value", "out", "ffn_in", "ffn_out")
TRAINED_HEADS = ("classifier.",)  # prefix of the parameters that are trained in full


class LoRALinear(nn.Linear):
    """A linear layer with frozen weights and adapters for some of its blocks of rows."""

    lora_a: nn.ParameterDict
    lora_b: nn.ParameterDict
    rows: dict[str, int]  # the blocks of rows by name, in order
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        added = []
        for name, rows in self.rows.items():
            if name in self.lora_a:
                added.append(F.linear(F.linear(x, self.lora_a[name]), self.lora_b[name]) * self.scale)
            else:
                added.append(x.new_zeros(*x.shape[:-1], rows))
        y = F.linear(x, self.weight, self.bias)
        return y + torch.cat(added, -1).to(y.dtype)


def parts(module: nn.Module) -> Iterator[tuple[str, nn.Linear, dict[str, tuple[int, str]]]]:
    """The linear layers of a module that can have adapters: name, layer, and rows and target of each block of rows."""
    if isinstance(module, MultiHeadAttention):
        rows = module.matrices
        if module.is_cross:
            yield "q_proj", module.q_proj, {"query": (module.q_proj.out_features, "query")}
            key, value = rows["kv_proj"]
            yield "kv_proj", module.kv_proj, {"key": (key, "key"), "value": (value, "value")}
        else:
            query, key, value = rows["qkv_proj"]
            sizes = {"query": (query, "query"), "key": (key, "key"), "value": (value, "value")}
            yield "qkv_proj", module.qkv_proj, sizes
        yield "out_proj", module.out_proj, {"out": (module.out_proj.out_features, "out")}
    if isinstance(module, FeedForward):
        names = ("gate", "up") if module.gated else ("up",)
        blocks = {name: (module.w_in.out_features // len(names), "ffn_in") for name in names}
        yield "w_in", module.w_in, blocks
        yield "w_out", module.w_out, {"down": (module.w_out.out_features, "ffn_out")}


def add_adapters(model: nn.Module, rank: int, alpha: float, targets: Collection[str]) -> None:
    """Freeze a model, except for a classifier's head, and add adapters, which change nothing at first: B is zero."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(TRAINED_HEADS))
    for module in list(model.modules()):
        for _, linear, blocks in parts(module):
            chosen = {name: rows for name, (rows, target) in blocks.items() if target in targets}
            if chosen:
                _add(linear, {name: rows for name, (rows, _) in blocks.items()}, chosen, rank, alpha / rank)


def _add(linear: nn.Linear, rows: dict[str, int], chosen: dict[str, int], rank: int, scale: float) -> None:
    like = linear.weight
    linear.__class__ = LoRALinear
    assert isinstance(linear, LoRALinear)
    linear.rows, linear.scale = rows, scale
    linear.lora_a = nn.ParameterDict({name: like.new_empty(rank, linear.in_features) for name in chosen})
    linear.lora_b = nn.ParameterDict({name: like.new_zeros(size, rank) for name, size in chosen.items()})
    for matrix in linear.lora_a.values():
        nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the adapters of a model to its weights, and remove them."""
    for linear in model.modules():
        if not isinstance(linear, LoRALinear):
            continue
        blocks = linear.weight.split(list(linear.rows.values()))
        for name, block in zip(linear.rows, blocks, strict=True):
            if name in linear.lora_a:
                block += linear.scale * linear.lora_b[name] @ linear.lora_a[name]
        del linear.lora_a, linear.lora_b
        linear.__class__ = nn.Linear  # type: ignore[assignment]


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return ".lora_a." in name or ".lora_b." in name
