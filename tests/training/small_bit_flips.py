"""Flipped bits in the files of a small run; the campaign flips more of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_runs import small, train_run

from bit_flips import Outcome, flipped, observe, places
from regard import tensor_io
from regard.api import Model
from regard.data.cache_key import cache_folder
from regard.files import DirectoryLock
from regard.run_dir import RunDir
from regard.training import setup
from regard.training.progress import Reporter


class WarningReporter(Reporter):
    """Collects the warnings of a training run."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def say(self, line: str) -> None:
        if "warning" in line or "damaged" in line:
            self.lines.append(line)


def silent_changes(folder: Path, count: int, seed: int, patch: pytest.MonkeyPatch) -> list[tuple[Path, int, Outcome]]:
    """Flip bits in the files of a run and of its token cache, one at a time; return the silent changes."""
    patch.setenv("REGARD_CACHE", str(folder / "cache"))
    run = train_run(small(folder, steps=4, validate_lines=2, average=2, save_every=2), folder / "run")
    longer = small(folder, steps=5, validate_lines=2, average=2, save_every=2)
    (tokens,) = cache_folder().iterdir()
    run_files = [file for file in sorted(run.path.rglob("*")) if file.is_file() and file.name != DirectoryLock.NAME]
    read = {run.path / "run.json", run.path / "recipe.toml", run.path / "tokenizer.json", run.best}
    again = folder / "again"

    def use(messages: list[str]) -> Any:
        """Translate with every snapshot and the best weights, and read the measurements."""
        opened = RunDir(run.path)
        texts = []
        for file in (opened.best, *opened.snapshots().values()):
            translation = Model(opened, "cpu", file).translate("a b c")
            texts.append((translation.text, translation.score))
        return texts, opened.log("metrics.jsonl").read_bytes(), opened.log("samples.jsonl").read_bytes()

    def resume(messages: list[str]) -> Any:
        """Train one more step in a copy."""
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(run.path, again)
        patch.setattr(setup, "pick", lambda quiet: WarningReporter(messages))
        train_run(longer, again, quiet=False)
        loaded = [tensor_io.load(again / name) for name in ("resume.safetensors", "model.safetensors")]
        numbers = [{name: tensor.tolist() for name, tensor in tensors.items()} for tensors, _ in loaded]
        facts = [{**about, "seconds": 0, "logs": {}} for _, about in loaded]
        lines = re.sub(rb'"seconds": [0-9.]+', b"", (again / "metrics.jsonl").read_bytes())
        return numbers, facts, lines, (again / "samples.jsonl").read_bytes()

    expected = {use: observe(use), resume: observe(resume)}
    assert not any(outcome.refused or outcome.warnings for outcome in expected.values())
    silent = []
    for number, (file, bit) in enumerate(places([*run_files, *sorted(tokens.iterdir())], count, seed)):
        actions = [use] if file in read or "step-" in file.name else [resume]
        actions += [resume] if file in read and number % 4 == 0 else []
        for action in actions:
            with flipped(file, bit):
                outcome = observe(action)
            if outcome.silent_change(expected[action].result):
                silent.append((file, bit, outcome))
    return silent
