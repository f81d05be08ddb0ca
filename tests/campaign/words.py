"""Random command lines: each must be refused in one line, with status 2, or be carried out."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign import odd
from tests.campaign.sandbox import Clock, Tally, call, regard

RUNS = {"pairs": "transformer", "text": "gpt", "gaps": "bert (fill)", "classes": "bert (classify)"}
SLOW_VERBS = {"look", "serve", "train", "bench", "fetch"}  # they take long or need a network
QUICK = ["--set", "training.steps=1", "--set", "data.count=30", "--set", "model.size=tiny"]


def run(count: int | None, seed: int, seconds: float | None, scratch: Path) -> Tally:
    made = call(partial(_make, scratch), scratch, seconds=600)
    assert made.status == 0, made.err
    tally, random = Tally("words"), Random(seed)
    verbs = _verbs()
    for number in Clock(count, seconds).numbers():
        home = scratch / f"case {number}"
        home.mkdir()
        words = _words(verbs, random, scratch, home)
        stdin = random.choice([b"", b"a b\n", b"\n\n", b"\xff\xfe\n", b"a [MASK] b\n\x00\n", b"x" * 100_000])
        outcome = regard(words, home, stdin)
        fault = outcome.fault()
        tally.add(
            words[0] if words[:1] and words[0] in verbs else "no verb",
            fault and f"seed {seed}, {number}: {words!r:.300}: {fault}",
        )
        shutil.rmtree(home, ignore_errors=True)
    return tally


def _make(scratch: Path) -> int:
    from tiny_runs import make_run

    for name, family in RUNS.items():
        make_run(scratch / name, family)
    (scratch / "lines").write_text("a b\nc d\n")
    return 0


def _verbs() -> dict[str, list[Any]]:
    """Return the verbs and their parameters."""
    from regard.cli.app import VERBS, verb

    return {name: verb(name).params for name in VERBS}


def _words(verbs: dict[str, list[Any]], random: Random, scratch: Path, home: Path) -> list[str]:
    if random.random() < 0.03:
        return [str(random.choice(odd.VALUES)).replace("\0", "") for _ in range(random.randrange(1, 4))]
    verb = random.choice([verb for verb in verbs if verb not in SLOW_VERBS] + ["train"])
    words = [verb]
    for param in verbs[verb]:
        if param.param_type_name == "argument":
            words += [_argument(param.name, random, scratch)] * random.choice([0, 1, 1, 1, 1, 2])
        elif random.random() < 0.25 and param.name not in ("out", "output"):
            words.append(random.choice(param.opts + param.secondary_opts))
            words += [] if getattr(param, "is_flag", False) else [_value(param, random, scratch)]
    if any(param.name == "out" for param in verbs[verb]) and random.random() < 0.8:
        words += ["--out", str(home / random.choice(["out", "out.svg", "out.json", "a/b/c", "out.png"]))]
    if verb == "train":
        words = ["train", random.choice(["copy", "stories", "moods", str(scratch / "lines")]), *words[2:], *QUICK]
    elif random.random() < 0.1:
        positions = [n for n in range(len(words) + 1) if words[n - 1 : n] != ["--out"]]  # outputs stay in `home`
        words.insert(random.choice(positions), _text(random))
    return words


def _argument(name: str, random: Random, scratch: Path) -> str:
    if random.random() < 0.75 and name in ("run", "runs", "folder", "paths"):
        return str(scratch / random.choice(list(RUNS)))
    return random.choice([_text(random), "this cat", "a [MASK] day", str(scratch / "lines"), "copy", "multi30k"])


def _value(param: Any, random: Random, scratch: Path) -> str:
    kind = random.random()
    choices = getattr(getattr(param, "type", None), "choices", None)
    if choices and kind < 0.6:
        return str(random.choice(list(choices)))
    if kind < 0.2:
        return random.choice(
            ["jsonl", "text", "json", "best", "last", "average", "cpu", "int8", "heads", "map", "huggingface"]
        )
    if kind < 0.4:
        return str(random.choice([0, 1, 2, 3, 5, 0.5, 1.0, 10]))
    if kind < 0.6:
        return str(scratch / random.choice([*RUNS, "lines", "nowhere"]))
    return _text(random)


def _text(random: Random) -> str:
    """Return a word of the command line, which cannot contain a null byte."""
    value = random.choice(
        [*odd.VALUES, "1,2", "1-3", "step-10", "best", "last", "0:1", "a=b", "training.steps=-1", "-1", "--", "-"]
    )
    return str(value).replace("\0", "")
