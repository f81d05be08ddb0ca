"""Make translators, generators and writers with the settings of the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from regard.errors import UserError
from regard.recipes.errors import SettingFault
from regard.runs import LoadedRun
from regard.tasks.generator import Generator
from regard.tasks.text_writer import TextWriter
from regard.tasks.translator import Translator
from regard.text import Tokenizer
from regard.text.chat import ChatTemplate

Decoder = TypeVar("Decoder")


def translator(model: LoadedRun, settings: dict[str, object]) -> Translator:
    """Make a translator with these settings; an invalid one is an error that names its option."""
    return _make(model.translator, settings)


def generator(model: LoadedRun, settings: dict[str, object]) -> Generator:
    """Make a generator with these settings; an invalid one is an error that names its option."""
    return _make(model.generator, settings)


def writer(model: LoadedRun, settings: dict[str, object]) -> TextWriter:
    """Make a writer of texts with these settings; an invalid one is an error that names its option."""
    return _make(model.writer, settings)


def chat(run: Path, tokenizer: Tokenizer, system: str | None) -> Callable[[str], list[int]]:
    """Make a function from a message to the tokens of a conversation, with the chat template of a run."""
    template = ChatTemplate.of_run(run, tokenizer)
    before = [] if system is None else [{"role": "system", "content": system}]
    return lambda message: template.encode([*before, {"role": "user", "content": message}])


def _make(make: Callable[..., Decoder], settings: dict[str, object]) -> Decoder:
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{_option(name)} {value}: must be a finite number")
    try:
        return make(**settings)
    except SettingFault as fault:
        raise UserError(f"{_option(fault.name)} {fault.value}: {fault.rule}") from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
