"""Run all CPU benchmarks and print one table: regard, the other libraries, and the ratio to the best of them.

    make bench                                   # creates the environment, then
    python -m bench.cpu [--quick] [--threads 2] [--out FILE.json]

Figures are medians of repeats in which all systems take turns; each ratio is followed by half the spread of the
repeats' ratios. A ratio above 1 means that regard is faster. --quick uses fewer repeats and only the small model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench import cpu_decoding, cpu_training, packing, startup
from bench.machine import about, heading
from bench.tables import Comparison, table


def parts(quick: bool, threads: int) -> dict[str, Callable[[], list[Comparison]]]:
    """Return the benchmarks by name, in the order of the table."""
    repeats = 2 if quick else 5
    sizes = cpu_decoding.SIZES[:1] if quick else cpu_decoding.SIZES
    return {
        "training": lambda: cpu_training.measure(repeats, threads),
        "decoding": lambda: cpu_decoding.measure(repeats if quick else 3, threads, sizes),
        "packing": lambda: packing.measure(repeats),
        "start-up": lambda: startup.measure(repeats, threads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, only the small model")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", nargs="+", metavar="PART", help="training, decoding, packing, start-up")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    given = parser.parse_args()
    chosen = parts(given.quick, given.threads)
    if unknown := set(given.only or chosen) - set(chosen):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(chosen)}")
    print(heading(given.threads) + "\n", flush=True)
    lines: list[Comparison] = []
    for name in given.only or chosen:
        begin = time.perf_counter()
        lines += chosen[name]()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    print(table(lines))
    if given.out:
        facts = {"about": about(given.threads), "lines": [asdict(line) for line in lines]}
        given.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
