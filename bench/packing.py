"""Measure how fast batches are packed from the token cache, on one thread.

    python -m bench.packing [--repeats 5]

A million pairs of log-normal length (mean about 27 tokens), in memory-mapped files as in a token cache, are packed into
static batches of 32,768 target tokens. The result is in target tokens per second, without padding; training must not
consume more than that.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from bench.cpu_training import pairs
from bench.machine import heading
from bench.tables import Comparison, Measured, table
from regard.benchmark import packing_speed
from regard.data.packing import Packer
from regard.data.token_store import Ragged, TokenStore

PAIRS, BUDGET = 1_000_000, 32_768


def mapped(store: TokenStore, folder: Path) -> TokenStore:
    """Return the same tokens, memory-mapped from files as in a token cache."""
    sides = []
    for name, side in (("source", store.source), ("target", store.target)):
        side.ids.tofile(folder / name)
        ids = np.memmap(folder / name, side.ids.dtype, "r")
        sides.append(Ragged(np.asarray(ids), side.offsets))
    return TokenStore(*sides, store.report)


def measure(repeats: int = 5) -> list[Comparison]:
    with tempfile.TemporaryDirectory(prefix="regard-bench-") as folder:
        store = mapped(pairs(PAIRS), Path(folder))
        packer = Packer([store], [1.0], target_budget=BUDGET, seed=1, static=True)
        speeds = [packing_speed(packer) for _ in range(repeats)]
    return [Comparison("packing from the token cache", "target tokens/s", Measured("regard", speeds), [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(heading() + "\n")
    print(table(measure(given.repeats)))


if __name__ == "__main__":
    main()
