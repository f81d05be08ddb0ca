"""Three tasks on sequences of letters that are learned in seconds: copy, reverse, sort."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from zlib import crc32

SYMBOLS = "abcdefghijklmnopqrst"
SHORTEST, LONGEST = 3, 12
COUNTS = {"train": 20_000, "valid": 500, "test": 1_000}
SHARES = {"train": range(8), "valid": range(8, 9), "test": range(9, 10)}  # split by hash modulo 10

ORDERS: dict[str, Callable[[Sequence[str]], list[int]]] = {  # target position -> source position
    "copy": lambda letters: list(range(len(letters))),
    "reverse": lambda letters: list(range(len(letters)))[::-1],
    "sort": lambda letters: sorted(range(len(letters)), key=letters.__getitem__),  # stable: equal letters keep order
}


def sequences(task: str, split: str, seed: int = 0) -> Iterator[tuple[list[str], list[int]]]:
    """Endless stream of (letters, order) of a split: the target is `[letters[i] for i in order]`. Lengths are uniform.

    Each source belongs to one split; `valid` and `test` have no duplicates.
    """
    rng = Random(f"{task} {split} {seed}")
    seen = set()
    while True:
        letters = rng.choices(SYMBOLS, k=rng.randint(SHORTEST, LONGEST))
        source = " ".join(letters)
        if crc32(source.encode()) % 10 not in SHARES[split] or source in seen:
            continue
        if split != "train":
            seen.add(source)
        yield letters, ORDERS[task](letters)
