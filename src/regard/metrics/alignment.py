"""Word alignments: reading gold links, and the alignment error rate of Och and Ney (2003).

A link (i, j) says that source word i and target word j stand for each other. Words are what `split()` gives, counted
from 0. Gold links are sure (S) or possible (P); what is sure is possible too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from regard.data.corpora import read_lines
from regard.errors import UserError

Link = tuple[int, int]  # (source word, target word)
STRAY = 0.1  # of all links out of range: more than a slip here and there, the files do not belong together

_PHARAOH = re.compile(r"(\d+)([-?p])(\d+)(?:[-:/]?([sp?]))?", re.IGNORECASE | re.ASCII)
_NAACL = re.compile(r"(\d+)\s+(\d+)\s+(\d+)(?:\s+([SP]))?(?:\s+[\d.]+)?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Gold:
    """The links of one sentence pair as people drew them."""

    sure: frozenset[Link] = frozenset()
    possible: frozenset[Link] = frozenset()  # the sure ones are among them

    @classmethod
    def of(cls, sure: Iterable[Link], possible: Iterable[Link] = ()) -> Gold:
        """From links of either kind: `Gold.of([(0, 0)], [(1, 2)])`."""
        kept = frozenset(sure)
        return cls(kept, kept | frozenset(possible))

    def where(self, fits: Callable[[Link], bool]) -> Gold:
        """Only the links that fit."""
        return Gold(frozenset(filter(fits, self.sure)), frozenset(filter(fits, self.possible)))


@dataclass(frozen=True)
class Aligned:
    """A sentence pair with its gold links."""

    source: str
    target: str
    gold: Gold


@dataclass(frozen=True)
class AlignmentScore:
    """How well links A agree with the gold, in percent; the counts are over all sentences.

    AER = 1 - (|A∩S| + |A∩P|) / (|A| + |S|), precision = |A∩P| / |A|, recall = |A∩S| / |S|. Where there is nothing to be
    wrong about, nothing is wrong.
    """

    aer: float
    precision: float
    recall: float
    links: int  # |A|
    sure: int  # |S|

    @classmethod
    def of(cls, links: int, in_sure: int, in_possible: int, sure: int) -> AlignmentScore:
        """From |A|, |A∩S|, |A∩P| and |S|."""
        right = (in_sure + in_possible) / (links + sure) if links + sure else 1.0
        precision = in_possible / links if links else 1.0
        recall = in_sure / sure if sure else 1.0
        return cls(100 * (1 - right), 100 * precision, 100 * recall, links, sure)


def score_links(found: Sequence[Iterable[Link]], gold: Sequence[Gold]) -> AlignmentScore:
    """AER, precision and recall of the links found in each sentence pair.

    >>> score_links([[(0, 0), (1, 1)]], [Gold.of([(0, 0)], [(2, 1)])]).precision
    50.0
    """
    if len(found) != len(gold):
        raise UserError(f"links of {len(found)} sentences for gold links of {len(gold)}")
    links = in_sure = in_possible = sure = 0
    for one, right in zip(found, gold, strict=True):
        a = set(one)
        links, sure = links + len(a), sure + len(right.sure)
        in_sure, in_possible = in_sure + len(a & right.sure), in_possible + len(a & right.possible)
    return AlignmentScore.of(links, in_sure, in_possible, sure)


def built_in(corpus: str, split: str) -> list[Aligned]:
    """A built-in corpus's pairs with the links that its grammar drew, all of them sure."""
    from regard.data.builtin import pairs

    found = [Aligned(pair.source, pair.target, Gold.of(pair.alignment)) for pair in pairs(corpus, split)]
    if not any(pair.gold.sure for pair in found):
        raise UserError(f"the built-in corpus {corpus!r} has no alignments")
    return found


