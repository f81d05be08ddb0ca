"""Measure quality for time: the score reached from raw text within a time budget, with regard and with Marian.

    python -m bench.quality europarl --data DATA/europarl-en-de --steps 6000 [--seconds 300] [--peers eager compiled]
    python -m bench.quality multi30k --data DATA/multi30k [--seeds 1 2 3] [--seconds 90]

regard runs as `regard train` and `regard evaluate`; Hugging Face's Marian is bench/peers_marian.py. Every run is a new
process with empty caches (of tokens and of compiled code), timed from the start of the first process to the printed
score: imports, learning the vocabulary, tokenising, compilation, training, decoding, scoring. regard trains for a fixed
number of steps; the table shows how many would have filled the budget. `--set` and `--peer` change settings of either
system (`--set training.steps=900`, `--peer learning-rate=0.0007`), so that both can be tuned with `--split valid`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import machine

PEERS = {"eager": [], "compiled": ["--compiled", "whole"], "compiled-layers": ["--compiled", "layers"]}


def fresh(folder: Path) -> dict[str, str]:
    """Return an environment with empty cache directories."""
    caches = {"REGARD_CACHE": "tokens", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return os.environ | {name: str(folder / part) for name, part in caches.items()}


def run(command: list[str], environment: dict[str, str], log: Path) -> str:
    """Run a command and return its standard output; log its standard error with timestamps, then its output."""
    with log.open("a", encoding="utf-8") as file:
        began = time.perf_counter()

        def listen(said: Iterable[str]) -> None:
            for line in said:
                file.write(f"{time.perf_counter() - began:6.1f} s  {line}")
                file.flush()

        listen([f"$ {' '.join(command)}\n"])
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            listener = threading.Thread(target=listen, args=[process.stderr])
            listener.start()
            printed = process.stdout.read()
            listener.join()
        file.write(printed)
    if process.returncode:
        sys.exit(f"{' '.join(command[:5])} ... failed; the end of {log}:\n{''.join(tail(log))}")
    return printed


@contextmanager
def kept(where: Path | None, name: str) -> Iterator[Path]:
    """Yield a directory for one run: a new one of this name under `where`, or a temporary one."""
    if where is None:
        with tempfile.TemporaryDirectory(prefix="quality-") as folder:
            yield Path(folder)
    else:
        (where / name).mkdir(parents=True)
        yield where / name


def tail(log: Path, lines: int = 15) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines(keepends=True)[-lines:]


def ours(given: argparse.Namespace, recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run `regard train` and `regard evaluate`; return scores, and the seconds in total, before, in and after training.

    With several members, which train concurrently, tokens are summed; the other figures are those of the first.
    """
    regard, settings = [sys.executable, "-m", "regard"], list(given.set or [])
    if given.steps:
        same = ("steps", "validate_every", "save_every") if given.task == "europarl" else ("steps",)
        settings = [*(f"training.{name}={given.steps}" for name in same), *settings]
    chosen = [word for setting in settings for word in ("--set", setting)]
    environment = fresh(folder)
    seeds = range((seed - 1) * given.members + 1, seed * given.members + 1)
    outs = [folder / f"run-{each}" for each in seeds]
    logs = [given.logs / f"ours-{Path(recipe).stem}-{each}.log" for each in seeds]
    log, out = logs[0], outs[0]
    began = time.perf_counter()
    place = ["--data", str(given.data), "--device", given.device]

    def train(each: int, to: Path, words: Path) -> None:
        words.unlink(missing_ok=True)
        run([*regard, "train", recipe, *place, "--seed", str(each), "--out", str(to), *chosen], environment, words)

    with ThreadPoolExecutor(given.members) as pool:
        list(pool.map(train, seeds, outs, logs))
    trained = time.perf_counter() - began
    others = [word for other in outs[1:] for word in ("--with", str(other))]
    scored = [*regard, "evaluate", str(out), *others, "--device", given.device, "--split", given.split, "--json"]
    found = json.loads(run(scored, environment, log).splitlines()[-1])
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    last, first = steps[-1], steps[0]
    # The first logged steps include compilation.
    pace = (last["seconds"] - first["seconds"]) / max(last["step"] - first["step"], 1)
    (given.logs / log.with_suffix(".metrics.jsonl").name).write_text("".join(json.dumps(x) + "\n" for x in lines))
    return {
        "who": f"regard, {recipe}" + (f", {given.members} together" if given.members > 1 else ""),
        "seed": seed,
        "bleu": round(found["bleu"], 2),
        "chrf": round(found["chrf"], 2),
        "signature": found["bleu_signature"],
        "seconds": round(seconds, 1),
        "before": round(trained - last["seconds"], 1),
        "training": last["seconds"],
        "after": round(seconds - trained, 1),
        "steps": last["step"],
        "tokens": given.members * last["tokens"],
        "tokens_per_second": round(
            given.members * (last["tokens"] - first["tokens"]) / max(last["seconds"] - first["seconds"], 1e-9)
        ),
        "steps_that_fit": last["step"] + int((given.seconds - seconds) / max(pace, 1e-9)),
        "settings": settings,
    }


