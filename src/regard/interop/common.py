"""What the converters of all families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.errors import UserError
from regard.interop.hf_folder import HFFolder, Stored, shown
from regard.recipes.schema import Recipe, SizedSettings
from regard.text import Tokenizer

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
    """What a folder says of its model, in our terms."""

    recipe: Recipe
    source: Tokenizer
    target: Tokenizer
    headless: bool = False  # the folder has only the body: our head is fresh


def activation(folder: HFFolder, name: str, usual: str) -> str:
    """Our name of the activation that a setting of config.json names."""
    given = folder.config.text(name) or usual
    if given not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{folder.path}: {name} = {shown(given)} has no counterpart here ({known} have)")
    return ACTIVATIONS[given]


def spelt_activation(ours: str) -> str | None:
    """Their name of our activation: the first that means it."""
    return next((theirs for theirs, mine in ACTIVATIONS.items() if mine == ours), None)


def obstacles(settings: SizedSettings, whose: str, **wanted: Any) -> list[str]:
    """Our settings that have no counterpart in `whose` model: those with other values than these, and activations."""
    found = {name: getattr(settings, name) for name in wanted}
    different = [
        f"model.{name} = {found[name]!r} has no counterpart in {whose} (only {value!r} has)"
        for name, value in wanted.items()
        if found[name] != value
    ]
    ours = getattr(settings, "activation", "")
    unknown = [] if spelt_activation(ours) else [f'model.activation = "{ours}" has no counterpart in {whose}']
    return different + unknown


def architecture(folder: HFFolder) -> str | None:
    """The class that config.json names, if it names one."""
    named = folder.config.items("architectures")
    if len(named) > 1 or not all(isinstance(name, str) for name in named):
        raise folder.config.fault("architectures", "must list one class")
    return named[0] if named else None


def count(folder: HFFolder, name: str, usual: int | None = None) -> int:
    """A whole number of config.json; none is larger than the number of weights in the folder."""
    found = folder.setting(name, usual)
    if not isinstance(found, int) or isinstance(found, bool):
        raise UserError(f"{folder.path / 'config.json'}: {name} is missing or no whole number")
    weights = sum(math.prod(one.shape) for one in folder.header.values())
    if not 0 <= found <= weights:
        raise folder.config.fault(name, f"= {shown(found)} does not fit a model of {weights} weights")
    return found


def layers(folder: HFFolder, name: str, usual: int | None = None) -> int:
    """A number of layers; the folder has to have several tensors for each."""
    found = count(folder, name, usual)
    if found > len(folder.header):
        raise folder.config.fault(name, f"= {found}, but the weights have only {len(folder.header)} tensors")
    return found


def rows(folder: HFFolder, name: str, usual: int | None, header: Mapping[str, Stored], tensor: str) -> int:
    """A size of config.json that is also the number of rows of a tensor."""
    if tensor not in header:
        raise UserError(f"{folder.path} lacks tensor: {tensor}")
    found, stored = count(folder, name, usual), header[tensor]
    if stored.shape[:1] != (found,):
        raise folder.config.fault(name, f"= {found}, but {tensor} has shape {stored.shape} in {stored.file.name}")
    return found


def fraction(folder: HFFolder, name: str, usual: float) -> float:
    """A number of config.json from 0 to below 1, such as a dropout rate."""
    found = folder.setting(name, usual)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < 1:
        raise folder.config.fault(name, f"must be a number from 0 to below 1, not {shown(found)}")
    return found


def token(folder: HFFolder, name: str, usual: int | None, rows: int) -> int | None:
    """An id of config.json (the first, where it lists several); None where it has none or one outside the table."""
    found = folder.setting(name, usual)
    if isinstance(found, list):
        found = found[0] if found else None
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < rows else None
