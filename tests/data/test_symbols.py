"""Copy, reverse, sort: targets follow from sources, and no source is in two splits."""

from collections import Counter

import pytest

from regard.data.builtin import pairs, splits

TASKS = {"copy": list, "reverse": lambda words: words[::-1], "sort": sorted}


@pytest.mark.parametrize("task", TASKS)
def test_the_target_follows_from_the_source(task: str) -> None:
    for pair in pairs(task, "train", 500):
        words, target = pair.source.split(), pair.target.split()
        assert target == TASKS[task](words)
        assert sorted(i for i, _ in pair.alignment) == sorted(j for _, j in pair.alignment) == list(range(len(words)))
        assert all(words[i] == target[j] for i, j in pair.alignment)
        assert pair.features == frozenset()


def test_equal_letters_keep_their_order_when_sorted() -> None:
    for pair in pairs("sort", "train", 500):
        words = pair.source.split()
        order = [i for i, _ in sorted(pair.alignment, key=lambda link: link[1])]
        assert order == sorted(range(len(words)), key=lambda i: (words[i], i))


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_and_have_their_sizes(task: str) -> None:
    assert splits(task) == ("train", "valid", "test")
    sources = {split: [pair.source for pair in pairs(task, split)] for split in splits(task)}
    assert {split: len(rows) for split, rows in sources.items()} == {"train": 20_000, "valid": 500, "test": 1_000}
    train, valid, test = (set(rows) for rows in sources.values())
    assert train.isdisjoint(valid) and train.isdisjoint(test) and valid.isdisjoint(test)
    assert len(valid) == 500 and len(test) == 1_000


def test_lengths_are_uniform_from_3_to_12() -> None:
    lengths = Counter(len(pair.source.split()) for pair in pairs("copy", "train", 10_000))
    assert set(lengths) == set(range(3, 13))
    assert all(850 < count < 1_150 for count in lengths.values())  # 1,000 each, give or take five deviations


def test_the_seed_determines_everything() -> None:
    assert list(pairs("sort", "train", 50, seed=1)) == list(pairs("sort", "train", 50, seed=1))
    assert list(pairs("sort", "train", 50, seed=1)) != list(pairs("sort", "train", 50, seed=2))
