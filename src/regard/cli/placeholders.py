"""Placeholders for modules, so that `regard VERB --help` does not wait for libraries that only running needs.

The module of a verb imports what the verb uses, torch among others, which takes two seconds. Its help is made from the
function's signature and docstring, which need none of it. `placeholders` replaces modules while a verb is imported for
its help; the process ends once that is printed. A test compares the help of every verb with that of its real module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HEAVY = ("torch", "numpy", "pydantic", "sacrebleu", "tokenizers", "safetensors")
# The modules that help is made from.
REAL = ("arguments", "cli", "errors", "registry", "resuming", "metrics.alignment", "metrics.symmetrise")


class PlaceholderModule(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class PlaceholderFinder(MetaPathFinder, Loader):
    """Finds a placeholder for every heavy module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, inner = fullname.partition(".")
        if top in HEAVY or (top == "regard" and inner and not _is_real(inner)):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> PlaceholderModule:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def _is_real(name: str) -> bool:
    """Whether a module is one of `REAL`, or inside or around one."""
    return any(f"{name}.".startswith(f"{real}.") or f"{real}.".startswith(f"{name}.") for real in REAL)


@contextmanager
def placeholders() -> Iterator[None]:
    """Import placeholders inside the block, unless torch is there already: then nothing would be gained."""
    if not isinstance(sys.modules.get("torch"), PlaceholderModule | None):
        yield
        return
    finder = PlaceholderFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
