"""regard verify: one line for each file, an exit status, and --accept-edit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

FILES = ["run.json", "recipe.toml", "tokenizer.json", "model.safetensors", "resume.safetensors", "metrics.jsonl"]


def _statuses(out: str) -> dict[str, str]:
    """File name to status, from the lines that were printed."""
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    return {Path(file.partition(": ")[0]).name: status for status, file in lines}


def test_all_files_of_a_run_are_ok(regard: Callable, trained: Path) -> None:
    result = regard("verify", trained)
    statuses = _statuses(result.out)
    assert (result.status, result.err) == (0, "")
    assert set(statuses) >= set(FILES) and set(statuses.values()) == {"ok"}


def test_damaged_and_missing_files_are_named_and_the_exit_status_is_2(regard: Callable, copied: Path) -> None:
    weights = copied / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-9] ^= 1
    weights.write_bytes(content)
    result = regard("verify", copied)
    statuses = _statuses(result.out)
    assert {name for name, status in statuses.items() if status != "ok"} == {"model.safetensors"}
    assert statuses["model.safetensors"] == "damaged" and "checksum" in result.out
    assert (result.status, result.err) == (2, f"regard: {copied}: 1 file differs from what was written\n")
    (copied / "tokenizer.json").unlink()
    result = regard("verify", copied)
    assert _statuses(result.out)["tokenizer.json"] == "missing"
    assert (result.status, result.err) == (2, f"regard: {copied}: 2 files differ from what was written\n")


def test_an_edited_recipe_is_reported_until_it_is_accepted(regard: Callable, copied: Path) -> None:
    recipe = copied / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("beam = 2", "beam = 3"))
    result = regard("verify", copied)
    assert result.status == 2 and f"edited   {recipe}: decoding.beam" in result.out
    accepted = regard("verify", copied, "--accept-edit")
    assert accepted.status == 0 and set(_statuses(accepted.out).values()) == {"ok"}
    assert regard("verify", copied).out == accepted.out
    assert regard("translate", copied, "a b").err == ""  # no warning any more


def test_a_folder_that_is_not_a_run_is_refused(regard: Callable, tmp_path: Path) -> None:
    assert "nowhere does not exist" in regard("verify", tmp_path / "nowhere").error
    assert "not a run directory" in regard("verify", tmp_path, "--accept-edit").error
