"""Compare the files of a run, and the token cache that it was trained on, with their checksums."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from regard import tasks, tensor_io
from regard.data.token_cache import stored
from regard.errors import RegardWarning, UserError
from regard.files import DirectoryLock
from regard.run_dir import LOGS, RunDir
from regard.tasks.text import TextTask


@dataclass(frozen=True)
class Finding:
    """The status of a file (ok, edited, damaged or missing) and the reason."""

    file: Path
    status: str = "ok"
    why: str = ""


def verify(path: Path) -> Iterator[Finding]:
    """Check every file of a run directory, and the token cache."""
    info = path / "run.json"
    try:
        run = RunDir(path)
    except UserError as error:
        if not info.exists():
            raise
        yield Finding(info, "damaged", str(error))
        return
    yield Finding(info)
    yield _check_recipe(run)
    tokenizers = [_check_file(file, partial(run.tokenizer, file)) for file in _tokenizer_files(run)]
    yield from tokenizers
    expected = [run.best] if not _before_first_validation(run) else []
    for file in (*expected, *run.snapshots().values(), *([run.resume] if run.resume.exists() else [])):
        yield _check_file(file, partial(tensor_io.load, file))
    for name in LOGS:
        if run.log_checksum(name) is not None:
            yield _check_file(run.path / name, partial(run.log, name))
    if all(finding.status == "ok" for finding in tokenizers):
        yield from _check_cache(run)


def accept(path: Path) -> None:
    """Record an edited recipe.toml as the settings of the run."""
    run = RunDir(path)
    with DirectoryLock(path, "training"):
        run.accept_edits()


def _check_file(file: Path, read: Callable[[], Any]) -> Finding:
    if not file.exists():
        return Finding(file, "missing")
    try:
        read()
    except UserError as error:
        return Finding(file, "damaged", str(error))
    return Finding(file)


def _check_recipe(run: RunDir) -> Finding:
    file = run.path / "recipe.toml"
    finding = _check_file(file, run.edits)
    edited = run.edits() if finding.status == "ok" else {}
    return Finding(file, "edited", ", ".join(edited)) if edited else finding


def _tokenizer_files(run: RunDir) -> list[Path]:
    try:
        return run.tokenizer_files(run.accepted)
    except UserError:  # the recipe cannot be read, which is another finding
        return sorted(run.path.glob("*tokenizer.json"))


def _before_first_validation(run: RunDir) -> bool:
    """Whether training has not reached its first validation, so that there are no best weights yet."""
    try:
        return not run.best.exists() and run.resume.exists() and tensor_io.read_metadata(run.resume)["best"] is None
    except (UserError, KeyError):
        return False


def _check_cache(run: RunDir) -> Iterator[Finding]:
    """Check the token cache; it is found only if the files that the run was trained on are still there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RegardWarning)  # an edited recipe is another finding
            task = tasks.of(run.accepted)
            encoder = task.target_encoder(run) if isinstance(task, TextTask) else run.tokenizers[1]
            folders = stored(run.accepted, run.tokenizers[0], encoder)
    except (UserError, OSError):
        return
    for folder, whole in folders.items():
        yield Finding(folder) if whole else Finding(folder, "damaged", "training will rebuild it")
