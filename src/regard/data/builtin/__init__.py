"""Built-in corpora, generated on the fly: no download, any size, deterministic.

`en-es` is English and Spanish from a grammar; `stories` is plain text; `moods` are stories with the mood of their main
character; `molecules` and `smiles` are molecules as SMILES with a number each; `copy`, `reverse` and `sort` are
sequences of letters.

    >>> next(pairs("en-es", "test")).target
    'este gato es muy grande'
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from regard.data.builtin import en_es, symbols
from regard.data.builtin.molecules import COUNTS as MOLECULE_COUNTS
from regard.data.builtin.molecules import molecules
from regard.data.builtin.stories import MOOD_COUNTS, STORY_COUNTS, stories
from regard.errors import UserError

CORPORA = ("en-es", "stories", "moods", "molecules", "smiles", "copy", "reverse", "sort")
NO_FEATURES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence and its translation. Words are separated by `split()` and counted from 0 in links."""

    source: str
    target: str
    alignment: tuple[tuple[int, int], ...]  # (source word, target word)
    features: frozenset[str]  # a subset of en_es.FEATURES; empty for other corpora


def splits(corpus: str) -> tuple[str, ...]:
    """The names of a corpus's splits."""
    return tuple(_counts(corpus))


def pairs(corpus: str, split: str, count: int | None = None, seed: int = 0) -> Iterator[Pair]:
    """The first `count` pairs of a split (None: the split's default), the same for a seed on every machine."""
    counts = _counts(corpus)
    if split not in counts:
        raise UserError(f"corpus {corpus!r} has no split {split!r}; it has {', '.join(counts)}")
    if corpus == "en-es":
        stream = _sentences(split, seed)
    elif corpus in ("molecules", "smiles"):
        stream = (Pair(text, str(value), (), NO_FEATURES) for text, value in molecules(split, seed))
    else:
        stream = (_stories if corpus in ("stories", "moods") else _letters)(corpus, split, seed)
    return islice(stream, counts[split] if count is None else count)


def _counts(corpus: str) -> dict[str, int]:
    if corpus not in CORPORA:
        raise UserError(f"there is no built-in corpus {corpus!r}; there are {', '.join(CORPORA)}")
    named = {"en-es": en_es.COUNTS, "stories": STORY_COUNTS, "moods": MOOD_COUNTS}
    named |= {"molecules": MOLECULE_COUNTS, "smiles": MOLECULE_COUNTS}
    return named.get(corpus, symbols.COUNTS)


def _sentences(split: str, seed: int) -> Iterator[Pair]:
    for s in en_es.derivations(split, seed):
        yield Pair(" ".join(s.source), " ".join(s.target), tuple(sorted(s.links)), frozenset(s.features))


def _letters(task: str, split: str, seed: int) -> Iterator[Pair]:
    for letters, order in symbols.sequences(task, split, seed):
        alignment = tuple(sorted((i, j) for j, i in enumerate(order)))
        yield Pair(" ".join(letters), " ".join(letters[i] for i in order), alignment, NO_FEATURES)


def _stories(corpus: str, split: str, seed: int) -> Iterator[Pair]:
    for story in stories(corpus, split, seed):
        source, target = ("", story.text) if corpus == "stories" else (story.events, story.mood)
        yield Pair(source, target, (), NO_FEATURES)
