"""Helpers shared by the converters: settings of config.json, and settings that cannot be converted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.errors import UserError
from regard.interop.hf_folder import HFFolder, TensorInfo, short_repr
from regard.interop.name_map import TensorMap
from regard.models import SequenceModel, build
from regard.recipes.schema import Recipe, SizedSettings
from regard.text import Tokenizer

MAX_ROWS = 1 << 21  # bounds tables of tokens or positions, for which lists of as many Python objects are made
MAX_POSITIONS = 1 << 24
ACTIVATIONS = {  # theirs -> ours
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class Imported:
    """The recipe, the tokenizers (None: the model reads no text) and the classes of an imported folder."""

    recipe: Recipe
    source: Tokenizer | None
    target: Tokenizer | None
    headless: bool = False  # the folder has only the body: our head is newly initialised
    classes: tuple[str, ...] = ()
    tensors: TensorMap | None = None  # None: as the converter's functions say

    def build(self) -> SequenceModel:
        """A new model of the recipe."""
        source, target = (0 if side is None else len(side) for side in (self.source, self.target))
        shared = self.recipe.text.shared and not self.classes
        return build(self.recipe.model, source, len(self.classes) or target, shared)


def activation(folder: HFFolder, name: str, default: str) -> str:
    """Our name for the activation in a setting of config.json."""
    theirs = folder.config.text(name) or default
    if theirs not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{folder.path}: {name} = {short_repr(theirs)} has no counterpart here ({known} have)")
    return ACTIVATIONS[theirs]


def hf_activation(ours: str) -> str | None:
    """Their (first) name for one of our activations; None if they have none."""
    return next((theirs for theirs, name in ACTIVATIONS.items() if name == ours), None)


def unsupported_settings(settings: SizedSettings, whose: str, **wanted: Any) -> list[str]:
    """The settings that `whose` model cannot express: values other than `wanted`, the scores, and the activation."""
    wanted["score"] = "scaled-dot"
    if getattr(settings, "cross_score", None) not in (None, "scaled-dot"):
        wanted["cross_score"] = "scaled-dot"
    given = {name: getattr(settings, name) for name in wanted}
    problems = [
        f"model.{name} = {given[name]!r} has no counterpart in {whose} (only {value!r} has)"
        for name, value in wanted.items()
        if given[name] != value
    ]
    ours = getattr(settings, "activation", "")
    if hf_activation(ours) is None:
        problems.append(f'model.activation = "{ours}" has no counterpart in {whose}')
    return problems


def architecture(folder: HFFolder) -> str | None:
    """The model class named in config.json; None if there is none."""
    names = folder.config.items("architectures")
    if len(names) > 1 or not all(isinstance(name, str) for name in names):
        raise folder.config.error("architectures", "must list one class")
    return names[0] if names else None


def count(folder: HFFolder, name: str, default: int | None = None) -> int:
    """An integer of config.json, at most the number of weights in the folder."""
    value = folder.setting(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{folder.path / 'config.json'}: {name} is missing or not a whole number")
    weights = sum(math.prod(tensor.shape) for tensor in folder.header.values())
    if not 0 <= value <= weights:
        raise folder.config.error(name, f"= {short_repr(value)} does not fit a model of {weights} weights")
    return value


def layers(folder: HFFolder, name: str, default: int | None = None) -> int:
    """A number of layers in config.json, at most the number of tensors in the folder."""
    number = count(folder, name, default)
    if number > len(folder.header):
        raise folder.config.error(name, f"= {number}, but the weights have only {len(folder.header)} tensors")
    return number


def rows(folder: HFFolder, name: str, default: int | None, header: Mapping[str, TensorInfo], tensor: str) -> int:
    """A size in config.json that must equal the number of rows of a tensor."""
    if tensor not in header:
        raise UserError(f"{folder.path} lacks tensor: {tensor}")
    size, info = count(folder, name, default), header[tensor]
    if info.shape[:1] != (size,):
        raise folder.config.error(name, f"= {size}, but {tensor} has shape {info.shape} in {info.file.name}")
    if size > MAX_ROWS:
        raise folder.config.error(name, f"= {size} is more than {MAX_ROWS:,}")
    return size


def context(folder: HFFolder, name: str, default: int) -> int:
    """A context length in config.json that no tensor confirms; zero and null are the default."""
    value = folder.config.integer(name) or default
    if not 2 <= value <= MAX_POSITIONS:
        raise folder.config.error(name, f"= {short_repr(value)} is not a possible number of positions")
    return value


def fraction(folder: HFFolder, name: str, default: float) -> float:
    """A number in config.json from 0 to below 1, such as a dropout rate."""
    value = folder.setting(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise folder.config.error(name, f"must be a number from 0 to below 1, not {short_repr(value)}")
    return value


def token(folder: HFFolder, name: str, default: int | None, rows: int) -> int | None:
    """A token id in config.json (the first of a list); None if there is none or it is not a row of the embedding."""
    value = folder.setting(name, default)
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < rows else None


def end_of_text(folder: HFFolder, default: int, rows: int) -> int:
    """The id of EOS, which every model needs."""
    eos = token(folder, "eos_token_id", default, rows)
    if eos is None:
        raise UserError(f"{folder.path / 'config.json'}: eos_token_id is missing, or outside the vocabulary")
    return eos
