"""Word alignments: reading gold links, and the alignment error rate of Och and Ney (2003).

A link (i, j) aligns source word i with target word j. Words are separated by `split()` and counted from 0. Gold links
are sure (S) or possible (P); sure links are possible ones too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from regard.data import builtin
from regard.data.lines import read_lines
from regard.data.pharaoh import Link
from regard.errors import UserError

MAX_OUT_OF_RANGE = 0.1  # share of links; with more, the files do not belong together

_PHARAOH = re.compile(r"(\d+)([-?p])(\d+)(?:[-:/]?([sp?]))?", re.IGNORECASE | re.ASCII)
_NAACL = re.compile(r"(\d+)\s+(\d+)\s+(\d+)(?:\s+([SP]))?(?:\s+[\d.]+)?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Gold:
    """The manually annotated links of one sentence pair."""

    sure: frozenset[Link] = frozenset()
    possible: frozenset[Link] = frozenset()  # including the sure ones

    @classmethod
    def of(cls, sure: Iterable[Link], possible: Iterable[Link] = ()) -> Gold:
        """Combine sure and possible links: `Gold.of([(0, 0)], [(1, 2)])`."""
        links = frozenset(sure)
        return cls(links, links | frozenset(possible))

    def where(self, condition: Callable[[Link], bool]) -> Gold:
        """The links that satisfy a condition."""
        return Gold(frozenset(filter(condition, self.sure)), frozenset(filter(condition, self.possible)))


@dataclass(frozen=True)
class Aligned:
    """A sentence pair with its gold links."""

    source: str
    target: str
    gold: Gold


@dataclass(frozen=True)
class AlignmentScore:
    """Agreement of links A with the gold links, in percent; the counts are totals over all sentences.

    AER = 1 - (|A∩S| + |A∩P|) / (|A| + |S|), precision = |A∩P| / |A|, recall = |A∩S| / |S|; 0 / 0 counts as 1.
    """

    aer: float
    precision: float
    recall: float
    links: int  # |A|
    sure: int  # |S|

    @classmethod
    def of(cls, links: int, in_sure: int, in_possible: int, sure: int) -> AlignmentScore:
        """Compute the scores from |A|, |A∩S|, |A∩P| and |S|."""
        agreement = (in_sure + in_possible) / (links + sure) if links + sure else 1.0
        precision = in_possible / links if links else 1.0
        recall = in_sure / sure if sure else 1.0
        return cls(100 * (1 - agreement), 100 * precision, 100 * recall, links, sure)


def score_links(predicted: Sequence[Iterable[Link]], gold: Sequence[Gold]) -> AlignmentScore:
    """AER, precision and recall of the links predicted for each sentence pair.

    >>> score_links([[(0, 0), (1, 1)]], [Gold.of([(0, 0)], [(2, 1)])]).precision
    50.0
    """
    if len(predicted) != len(gold):
        raise UserError(f"links of {len(predicted)} sentences for gold links of {len(gold)}")
    links = in_sure = in_possible = sure = 0
    for sentence, reference in zip(predicted, gold, strict=True):
        a = set(sentence)
        links, sure = links + len(a), sure + len(reference.sure)
        in_sure, in_possible = in_sure + len(a & reference.sure), in_possible + len(a & reference.possible)
    return AlignmentScore.of(links, in_sure, in_possible, sure)


def built_in(corpus: str, split: str) -> list[Aligned]:
    """The pairs of a built-in corpus with the links of its grammar, all of them sure."""
    pairs = [Aligned(pair.source, pair.target, Gold.of(pair.alignment)) for pair in builtin.pairs(corpus, split)]
    if not any(pair.gold.sure for pair in pairs):
        raise UserError(f"the built-in corpus {corpus!r} has no alignments")
    return pairs


def read_aligned(
    gold: Path, source: Path, target: Path, *, swapped: bool = False, warn: Callable[[str], None] = lambda text: None
) -> list[Aligned]:
    """Read sentence pairs from two line-aligned files of words, with the links of a third (see `read_links`).

    Links to words that do not exist are dropped with a call of `warn`; too many of them are an error.
    """
    left, right = list(read_lines(source)), list(read_lines(target))
    if len(left) != len(right):
        raise UserError(f"not line-aligned: {source} has {len(left)} lines, {target} has {len(right)}")
    if not left:
        raise UserError(f"no lines: {source} is empty")
    links = read_links(gold, len(left), swapped=swapped)
    lengths = [(len(source.split()), len(target.split())) for source, target in zip(left, right, strict=True)]
    valid = [sentence.where(_within(*length)) for sentence, length in zip(links, lengths, strict=True)]
    _report_dropped(gold, links, valid, lengths, warn)
    return [Aligned(*pair) for pair in zip(left, right, valid, strict=True)]


def _within(source_words: int, target_words: int) -> Callable[[Link], bool]:
    return lambda link: link[0] < source_words and link[1] < target_words


def _report_dropped(
    path: Path, links: list[Gold], valid: list[Gold], lengths: list[tuple[int, int]], warn: Callable[[str], None]
) -> None:
    """Report how many links are out of range, and the first of them."""
    dropped = [sorted(every.possible - kept.possible) for every, kept in zip(links, valid, strict=True)]
    count, total = sum(map(len, dropped)), sum(len(sentence.possible) for sentence in links)
    if not count:
        return
    number = next(n for n, sentence in enumerate(dropped) if sentence)
    (i, j), (source_words, target_words) = dropped[number][0], lengths[number]
    where = f"sentence {number + 1} links word {i + 1} of {source_words} with word {j + 1} of {target_words}"
    what = f"{path}: {count} of {total:,} links out of range"
    if count > MAX_OUT_OF_RANGE * total:
        raise UserError(f"{what} ({where}): wrong files, or source and target swapped?")
    warn(f"{what}, dropped ({where})")


def read_links(path: Path, sentences: int | None = None, *, swapped: bool = False) -> list[Gold]:
    """Read the links of each sentence in one of the two common formats, detected by the first line with links.

    Pharaoh: one line per sentence, `0-0 1-2`, from 0; `1?2`, `1p2`, `1-2?`, `1-2-P` and `1-2:P` are only possible.
    NAACL 2003: one line per link, `sentence source target S|P`, from 1; the default is S, and word 0 means unaligned.
    `swapped`: the target position comes first. `sentences` is their number (in NAACL, the last may have no links).
    """
    numbered = ((number, line.strip()) for number, line in enumerate(read_lines(path), 1))
    first = next(((number, line) for number, line in numbered if line), None)
    if first is None:
        raise UserError(f"{path}: no links")
    if _NAACL.fullmatch(first[1]):
        links = _naacl(path, chain([first], numbered), sentences)
    else:
        links = _pharaoh(path, chain(((number, "") for number in range(1, first[0])), [first], numbered), sentences)
    return [_swap(gold) for gold in links] if swapped else links


def _swap(gold: Gold) -> Gold:
    return Gold(*(frozenset((j, i) for i, j in links) for links in (gold.sure, gold.possible)))


def swap(pairs: Iterable[Aligned]) -> list[Aligned]:
    """The same pairs in the reverse direction."""
    return [Aligned(pair.target, pair.source, _swap(pair.gold)) for pair in pairs]


def _pharaoh(path: Path, lines: Iterator[tuple[int, str]], sentences: int | None) -> list[Gold]:
    links = []
    for number, line in lines:
        sure: list[Link] = []
        possible: list[Link] = []
        for word in line.split():
            match = _PHARAOH.fullmatch(word)
            if match is None:
                raise UserError(f"{path}, line {number}: expected links such as 0-0 1-2, found {word[:40]!r}")
            i, separator, j, kind = match.groups()
            only_possible = separator != "-" or (kind or "S") in "Pp?"
            (possible if only_possible else sure).append((int(i), int(j)))
        links.append(Gold.of(sure, possible))
    if sentences is not None and len(links) != sentences:
        raise UserError(f"{path} has links of {len(links)} sentences, but there are {sentences}")
    return links


def _naacl(path: Path, lines: Iterator[tuple[int, str]], sentences: int | None) -> list[Gold]:
    sure: dict[int, list[Link]] = {}
    possible: dict[int, list[Link]] = {}
    for number, line in lines:
        if not line:
            continue
        match = _NAACL.fullmatch(line)
        if match is None:
            raise UserError(f"{path}, line {number}: expected sentence, two positions, S or P; found {line[:40]!r}")
        sentence, i, j = map(int, match.groups()[:3])
        if sentence < 1 or (sentences is not None and sentence > sentences):
            raise UserError(f"{path}, line {number}: there is no sentence {sentence}")
        kind = sure if (match[4] or "S") in "Ss" else possible
        links = kind.setdefault(sentence, [])
        if i > 0 and j > 0:  # word 0 means unaligned
            links.append((i - 1, j - 1))
    count = max([*sure, *possible]) if sentences is None else sentences
    return [Gold.of(sure.get(n, ()), possible.get(n, ())) for n in range(1, count + 1)]
