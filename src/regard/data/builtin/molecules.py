"""Molecules from a small grammar, written as SMILES, each with a number that follows from its groups.

The number is a made-up solubility: a carbon counts -0.5, a ring of six -2.0, chlorine -0.9; a hydroxyl group (an oxygen
at an end) +1.2, an ether oxygen (between two atoms) +0.3, a carbonyl group (C=O) -0.5 + 0.8, an amine (a nitrogen at an
end) +0.7. What an oxygen counts depends on its neighbours, so that a model has to see these.
"""

from collections.abc import Iterator
from random import Random
from zlib import crc32

COUNTS = {"train": 4_000, "valid": 300, "test": 500}
SHARES = {"train": range(8), "valid": range(8, 9), "test": range(9, 10)}  # split by hash modulo 10
ENDS = {"": 0.0, "O": 1.2, "N": 0.7, "Cl": -0.9, "c1ccccc1": -2.0}  # what a chain may end with
LINKS = {"C": -0.5, "O": 0.3, "C(=O)": 0.3}  # what it may go on with
LONGEST = 7  # links of a chain
BRANCHING = 0.25  # probability that a carbon has a branch


def molecules(split: str, seed: int = 0) -> Iterator[tuple[str, float]]:
    """Endless stream of (SMILES, number) of a split. `valid` and `test` have no duplicates."""
    random, seen = Random(f"molecules {split} {seed}"), set()
    while True:
        text, value = _chain(random, random.randint(1, LONGEST))
        text, value = f"C{text}", value - 0.5
        if crc32(text.encode()) % 10 not in SHARES[split] or text in seen:
            continue
        if split != "train":
            seen.add(text)
        yield text, round(value, 3)


def _chain(random: Random, links: int) -> tuple[str, float]:
    """The SMILES of a chain and its number."""
    if not links:
        end = random.choice([*ENDS])
        return end, ENDS[end]
    link = random.choices([*LINKS], [6, 1, 1])[0]
    branch, extra = ("", 0.0)
    if link == "C" and links > 1 and random.random() < BRANCHING:
        branch, extra = _chain(random, random.randint(0, 1))
        branch = f"({branch})" if branch else ""
    rest, value = _chain(random, links - 1)
    if link == "O" and not rest:  # the oxygen is at an end: a hydroxyl group
        return link, ENDS["O"]
    return f"{link}{branch}{rest}", LINKS[link] + extra + value
