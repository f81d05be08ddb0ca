"""Run the campaign, or a part of it, and print one table."""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path

from tests.campaign.sandbox import Tally, prepare

PARTS = {
    "kills": 100,
    "bits": 2000,
    "hostile": 300,
    "requests": 10_000,
    "service": 10_000,
    "words": 3000,
}  # with their trials
FUZZ = ("hostile", "requests", "service", "words")
PROCESSES = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "fuzz", "all"], default="all")
    parser.add_argument("--count", type=int, help="trials of each part")
    parser.add_argument("--seconds", type=float, help="instead of a count: total time of all parts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chosen = {"all": tuple(PARTS), "fuzz": FUZZ}.get(options.part, (options.part,))
    seconds = None if options.seconds is None else options.seconds * min(PROCESSES, len(chosen)) / len(chosen)
    prepare()
    with tempfile.TemporaryDirectory(prefix="regard-campaign-") as scratch:
        os.environ["REGARD_CACHE"] = f"{scratch}/cache"
        tallies = _together(chosen, options.count, seconds, options.seed, Path(scratch))
    return _report(tallies)


def _together(
    parts: tuple[str, ...], count: int | None, seconds: float | None, seed: int, scratch: Path
) -> list[Tally]:
    """Run the parts in separate processes, a few at a time."""
    waiting, running = list(parts), {}
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            part = waiting.pop(0)
            wanted = count if count is not None or seconds is not None else PARTS[part]
            child = os.fork()
            if child == 0:
                _one(part, wanted, seconds, seed, scratch)
            running[child] = part
        ended, _ = os.wait()
        print(f"{running.pop(ended)} is done", file=sys.stderr, flush=True)
    return [_tally(scratch / f"{part}.tally", part) for part in parts]


def _one(part: str, count: int | None, seconds: float | None, seed: int, scratch: Path) -> None:
    """Run a part in the child and exit."""
    began = time.monotonic()
    try:
        home = scratch / part
        home.mkdir()
        tally = importlib.import_module(f"tests.campaign.{part}").run(count, seed, seconds, home)
        tally.seconds = time.monotonic() - began
        (scratch / f"{part}.tally").write_bytes(pickle.dumps(tally))
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def _tally(file: Path, part: str) -> Tally:
    if not file.exists():
        return Tally(part, failures=[f"{part}: the campaign itself failed (see above)"])
    tally: Tally = pickle.loads(file.read_bytes())  # written by this program
    return tally


def _report(tallies: list[Tally]) -> int:
    for tally in tallies:
        for failure in tally.failures:
            print("FAILED", failure.encode("unicode_escape").decode())
    print(f"{'part':<10} {'kind':<54} {'trials':>7} {'failed':>7} {'seconds':>8}")
    for tally in tallies:
        print(f"{tally.part:<10} {'':<54} {tally.trials:>7,} {len(tally.failures):>7,} {tally.seconds:>8.0f}")
        for kind, count in sorted(tally.counts.items()):
            failed = sum(failure.startswith(f"{tally.part}: {kind}: ") for failure in tally.failures)
            print(f"{'':<10} {kind:<54} {count:>7,} {failed:>7,}")
    return 1 if any(tally.failures for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
