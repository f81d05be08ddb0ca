"""Comparing every file of a run, and the tokens it was trained on, with their checksums."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from regard import tensor_io
from regard.data.token_cache import stored
from regard.errors import RegardWarning, UserError
from regard.files import DirectoryLock
from regard.run_dir import LOGS, RunDir


@dataclass(frozen=True)
class Finding:
    """What became of a file: ok, edited, damaged or missing, and why."""

    file: Path
    status: str = "ok"
    why: str = ""


def verify(path: Path) -> Iterator[Finding]:
    """Check every file of a run directory, from the small ones to the weights and the token cache."""
    info = path / "run.json"
    try:
        run = RunDir(path)
    except UserError as error:
        if not info.exists():
            raise
        yield Finding(info, "damaged", str(error))
        return
    yield Finding(info)
    yield _recipe(run)
    tokenizers = [_checked(file, partial(run.tokenizer, file)) for file in _tokenizer_files(run)]
    yield from tokenizers
    expected = [run.best] if not _before_first_validation(run) else []
    for file in (*expected, *run.snapshots().values(), *([run.resume] if run.resume.exists() else [])):
        yield _checked(file, partial(tensor_io.load, file))
    for name in LOGS:
        if run.log_mark(name) is not None:
            yield _checked(run.path / name, partial(run.log, name))
    if all(finding.status == "ok" for finding in tokenizers):
        yield from _cache(run)


def accept(path: Path) -> None:
    """Record an edited recipe.toml as the settings of the run."""
    run = RunDir(path)
    with DirectoryLock(path, "training"):
        run.accept_edits()


def _checked(file: Path, read: Callable[[], Any]) -> Finding:
    if not file.exists():
        return Finding(file, "missing")
    try:
        read()
    except UserError as error:
        return Finding(file, "damaged", str(error))
    return Finding(file)


def _recipe(run: RunDir) -> Finding:
    file = run.path / "recipe.toml"
    found = _checked(file, run.edits)
    edited = run.edits() if found.status == "ok" else {}
    return Finding(file, "edited", ", ".join(edited)) if edited else found


def _tokenizer_files(run: RunDir) -> list[Path]:
    try:
        return run.tokenizer_files(run.accepted)
    except UserError:  # an older run whose recipe cannot be read, which has been said
        return sorted(run.path.glob("*tokenizer.json"))


def _before_first_validation(run: RunDir) -> bool:
    """Whether the run is trained but was not validated yet: then there are no best weights to expect."""
    try:
        return not run.best.exists() and run.resume.exists() and tensor_io.read_metadata(run.resume)["best"] is None
    except (UserError, KeyError):
        return False


def _cache(run: RunDir) -> Iterator[Finding]:
    """The tokens in the cache, where they can be found: that takes the files that the run was trained on."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RegardWarning)  # of an edited recipe, which has been said
            folders = stored(run.accepted, *run.tokenizers)
    except (UserError, OSError):
        return
    for folder, whole in folders.items():
        yield Finding(folder) if whole else Finding(folder, "damaged", "training will make these tokens again")
