"""What the workers of parallel tests get as a whole, and in which order (tests/conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_the_longest_files_exist_and_a_folder_among_them_is_one_unit(pytestconfig: pytest.Config) -> None:
    shared = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    assert all((TESTS / unit).exists() for unit in shared.LONGEST)
    assert shared.unit_of("tests/browser/test_heads.py::test_x[a::b]") == "browser/"
    assert shared.unit_of("tests/data/test_fetch.py::test_x[a::b]") == "data/test_fetch.py"
    assert shared.unit_of("tests/test_api.py::test_x") == "test_api.py"
