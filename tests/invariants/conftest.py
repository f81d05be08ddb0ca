"""Each test here runs for every family and fills a cell of the table that tests/conftest.py prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from families import FAMILIES, INVARIANTS, NO_SEARCH, NOT_APPLICABLE, READ_FEATURES, Case, make
from small_training import tiny

from regard.data import graphs, scenes, shapes, tones
from regard.recipes.schema import Recipe


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        name = next((mark.args[0] for mark in metafunc.definition.iter_markers("invariant")), None)
        families = [family for family in FAMILIES if (name, family) not in NOT_APPLICABLE]
        generates = next(metafunc.definition.iter_markers("generates"), None) is not None
        lines = next(metafunc.definition.iter_markers("reads_lines"), None) is not None
        slow = metafunc.definition.get_closest_marker("slow_families") is not None
        metafunc.parametrize(
            "family",
            [
                pytest.param(family, marks=pytest.mark.slow) if slow and family != "transformer" else family
                for family in families
                if not (generates and family in NO_SEARCH) and not (lines and family in READ_FEATURES)
            ],
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("invariant")
        if marker is None:
            continue
        (name,) = marker.args
        if name not in INVARIANTS:
            raise pytest.UsageError(f"{item.nodeid}: {name!r} is not a row of the table: add it to INVARIANTS")
        item.user_properties.append(("cell", [name, item.callspec.params["family"]]))  # type: ignore[attr-defined]
        not_applicable = [[*cell, why] for cell, why in NOT_APPLICABLE.items()]
        item.user_properties.append(("table", [list(INVARIANTS), list(FAMILIES), not_applicable]))


@pytest.fixture
def case(family: str) -> Callable[..., Case]:
    """`case(seed)`: a tiny random model of the family with random sentences."""
    return lambda seed, **changes: make(family, seed, **changes)


@pytest.fixture
def recipe(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """`recipe(seed, **training)`: a recipe that trains a few quick steps."""
    monkeypatch.setitem(scenes.SPLITS, "valid", (1, 12))
    monkeypatch.setitem(shapes.SPLITS, "valid", (1, 12))  # 600 images to validate on would take most of the time
    monkeypatch.setitem(tones.SPLITS, "valid", (1, 4))
    monkeypatch.setattr(graphs, "PAPERS", 80)
    monkeypatch.setattr(graphs, "TRAIN_PER_CLASS", 4)
    return lambda seed, **training: tiny(family, seed, tmp_path, **training)
