"""Training that is killed at various moments, by various signals, and must resume as if it had not been."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign.sandbox import Clock, Tally, call

EARLY = ("learning the vocabulary", "tokenising", "before the first save", "before the first validation")
LATE = ("while saving", "between two files", "while validating", "in an update", "at a random moment")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
STEPS = 30
CHAIN = 6  # kills of one run before it is trained to its end


def run(count: int | None, seed: int, seconds: float | None, scratch: Path) -> Tally:
    from families import FAMILIES

    tally, random, clock = Tally("kills"), Random(seed), Clock(count, seconds)
    numbers, wholes = clock.numbers(), {}
    number = next(numbers, None)
    for chain in range(10**9):
        if number is None:
            break
        family = list(FAMILIES)[chain % len(FAMILIES)]
        home = scratch / f"chain {chain}"
        if family not in wholes:
            wholes[family] = _whole(family, scratch / f"whole {family}")
        recipe, whole = wholes[family]
        moments = [*random.sample(EARLY, 2), *random.choices(LATE, k=CHAIN - 2)]
        moments.sort(key=lambda moment: EARLY.index(moment) if moment in EARLY else len(EARLY))
        for moment in moments:
            if number is None:
                break
            killed_by = random.choice(SIGNALS)
            came, failure = _kill(recipe, home, moment, killed_by, random)
            if came or failure:  # it does not come if the run has ended before
                tally.add(moment, failure and f"{family}, {killed_by.name}: {failure}")
                number = next(numbers, None)
        outcome = call(partial(_train, recipe, home), home)
        if outcome.status != 0:
            tally.add("goes on", f"{family}, after {', '.join(moments)}: {outcome.fault((0,))}")
        else:
            same = call(partial(_compare, whole, home / "run"), home)
            tally.add("goes on", "" if same.status == 0 else f"{family}: another run: {same.err.strip()[-300:]}")
        shutil.rmtree(home)
    tally.add("stopped before the first validation, then fewer steps", _without_validation(scratch / "fewer steps"))
    return tally


def _whole(family: str, home: Path) -> tuple[Path, Path]:
    """Make a recipe and the run that results from it without a kill."""
    home.mkdir(parents=True)
    recipe = home / "recipe.toml"
    made = call(partial(_write_recipe, family, home, recipe), home)
    assert made.status == 0, made.err
    trained = call(partial(_train, recipe, home), home)
    assert trained.status == 0, trained.err
    return recipe, home / "run"


def _write_recipe(family: str, home: Path, file: Path) -> int:
    from small_training import tiny

    from regard.recipes import to_toml

    settings = tiny(family, 1, home, steps=STEPS, save_every=2, validate_every=3, validate_lines=1, accumulate=1)
    file.write_text(to_toml(settings))
    return 0


def _train(recipe: Path, home: Path, *sets: str) -> int:
    from regard.cli import run

    os.environ["REGARD_CACHE"] = str(home / "cache")
    changes = [word for entry in sets for word in ("--set", entry)]
    return run(["train", str(recipe), "--out", str(home / "run"), "--device", "cpu", *changes], False)


def _kill(recipe: Path, home: Path, moment: str, by: signal.Signals, random: Random) -> tuple[bool, str]:
    """Return whether the moment came, and what was wrong."""
    step, delay = random.randrange(1, STEPS), random.uniform(0, 1.0)

    def train() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # children of nohup ignore it
        _arm(moment, by, step, delay, home)
        return _train(recipe, home)

    outcome = call(train, home)
    came = (home / "came").exists()
    (home / "came").unlink(missing_ok=True)
    if outcome.status == 0 or not came:
        return False, outcome.fault((0,)) if outcome.status else ""
    polite = {128 + by, -by} if by != signal.SIGKILL else {-by}
    if outcome.status not in polite or "bug in regard" in outcome.err or "Traceback" in outcome.err:
        return True, outcome.fault(tuple(polite)) or "another exit status"
    in_the_loop = moment in ("before the first save", "before the first validation", "in an update", "while validating")
    if by != signal.SIGKILL and in_the_loop and not (home / "run" / "resume.safetensors").exists():
        return True, "nothing was saved"
    return True, ""


def _arm(moment: str, by: signal.Signals, step: int, delay: float, home: Path) -> None:
    """Send this process the signal at the moment."""
    from regard import tensor_io
    from regard.tasks import Task, text
    from regard.training.loop import Trainer

    def strike() -> None:
        (home / "came").touch()
        os.kill(os.getpid(), by)

    def before(owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, name)

        def struck(*arguments: Any, **named: Any) -> Any:
            if when(*arguments):
                setattr(owner, name, original)
                strike()
            return original(*arguments, **named)

        setattr(owner, name, struck)

    if moment == "learning the vocabulary":
        before(Task, "learn_tokenizers")
    elif moment == "tokenising":
        before(text, "build")
    elif moment == "before the first save":
        before(Trainer, "_take_step")
    elif moment == "before the first validation":
        before(Trainer, "_take_step", lambda trainer, *_: trainer.progress.step == 2)
    elif moment == "in an update":
        before(Trainer, "_take_step", lambda trainer, *_: trainer.progress.step >= step)
    elif moment == "while validating":
        before(Trainer, "_validate")
    elif moment == "between two files":
        skip = iter(range(step % 7 + 3))
        before(os, "replace", lambda *_: next(skip, None) is None)
    elif moment == "while saving":
        save, skip = tensor_io.save_file, iter(range(step % 5))

        def half(tensors: Any, file: str, **named: Any) -> None:
            save(tensors, file, **named)
            if next(skip, None) is None:
                os.truncate(file, os.path.getsize(file) // 2)
                if by == signal.SIGKILL:  # the library writes to a temporary name first
                    shutil.copy(file, Path(file).with_name(".tmpA1b2C3"))
                strike()
                save(tensors, file, **named)

        tensor_io.save_file = half
    else:
        timer = threading.Timer(delay, strike)
        timer.daemon = True
        timer.start()


def _compare(whole: Path, other: Path) -> int:
    from small_training import assert_same_runs

    assert_same_runs(whole, other)
    left = [file for file in other.rglob(".*") if file.is_file() and file.name not in (".lock",) and "tmp" in file.name]
    assert not left, f"left behind: {left}"
    return 0


def _without_validation(home: Path) -> str:
    """Check that a run which ends before its first validation has a model."""
    home.mkdir(parents=True)
    recipe = home / "recipe.toml"
    call(partial(_write_recipe, "transformer", home, recipe), home)
    _kill(recipe, home, "before the first save", signal.SIGINT, Random(1))
    outcome = call(partial(_train, recipe, home, "training.steps=1"), home)
    if outcome.status != 0:
        return outcome.fault((0,))
    return "" if (home / "run" / "model.safetensors").exists() else "no model.safetensors, and exit status 0"
