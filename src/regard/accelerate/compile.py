"""torch.compile for the expensive parts of a training step, block by block, so that equal blocks are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.models import SequenceModel
from regard.nn.blocks import BlockStack
from regard.nn.embedding import TokenEmbedding
from regard.nn.linear_cross_entropy import linear_cross_entropy


def compile_parts(model: SequenceModel) -> None:
    """Compile blocks, embeddings and the loss in place, for training; parameters and their names stay."""
    # By default the gradients of a norm are computed in one kernel, which is slower than two for short rows.
    options: dict[str, Any] = {"triton.mix_order_reduction": False}

    def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(f, fullgraph=True, dynamic=False, options=options)

    forward, loss = compiled(_forward), compiled(linear_cross_entropy)
    for part in _parts(model):
        part.forward = partial(_call, forward, part)
    model.linear_cross_entropy = partial(_loss, loss, model)


def remove_compiled(model: SequenceModel) -> None:
    """Undo `compile_parts`."""
    for part in _parts(model):
        part.__dict__.pop("forward", None)
    model.__dict__.pop("linear_cross_entropy", None)


def is_compiled(model: SequenceModel) -> bool:
    return "linear_cross_entropy" in model.__dict__


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, BlockStack):
            yield from module.children()  # blocks, and the last norm
        elif isinstance(module, TokenEmbedding):
            yield module


def _forward(part: nn.Module, *given: Any, **named: Any) -> Any:
    return type(part).forward(part, *given, **named)


def _call(compiled: Callable[..., Any], part: nn.Module, *given: Any, **named: Any) -> Any:
    return (compiled if part.training else _forward)(part, *given, **named)


def _loss(compiled: Callable[..., Tensor], model: SequenceModel, *given: Any) -> Tensor:
    return (compiled if model.training else linear_cross_entropy)(*given)
