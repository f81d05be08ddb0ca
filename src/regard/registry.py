"""Registries: the names that a setting may have, and what each name stands for.

    @SCORES.register("dot")
    class Dot(Score): ...

makes `model.score = "dot"` valid in recipes, lists it in the help and in error messages, and `SCORES["dot"]` is the
class. Recipes are checked below the modules that define the entries, so a registry names the modules that fill it, and
imports them when a name is first looked up.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

T = TypeVar("T")
Entry = TypeVar("Entry")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to entries, filled by `register` in `modules` (of a package: in all of its modules)."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._entries: dict[str, T] = {}
        self._filled = False

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Decorate a class or function to register it under this name."""

        def add(entry: Entry) -> Entry:
            if name in self._entries:
                raise ValueError(f"{name!r} is registered twice: {self._entries[name]} and {entry}")
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, T]:
        if not self._filled:
            for name in self._modules:
                module = importlib.import_module(name)
                for found in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
                    importlib.import_module(found.name)
            self._filled = True
        return self._entries


@dataclass(frozen=True, eq=False)
class NameIn:
    """The type of a setting whose values are names in a registry: `norm: Annotated[str, NameIn(NORMS)]`.

    `where` restricts the choice to the entries for which it is true.
    """

    registry: Registry[Any]
    where: Callable[[Any], bool] = lambda entry: True

    def names(self) -> list[str]:
        return [name for name, entry in self.registry.items() if self.where(entry)]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, core_schema.str_schema())

    def _check(self, value: Any) -> str:
        names = self.names()
        if isinstance(value, str) and value in names:
            return value
        *others, last = map(repr, names)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}" if others else last})


SCORES: Registry[Any] = Registry("regard.attention.scores", "regard.attention.edges")
MASKS: Registry[Any] = Registry("regard.attention.masks")
POSITIONS: Registry[Any] = Registry("regard.nn.positions")
NORMS: Registry[Any] = Registry("regard.nn.norms")
ACTIVATIONS: Registry[Any] = Registry("regard.nn.blocks")
OPTIMIZERS: Registry[Any] = Registry("regard.training.optimizers")
SCHEDULES: Registry[Any] = Registry("regard.training.schedule")
MODELS: Registry[Any] = Registry("regard.models")
CORPORA: Registry[Any] = Registry("regard.data")
TASKS: Registry[Any] = Registry("regard.tasks")
EXPORTERS: Registry[Any] = Registry("regard.interop")