def read_aligned(
    gold: Path, source: Path, target: Path, *, swapped: bool = False, warn: Callable[[str], None] = lambda text: None
) -> list[Aligned]:
    """Sentence pairs from two line-aligned files of words, with the links of a third (see `read_links`).

    A link to a word that is not there is left out, and `warn` is told; where many are, it is an error.
    """
    left, right = list(read_lines(source)), list(read_lines(target))
    if len(left) != len(right):
        raise UserError(f"not line-aligned: {source} has {len(left)} lines, {target} has {len(right)}")
    if not left:
        raise UserError(f"no lines: {source} is empty")
    links = read_links(gold, len(left), swapped=swapped)
    lengths = [(len(one.split()), len(other.split())) for one, other in zip(left, right, strict=True)]
    fitting = [links_of.where(_within(*length)) for links_of, length in zip(links, lengths, strict=True)]
    _tell_strays(gold, links, fitting, lengths, warn)
    return [Aligned(*pair) for pair in zip(left, right, fitting, strict=True)]


def _within(words: int, others: int) -> Callable[[Link], bool]:
    return lambda link: link[0] < words and link[1] < others


def _tell_strays(
    path: Path, links: list[Gold], fitting: list[Gold], lengths: list[tuple[int, int]], warn: Callable[[str], None]
) -> None:
    """Say how many links were left out, and where the first one was."""
    lost = [sorted(one.possible - kept.possible) for one, kept in zip(links, fitting, strict=True)]
    strays, total = sum(map(len, lost)), sum(len(one.possible) for one in links)
    if not strays:
        return
    at = next(n for n, some in enumerate(lost) if some)
    (i, j), (words, others) = lost[at][0], lengths[at]
    where = f"sentence {at + 1} links word {i + 1} of {words} with word {j + 1} of {others}"
    what = f"{path}: {strays} of {total:,} links out of range"
    if strays > STRAY * total:
        raise UserError(f"{what} ({where}): wrong files, or source and target positions the other way round?")
    warn(f"{what}, left out ({where})")


def read_links(path: Path, sentences: int | None = None, *, swapped: bool = False) -> list[Gold]:
    """The links of each sentence, in either of the two usual formats, which are told apart by the first line of any.

    Pharaoh: a line a sentence, `0-0 1-2`, from 0; `1?2`, `1p2`, `1-2?`, `1-2-P` and `1-2:P` are possible links only.
    NAACL 2003: a line a link, `sentence source target S|P`, from 1; sure if it does not say, and the word 0 is none.
    `swapped`: the target's position comes first. `sentences` is how many there are (NAACL may end without any).
    """
    numbered = ((number, line.strip()) for number, line in enumerate(read_lines(path), 1))
    first = next(((number, line) for number, line in numbered if line), None)
    if first is None:
        raise UserError(f"{path}: no links")
    if _NAACL.fullmatch(first[1]):
        links = _naacl(path, chain([first], numbered), sentences)
    else:
        links = _pharaoh(path, chain(((number, "") for number in range(1, first[0])), [first], numbered), sentences)
    return [Gold(_turned(one.sure), _turned(one.possible)) for one in links] if swapped else links


def _turned(links: Iterable[Link]) -> frozenset[Link]:
    return frozenset((j, i) for i, j in links)


def _pharaoh(path: Path, lines: Iterator[tuple[int, str]], sentences: int | None) -> list[Gold]:
    links = []
    for number, line in lines:
        sure: list[Link] = []
        possible: list[Link] = []
        for word in line.split():
            found = _PHARAOH.fullmatch(word)
            if found is None:
                raise UserError(f"{path}, line {number}: expected links such as 0-0 1-2, found {word[:40]!r}")
            i, sign, j, kind = found.groups()
            doubtful = sign != "-" or (kind or "S") in "Pp?"
            (possible if doubtful else sure).append((int(i), int(j)))
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
        found = _NAACL.fullmatch(line)
        if found is None:
            raise UserError(f"{path}, line {number}: expected sentence, two positions, S or P; found {line[:40]!r}")
        sentence, i, j = map(int, found.groups()[:3])
        if sentence < 1 or (sentences is not None and sentence > sentences):
            raise UserError(f"{path}, line {number}: there is no sentence {sentence}")
        kind = sure if (found[4] or "S") in "Ss" else possible
        links = kind.setdefault(sentence, [])
        if i > 0 and j > 0:  # a link with the word 0 says that a word stands for nothing
            links.append((i - 1, j - 1))
    count = max([*sure, *possible]) if sentences is None else sentences
    return [Gold.of(sure.get(n, ()), possible.get(n, ())) for n in range(1, count + 1)]
