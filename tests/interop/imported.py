"""Models of transformers, each imported once per test module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from regard.interop import import_folder
from regard.run_dir import RunDir


class Imported(NamedTuple):
    """A model of transformers, the folder it was saved in, and the imported run."""

    model: Any
    folder: Path
    run: RunDir


def imported_cases(save: Callable[[str, Path], Any]) -> Any:
    """A fixture: a function from the name of a case to what was imported; `save` makes the model and saves it."""

    @pytest.fixture(scope="module")
    def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Imported]:
        known: dict[str, Imported] = {}

        def get(name: str) -> Imported:
            if name not in known:
                path = tmp_path_factory.mktemp("imported")
                model = save(name, path / "theirs")
                known[name] = Imported(model, path / "theirs", import_folder(path / "theirs", path / "run"))
            return known[name]

        return get

    return made
