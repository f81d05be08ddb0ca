"""Single flipped bits in every file of a run and of the cache: refused, named in a warning, or without effect."""

from __future__ import annotations

import json
import os
import shutil
import traceback
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign.sandbox import Clock, Tally, call

STEPS, RESUMED_STEPS = 6, 9  # steps of the damaged run, and after resuming
FLIPS_PER_PROCESS = 40  # flips per process


def run(count: int | None, seed: int, seconds: float | None, scratch: Path) -> Tally:
    from families import FAMILIES

    tally, random, left = Tally("bits"), Random(seed), count
    homes = {}
    for family in FAMILIES:
        home = homes[family] = scratch / family
        made = call(partial(_make, home, family), home, seconds=600)
        assert made.status == 0, made.err
    for number in Clock(None if count is None else -(-count // FLIPS_PER_PROCESS), seconds).numbers():
        family = list(FAMILIES)[number % len(FAMILIES)]
        many = FLIPS_PER_PROCESS if left is None else min(FLIPS_PER_PROCESS, left)
        left = None if left is None else left - many
        flips_seed = random.randrange(10**9)
        report = homes[family] / "report.json"
        outcome = call(partial(_flips, homes[family], family, many, flips_seed, report), homes[family], seconds=1200)
        if outcome.status != 0:
            tally.add("the campaign itself", f"{family}, seed {flips_seed}: {outcome.err[-500:]}")
            continue
        for kind, failure in json.loads(report.read_text()):
            tally.add(kind, failure and f"{family}, {failure}")
    return tally


def _recipe(home: Path, family: str, steps: int) -> Any:
    from small_training import tiny

    return tiny(family, 1, home, steps=steps, save_every=3, validate_every=3, validate_lines=2, accumulate=1)


def _train(home: Path, family: str, out: Path, steps: int, news: list[str]) -> None:
    from regard.training import setup
    from regard.training.progress import Reporter

    class WarningReporter(Reporter):
        def say(self, line: str) -> None:
            if "damage" in line or "altered" in line or "again" in line:
                news.append(line)

    setup.pick = lambda quiet: WarningReporter()  # type: ignore[assignment]
    setup.train(_recipe(home, family, steps), out, device="cpu", quiet=True)


def _make(home: Path, family: str) -> int:
    home.mkdir(parents=True, exist_ok=True)
    os.environ["REGARD_CACHE"] = str(home / "cache")
    _train(home, family, home / "run", STEPS, [])
    return 0


def _used(run: Path, family: str) -> Any:
    """Return the model's output."""
    from regard.api import load

    model = load(run, device="cpu")
    if "fill" in family:
        return [[(guess.text, guess.probability) for guess in gap] for gap in model.fill("a [MASK] c", top=3).guesses]
    if model.run.recipe.data.kind == "text":
        return model.generate("a b", tokens=5, seed=1).text
    return [(one.text, one.score) for one in model.translate(["a b c", "t s"])]


def _resumed(home: Path, family: str, work: Path, news: list[str]) -> Any:
    """Resume a run; return its weights, state and metrics."""
    from small_training import measured, remembered

    _train(home, family, work / "run", RESUMED_STEPS, news)
    tensors = remembered(work / "run")
    try:
        lines: list[Any] = measured(work / "run")
    except ValueError:  # a damaged line was kept; then there must have been a warning
        lines = []
    return {name: tensor.tolist() for name, tensor in tensors.items()}, lines


def _flips(home: Path, family: str, many: int, seed: int, report: Path) -> int:
    from bit_flips import flipped, observe, places

    work = home / "work"

    def fresh() -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(home, work, ignore=shutil.ignore_patterns("work", ".*"))

    fresh()
    os.environ["REGARD_CACHE"] = str(work / "cache")
    expected = {"use": _used(work / "run", family), "resume": _resumed(home, family, work, [])}
    fresh()
    files = sorted(
        path for part in ("run", "cache") for path in (work / part).rglob("*") if path.is_file() and path.stat().st_size
    )
    chosen, found = Random(seed).sample(files, len(files)), []
    for file, bit in places(chosen, many, seed):
        name = str(file.relative_to(work)) if "cache" not in file.parts else f"cache/{file.name}"
        kind = "run/snapshots" if "snapshots" in name else name
        for action in _actions(name):
            failure = ""
            with flipped(file, bit):
                act = {
                    "use": lambda news: _used(work / "run", family),
                    "resume": lambda news: _resumed(home, family, work, news),
                }
                try:
                    outcome = observe(act[action])
                    if outcome.silent_change(expected[action]):
                        failure = f"{name}, bit {bit}: {action}: another result without a warning"
                except Exception as error:
                    where = traceback.format_exc().strip().splitlines()[-3].strip()
                    failure = f"{name}, bit {bit}: {action}: {type(error).__name__}: {error} ({where})"
            if action == "resume":
                fresh()
            found.append((kind, failure))
            if failure:
                break
    report.write_text(json.dumps(found))
    return 0


def _actions(name: str) -> list[str]:
    """Return what reads a file: using the model, resuming the training, or both."""
    if name.startswith("cache") or "resume" in name or "snapshots" in name or name.endswith("jsonl"):
        return ["resume"]
    return ["use"] if "model.safetensors" in name else ["use", "resume"]
