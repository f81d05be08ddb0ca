"""The size of a model, computed without allocating it, since settings may come from untrusted files."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from regard import tensor_io
from regard.errors import UserError
from regard.models import build
from regard.recipes.schema import ModelSettings

SMALL = 1 << 28  # elements, 1 GB in fp32, below which no exact count is needed
FP32 = 4  # bytes


@dataclass(frozen=True)
class Size:
    """Numbers of elements: `stored` in checkpoints (parameters and persistent buffers), `held` with all buffers."""

    stored: int
    held: int

    @classmethod
    def of(cls, settings: ModelSettings, source_size: int, target_size: int, shared: bool) -> Size:
        """The size of the model that `build` would create.

        Layers after the first are equal, so models of one and of two layers on the meta device are enough.
        """
        depths = {name: value for name, value in settings if name.endswith("layers") and type(value) is int}
        sizes = source_size, target_size, shared
        one = _built(settings.model_copy(update=dict.fromkeys(depths, 1)), *sizes)
        stored, held = one.stored, one.held
        for name, depth in depths.items():
            two = _built(settings.model_copy(update={**dict.fromkeys(depths, 1), name: 2}), *sizes)
            stored += (two.stored - one.stored) * (depth - 1)
            held += (two.held - one.held) * (depth - 1)
        return cls(stored, held)


def _built(settings: ModelSettings, source_size: int, target_size: int, shared: bool) -> Size:
    try:
        with torch.device("meta"):
            model = build(settings, source_size, target_size, shared)
    except (RuntimeError, OverflowError, TypeError):  # more elements than fit into 64 bits
        return Size(sys.maxsize, sys.maxsize)
    stored = sum(tensor.numel() for tensor in tensor_io.model_tensors(model).values())
    return Size(stored, stored + sum(buffer.numel() for buffer in model.buffers()))


def upper_bound(settings: ModelSettings, vocabularies: int) -> int:
    """A rough upper bound of the number of elements of a model."""
    numbers = {name: value for name, value in settings if type(value) is int}
    depth = sum(value for name, value in numbers.items() if name.endswith("layers"))
    width = sum(numbers.get(name, 0) for name in ("width", "ffn_width", "encoder_width", "embedding", "se_dim"))
    return 8 * depth * width**2 + 2 * (vocabularies + numbers.get("max_positions", 0)) * width


def refuse_misfit(
    settings: ModelSettings, vocabularies: tuple[int, int], shared: bool, stored: int, origin: str
) -> None:
    """Refuse settings whose model has another size than its weights, which have `stored` elements.

    A small difference is left to `tensor_io.load_into_model`, which names the tensor.
    """
    if max(upper_bound(settings, sum(vocabularies)), stored) < SMALL:
        return
    size = Size.of(settings, *vocabularies, shared)
    if size.stored > 2 * stored or stored > 2 * size.stored:
        raise UserError(
            f"{origin}: {largest_setting(settings)}: the recipe makes a model of {size.stored:,} parameters, and the "
            f"weights have {stored:,}: they do not belong together"
        )


def refuse_too_large(
    settings: ModelSettings, vocabularies: tuple[int, int], shared: bool, memory: int, copies: int, origin: str
) -> None:
    """Refuse a model that needs more than `memory` bytes with `copies` of its weights (gradients, moments)."""
    if upper_bound(settings, sum(vocabularies)) < SMALL:
        return
    size = Size.of(settings, *vocabularies, shared)
    needed = FP32 * (size.held + (copies - 1) * size.stored)
    if needed > memory:
        raise UserError(
            f"{origin}: {largest_setting(settings)}: a model of {size.stored:,} parameters needs at least "
            f"{needed / 1e9:,.0f} GB of memory here, and there are {memory / 1e9:,.0f} GB: choose a smaller one"
        )


def largest_setting(settings: ModelSettings) -> str:
    """The setting that exceeds its default the most: `model.width = 1000000000`."""
    usual = {name: field.default for name, field in type(settings).model_fields.items()}
    usual |= settings.PRESETS[settings.DEFAULT_SIZE]
    numbers = {name: value for name, value in settings if type(value) is int and type(usual.get(name)) is int}
    name = max(numbers, key=lambda name: numbers[name] / max(usual[name], 1))
    return f"model.{name} = {numbers[name]}"