def marian(given: argparse.Namespace, how: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run bench/peers_marian.py with the same budget."""
    changes = [word for setting in given.peer or [] for word in _option(setting)]
    command = [sys.executable, "-m", "bench.peers_marian", "--data", str(given.data), "--seconds", str(given.seconds)]
    command += ["--languages", *given.languages, "--split", given.split, "--seed", str(seed)]
    command += [] if given.device == "auto" else ["--device", given.device]
    log = given.logs / f"marian-{how}-{seed}.log"
    log.unlink(missing_ok=True)
    began = time.perf_counter()
    found = json.loads(run([*command, *PEERS[how], *changes], fresh(folder), log).splitlines()[-1])
    return {
        "who": f"Marian, {how}",
        "seed": seed,
        "bleu": found["bleu"],
        "chrf": found["chrf"],
        "signature": found["bleu_signature"],
        "seconds": round(time.perf_counter() - began, 1),
        "before": found["set_up_seconds"],
        "training": found["training_seconds"],
        "after": found["decoding_seconds"],
        "steps": found["steps"],
        "tokens": found["target_tokens"],
        "tokens_per_second": found["target_tokens_per_second"],
        "settings": list(given.peer or []),
    }


def _option(setting: str) -> list[str]:
    name, _, value = setting.partition("=")
    return [f"--{name}", value] if value else [f"--{name}"]


COLUMNS = ("who", "seed", "bleu", "chrf", "seconds", "before", "training", "after", "steps", "tokens_per_second")


def table(results: list[dict[str, Any]]) -> str:
    rows = [COLUMNS, *(tuple(f"{r.get(name, '')}" for name in COLUMNS) for r in results)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def report(given: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    print(f"\n{table(results)}")
    for who in dict.fromkeys(result["who"] for result in results):
        mine = [result for result in results if result["who"] == who]
        scores = [result["bleu"] for result in mine]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        slowest = max(result["seconds"] for result in mine)
        over = "" if slowest <= given.seconds else f", OVER the budget of {given.seconds:g} s"
        fitting = f"; {mine[-1]['steps_that_fit']} steps would fill it" if "steps_that_fit" in mine[-1] else ""
        print(f"{who}: BLEU {statistics.mean(scores):.2f}{spread}, at most {slowest:g} s{over}{fitting}")
    print(f"{given.split}, {results[0]['signature']}")
    if given.out:
        about = {**machine.about(), "task": given.task, "seconds": given.seconds, "split": given.split}
        given.out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["europarl", "multi30k"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, help="the time budget [default: europarl 300, multi30k 90]")
    parser.add_argument("--seeds", type=int, nargs="+", help="[default: europarl 1, multi30k 1 2 3]")
    parser.add_argument("--steps", type=int, help="optimiser steps of regard [default: the recipe's]")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="a recipe setting of regard; repeatable")
    parser.add_argument("--members", type=int, default=1, help="train this many concurrently, decode as an ensemble")
    parser.add_argument("--recipe", help="[default: europarl-en-de, multi30k-en-de]")
    parser.add_argument("--peers", nargs="*", choices=[*PEERS], default=[], help="variants of Marian to run as well")
    parser.add_argument("--peer", action="append", metavar="NAME=VALUE", help="an option of peers_marian; repeatable")
    parser.add_argument("--languages", nargs=2, default=["en", "de"])
    parser.add_argument("--split", choices=["test", "valid"], default="test")
    parser.add_argument("--no-ours", action="store_true", help="run only the peers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "quality", help="log directory")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the trained models, in one directory each")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    given = parser.parse_args()
    recipe, seconds, seeds = {
        "europarl": ("europarl-en-de", 300.0, [1]),
        "multi30k": ("multi30k-en-de", 90.0, [1, 2, 3]),
    }[given.task]
    vars(given).update(seconds=given.seconds or seconds, seeds=given.seeds or seeds)
    if given.members < 1 or (given.members > 1 and min(given.seeds) < 1):
        parser.error("--members must be 1 or more; with several members --seeds must be 1 or more")
    given.logs.mkdir(parents=True, exist_ok=True)
    if given.keep and given.keep.exists():
        parser.error(f"{given.keep} exists already: choose another directory")
    print(machine.heading(), flush=True)
    results: list[dict[str, Any]] = []
    for seed in given.seeds:  # sequentially: concurrent runs would share the time
        for how in [*([] if given.no_ours else ["ours"]), *given.peers]:
            with kept(given.keep, f"{how}-{seed}") as folder:
                if how == "ours":
                    results.append(ours(given, given.recipe or recipe, seed, folder))
                else:
                    results.append(marian(given, how, seed, folder))
            print(json.dumps(results[-1]), flush=True)
    report(given, results)


if __name__ == "__main__":
    main()
