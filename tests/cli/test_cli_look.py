"""regard look: which argument is a text, and what is refused before the server starts (see also tests/server)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from regard.cli.look import _split

if TYPE_CHECKING:
    from conftest import Command


def test_the_last_argument_is_a_text_unless_it_is_a_run(trained: Path) -> None:
    assert _split([str(trained)]) == ([trained], "")
    assert _split([str(trained), str(trained)]) == ([trained, trained], "")
    assert _split([str(trained), "this cat is very large"]) == ([trained], "this cat is very large")
    assert _split([str(trained), "cat"]) == ([trained], "cat")
    assert _split([str(trained), "runs/none"]) == ([trained, Path("runs/none")], "")  # a run that is not there
    long = "this cat is very large " * 20  # longer than the name of any file
    assert _split([str(trained), long]) == ([trained], long)
    assert _split([str(trained), ""]) == ([trained], "")


def test_error_messages(regard: Command, trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the page needs regard[serve]")
    assert "does not exist" in regard("look", tmp_path / "none", "--no-browser").error
    assert "tpu" in regard("look", trained, "--no-browser", "--device", "tpu").error
    assert "on this machine only" in regard("look", trained, "--host", "0.0.0.0").error
    assert "must be less than or equal to 65535" in regard("look", trained, "--port", "70000").error
