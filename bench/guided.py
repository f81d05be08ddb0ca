"""Word alignment with and without guidance: trains both directions twice, and prints AER and BLEU of all four runs.

    python -m bench.hansards DATA FOLDER                 # --german: the other set
    python -m bench.guided FOLDER --out RUNS             # --settings training.steps=20 ...: to try the script

First both directions are trained without guidance. Their symmetrised attention links all training pairs, and both are
trained again from scratch, for as many steps, with one head guided by these links. No gold link is used before the
error rates are computed. BLEU is of greedy translations of Europarl's test set in the notation of the alignments. Each
line is printed as soon as it is known, with the seconds since the start; finished trainings are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bench.hansards import read

BEGAN = time.perf_counter()
DIRECTIONS = {"en-fr": "ef", "fr-en": "fe"}  # of the recipes hansards-*: source and target


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:5.0f} s] {text}", flush=True)


def regard(*words: object) -> str:
    done = subprocess.run([sys.executable, "-m", "regard", *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"regard {' '.join(map(str, words))} failed with status {done.returncode}")
    return done.stdout


def train(folder: Path, run: Path, direction: str, settings: list[str]) -> None:
    changes = [word for setting in settings for word in ("--set", setting)]
    regard("train", f"hansards-{direction}", "--data", folder, "--out", run, "--quiet", *changes)
    say(f"{run.name}: trained")


def bleu(folder: Path, run: Path, direction: str) -> None:
    source, target = (folder / f"europarl.{side}.xz" for side in DIRECTIONS[direction])
    found = regard("evaluate", run, "--source", source, "--reference", target, "--beam", 1, "--json", "--quiet")
    say(f"{run.name}: {' '.join(found.split())}")


def error_rates(folder: Path, forward: Path, reverse: Path) -> None:
    sides = [folder / f"test.{side}.xz" for side in "ef"]
    found = regard("align", forward, *sides, "--reverse", reverse, "--gold", folder / "test.wa.xz", "--json", "--quiet")
    say(f"{forward.name} and {reverse.name}: {json.dumps(json.loads(found))}")


def link(folder: Path, out: Path, runs: dict[str, Path]) -> dict[str, Path]:
    """Align all training pairs, in the order of the recipes' mixes: one file of links for each direction."""
    files = {}
    for side in "ef":
        lines = [line + "\n" for part in ("train", "test") for line in read(folder / f"{part}.{side}")]
        files[side] = out / f"pairs.{side}"
        files[side].write_text("".join(lines), encoding="utf-8")
    began, links = time.perf_counter(), {"en-fr": out / "links.en-fr", "fr-en": out / "links.fr-en"}
    words = ("align", runs["en-fr"], files["e"], files["f"], "--reverse", runs["fr-en"], "--output", links["en-fr"])
    regard(*words, "--quiet")
    lines = links["en-fr"].read_text().splitlines()
    say(f"links of {len(lines):,} pairs in both directions: {time.perf_counter() - began:.1f} s with start-up")
    swapped = (" ".join("-".join(reversed(pair.split("-"))) for pair in line.split()) for line in lines)
    links["fr-en"].write_text("".join(line + "\n" for line in swapped))
    return links


def run_all(calls: list[Callable[[], None]], together: bool) -> None:
    """Make the calls, each of which waits for a process, one after the other or all together."""
    with ThreadPoolExecutor(len(calls) if together else 1) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="*", default=[], help="settings of all runs, such as training.steps=20")
    parser.add_argument("--guided", nargs="*", default=[], help="settings of the guided runs alone")
    parser.add_argument("--together", action="store_true", help="train both directions at the same time")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    plain = {direction: given.out / direction for direction in DIRECTIONS}
    guided = {direction: given.out / f"guided-{direction}" for direction in DIRECTIONS}

    def train_all(runs: dict[str, Path], settings: Callable[[str], list[str]]) -> None:
        words = [(given.folder, run, direction, settings(direction)) for direction, run in runs.items()]
        run_all([partial(train, *each) for each in words], given.together)

    train_all(plain, lambda _: given.settings)
    error_rates(given.folder, *plain.values())
    links = link(given.folder, given.out, plain)
    chosen = {direction: f"training.guided_alignment={file.resolve()}" for direction, file in links.items()}
    train_all(guided, lambda direction: [*given.settings, chosen[direction], *given.guided])
    error_rates(given.folder, *guided.values())
    scored = [(direction, run) for runs in (plain, guided) for direction, run in runs.items()]
    run_all([partial(bleu, given.folder, run, direction) for direction, run in scored], given.together)


if __name__ == "__main__":
    main()
