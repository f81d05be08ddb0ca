"""Make translators and generators with the settings of the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from regard.api import Model
from regard.decoding.generate import Generator
from regard.decoding.translate import Translator
from regard.errors import UserError
from regard.recipes.errors import SettingFault

Decoder = TypeVar("Decoder")


def translator(model: Model, settings: dict[str, object]) -> Translator:
    """A translator with the settings that were given."""
    return _made(model.translator, settings)


def generator(model: Model, settings: dict[str, object]) -> Generator:
    """What continues texts with the settings that were given."""
    return _made(model.generator, settings)


def _made(make: Callable[..., Decoder], settings: dict[str, object]) -> Decoder:
    """Make it with these settings; one that cannot be is an error that names its option."""
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{_option(name)} {value}: must be a finite number")
    try:
        return make(**settings)
    except SettingFault as fault:
        raise UserError(f"{_option(fault.name)} {fault.value}: {fault.rule}") from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
