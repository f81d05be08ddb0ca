"""Flipped bits in a run of a second; the campaign flips more of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_runs import go, small

from bit_flips import Outcome, flipped, observe, places
from regard import tensor_io
from regard.api import Model
from regard.data.token_cache import cache_folder
from regard.files import DirectoryLock
from regard.run_dir import RunDir
from regard.training import setup
from regard.training.progress import Reporter


class News(Reporter):
    """Collects what training says that is a warning."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def say(self, line: str) -> None:
        if "warning" in line or "damaged" in line:
            self.lines.append(line)


def silent_changes(folder: Path, count: int, seed: int, patch: pytest.MonkeyPatch) -> list[tuple[Path, int, Outcome]]:
    """Flip bits in every file of a run and of its tokens, one at a time, and use the run; what changed silently."""
    patch.setenv("REGARD_CACHE", str(folder / "cache"))
    run = go(small(folder, steps=4, validate_lines=2, average=2, save_every=2), folder / "run")
    longer = small(folder, steps=5, validate_lines=2, average=2, save_every=2)
    (tokens,) = cache_folder().iterdir()
    own = [file for file in sorted(run.path.rglob("*")) if file.is_file() and file.name != DirectoryLock.NAME]
    read = {run.path / "run.json", run.path / "recipe.toml", run.path / "tokenizer.json", run.best}
    again = folder / "again"

    def use(news: list[str]) -> Any:
        """Translate with every snapshot and the best weights, and read the measurements."""
        opened = RunDir(run.path)
        texts = []
        for file in (opened.best, *opened.snapshots().values()):
            found = Model(opened, "cpu", file).translate("a b c")
            texts.append((found.text, found.score))
        return texts, opened.log("metrics.jsonl").read_bytes(), opened.log("samples.jsonl").read_bytes()

    def go_on(news: list[str]) -> Any:
        """Train a step longer, in a copy."""
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(run.path, again)
        patch.setattr(setup, "pick", lambda quiet: News(news))
        go(longer, again, quiet=False)
        found = [tensor_io.load(again / name) for name in ("resume.safetensors", "model.safetensors")]
        numbers = [{name: tensor.tolist() for name, tensor in tensors.items()} for tensors, _ in found]
        facts = [{**about, "seconds": 0, "logs": {}} for _, about in found]
        lines = re.sub(rb'"seconds": [0-9.]+', b"", (again / "metrics.jsonl").read_bytes())
        return numbers, facts, lines, (again / "samples.jsonl").read_bytes()

    expected = {use: observe(use), go_on: observe(go_on)}
    assert not any(outcome.refused or outcome.warnings for outcome in expected.values())
    silent = []
    for number, (file, bit) in enumerate(places([*own, *sorted(tokens.iterdir())], count, seed)):
        acts = [use] if file in read or "step-" in file.name else [go_on]
        acts += [go_on] if file in read and number % 4 == 0 else []
        for act in acts:
            with flipped(file, bit):
                outcome = observe(act)
            if outcome.silent_change(expected[act].result):
                silent.append((file, bit, outcome))
    return silent
