"""What the converters of all families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.errors import UserError
from regard.formats.folders import Folder
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


def activation(folder: Folder, name: str, usual: str) -> str:
    """Our name of the activation that a setting of config.json names."""
    given = folder.setting(name, usual)
    if given not in ACTIVATIONS:
        raise UserError(f"{folder.path}: {name} = {given!r} has no counterpart here ({', '.join(ACTIVATIONS)} have)")
    return ACTIVATIONS[given]


def spelt_activation(ours: str, whose: str) -> str:
    """Their name of our activation: the first that means it."""
    for theirs, mine in ACTIVATIONS.items():
        if mine == ours:
            return theirs
    raise UserError(f'model.activation = "{ours}" has no counterpart in {whose}')


def insist(settings: SizedSettings, whose: str, **wanted: Any) -> None:
    """Our settings that have no counterpart in `whose` model unless they have these values."""
    for name, value in wanted.items():
        found = getattr(settings, name)
        if found != value:
            raise UserError(f"model.{name} = {found!r} has no counterpart in {whose} (only {value!r} has)")


def count(folder: Folder, name: str, usual: int | None = None) -> int:
    """A whole number of config.json."""
    found = folder.setting(name, usual)
    if not isinstance(found, int):
        raise UserError(f"{folder.path / 'config.json'}: {name} is missing or no whole number")
    return found


def token(folder: Folder, name: str, usual: int | None, rows: int) -> int | None:
    """An id of config.json (the first, where it lists several); None where it has none or one outside the table."""
    found = folder.setting(name, usual)
    if isinstance(found, list):
        found = found[0] if found else None
    return found if isinstance(found, int) and 0 <= found < rows else None
