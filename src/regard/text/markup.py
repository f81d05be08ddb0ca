"""Tags and placeholders inside a sentence, and where they go in its translation.

The translation of an element is the run of target words that are aligned with its words: the one with the most such
words, less those that are aligned with words outside. Elements inside an element stay inside it, and neighbours do not
overlap, so well-formed markup stays well-formed with any alignment. Tags without content, and placeholders, go with the
word beside them.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

Link = tuple[int, int]  # (source word, target word)
WORDS = re.compile(r"\S+")
PLACEHOLDER = re.compile(r"\{\{[^{}\s]+\}\}|\$?\{\w[\w.]*\}|%\(\w+\)[sdif]|%[sdif](?!\w)|\{\}")


@dataclass(eq=False)
class Span:
    """An element that covers characters [start, end) of a text; or, without `closing`, something at one position."""

    opening: str
    closing: str
    start: int
    end: int
    parent: Span | None = None
    spaced: bool = False  # whether it is a word of its own, whose space is not in the text

    def moved(self, offset: int, parents: dict[int, Span]) -> Span:
        """A copy for a text that begins `offset` characters later; `parents` are the copies made so far."""
        parent = None if self.parent is None else parents.get(id(self.parent))
        parents[id(self)] = copy = replace(self, start=self.start - offset, end=self.end - offset, parent=parent)
        return copy


@dataclass(frozen=True)
class MarkedText:
    """A text without its tags, and the tags, each after the one that contains it."""

    text: str
    spans: tuple[Span, ...] = ()


def find_placeholders(text: str) -> MarkedText:
    """Take placeholders such as {name}, {{name}}, %s or %(name)s out of a text."""
    spans: list[Span] = []
    kept, end = "", 0
    for match in PLACEHOLDER.finditer(text):
        kept += text[end : match.start()]
        end = match.end()
        before, after = kept[-1:] == " ", text[end : end + 1] == " "  # other white space stays where it is
        spaced = (before or not kept) and (after or end == len(text))
        if spaced and after:  # one of the spaces goes with it
            end += 1
        elif spaced and before:
            kept = kept[:-1]
        spans.append(Span(match[0], "", len(kept), len(kept), spaced=spaced))
    return MarkedText(kept + text[end:], tuple(spans))


@dataclass
class _Word:
    """A target word, and what is put around it and, inside its punctuation, around its core."""

    space: str
    text: str
    before: list[str] = field(default_factory=list)
    before_core: list[str] = field(default_factory=list)
    after_core: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    def render(self, escape: Callable[[str], str]) -> str:
        first, last = core(self.text)
        lead, middle, trail = (escape(part) for part in (self.text[:first], self.text[first:last], self.text[last:]))
        inside = [lead, *self.before_core, middle, *self.after_core, trail]
        return "".join([escape(self.space), *self.before, *inside, *self.after])


@dataclass(frozen=True)
class _Place:
    """Target words [first, last), and whether the punctuation before the first and after the last is outside."""

    first: int
    last: int
    left_core: bool = False
    right_core: bool = False


def core(word: str) -> tuple[int, int]:
    """The positions where the letters and digits of a word begin and end; all of it, if it has none.

    >>> core("«gato»,"), core("...")
    ((1, 5), (0, 3))
    """
    inner = re.search(r"\w(?:.*\w)?", word)
    return inner.span() if inner is not None else (0, len(word))


def transfer(source: MarkedText, target: str, links: Iterable[Link], escape: bool = True) -> str:
    """Put the tags of a source into its translation; `links` align words, which white space separates.

    >>> bold = MarkedText("a black cat", (Span("<b>", "</b>", 2, 7),))
    >>> transfer(bold, "un gato negro", [(0, 0), (1, 2), (2, 1)])
    'un gato <b>negro</b>'
    """
    found = list(WORDS.finditer(target))
    edges = [0, *(match.end() for match in found)]
    words = [_Word(target[edge : m.start()], m[0]) for edge, m in zip(edges, found, strict=False)]
    quote = _escape if escape else str
    if not words:
        return "".join(span.opening + span.closing for span in source.spans) + quote(target)
    placer = _Placer(source, words, links)
    placer.place(None, _Place(0, len(words)))
    return "".join(word.render(quote) for word in words) + quote(target[edges[-1] :])


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


class _Placer:
    """Places the tags of one sentence."""

    def __init__(self, source: MarkedText, words: list[_Word], links: Iterable[Link]) -> None:
        self.text, self.words = source.text, words
        self.source = [match.span() for match in WORDS.finditer(source.text)]
        self.targets: dict[int, set[int]] = {}  # target words linked with each source word
        self.sources: dict[int, set[int]] = {}  # source words linked with each target word
        for i, j in links:
            if 0 <= i < len(self.source) and 0 <= j < len(words):
                self.targets.setdefault(i, set()).add(j)
                self.sources.setdefault(j, set()).add(i)
        self.children: dict[int | None, list[Span]] = {}
        for span in source.spans:
            self.children.setdefault(None if span.parent is None else id(span.parent), []).append(span)

    def covered(self, span: Span) -> list[int]:
        """The source words that an element contains, also in part."""
        return [i for i, (start, end) in enumerate(self.source) if start < span.end and end > span.start]

    def place(self, parent: Span | None, within: _Place) -> None:
        """Place the elements and tags inside `parent`, whose words are `within`."""
        free = set(range(within.first, within.last))
        children = self.children.get(None if parent is None else id(parent), [])
        elements = [span for span in children if span.closing]
        for span in sorted(elements, key=lambda span: -len(self.covered(span))):
            found = self._best_run(self.covered(span), within, free)
            if found is None:
                self._insert(span, within, span.opening + self._inside(span) + span.closing)
                continue
            free -= set(range(*found))
            place = self._edges(span, found, within)
            first, last = self.words[place.first], self.words[place.last - 1]
            (first.before_core if place.left_core else first.before).append(span.opening)
            self.place(span, place)
            (last.after_core if place.right_core else last.after).append(span.closing)
        for span in children:
            if not span.closing:
                self._insert(span, within, span.opening)

    def _inside(self, span: Span) -> str:
        """The tags inside an element that has no words in the translation."""
        inner = self.children.get(id(span), [])
        return "".join(child.opening + self._inside(child) + child.closing for child in inner)

    def _best_run(self, covered: Sequence[int], within: _Place, free: set[int]) -> tuple[int, int] | None:
        """The run of free words with the most that are aligned with `covered`, less those aligned with others only."""
        wanted = {j for i in covered for j in self.targets.get(i, ())}
        best, best_score, begin, score = None, 0, within.first, 0
        for j in range(within.first, within.last):
            if j not in free or score <= 0:
                begin, score = j, 0
            if j not in free:
                continue
            score += 1 if j in wanted else -1 if self.sources.get(j) else 0
            if score > best_score:
                best, best_score = (begin, j + 1), score
        if best is None:
            return None
        while best[0] not in wanted:  # words without a counterpart at the edge stay outside
            best = best[0] + 1, best[1]
        return best

    def _edges(self, span: Span, run: tuple[int, int], within: _Place) -> _Place:
        """The place of an element; punctuation that it does not contain in the source is outside."""
        covered = self.covered(span)
        (start, first_end), (last_start, end) = self.source[covered[0]], self.source[covered[-1]]
        lead = core(self.text[start:first_end])[0]
        trail = core(self.text[last_start:end])[1]
        left = lead > 0 and span.start >= start + lead
        right = last_start + trail < end and span.end <= last_start + trail
        left |= within.left_core and run[0] == within.first
        right |= within.right_core and run[1] == within.last
        return _Place(*run, left, right)

    def _insert(self, span: Span, within: _Place, tag: str) -> None:
        """Put a tag without words next to the translation of the source word beside it."""
        before = [i for i, (_, end) in enumerate(self.source) if end <= span.start]
        inside = [i for i, (start, end) in enumerate(self.source) if start < span.start < end]
        after = [i for i, (start, _) in enumerate(self.source) if start >= span.start]
        glued_left = bool(before) and self.source[before[-1]][1] == span.start
        glued_right = bool(after) and self.source[after[0]][0] == span.start
        spaced = span.spaced or not (span.closing or glued_left or glued_right or inside)
        nearest = [(i, True) for i in inside] + [(i, True) for i in before[-1:] if glued_left and not span.spaced]
        nearest += [(i, False) for i in after[:1]] + [(i, True) for i in before[-1:]]
        inner = range(within.first, within.last)
        for i, is_before in nearest:
            linked = [j for j in self.targets.get(i, ()) if j in inner]
            if linked:
                self._put(max(linked) if is_before else min(linked), is_before, within, tag, spaced)
                return
        share = len(before) / max(len(self.source), 1)
        gap = within.first + round(share * len(inner))
        self._put(max(gap - 1, within.first), gap > within.first, within, tag, spaced)

    def _put(self, word: int, after: bool, within: _Place, tag: str, spaced: bool) -> None:
        target = self.words[word]
        if after:
            edge = within.right_core and word == within.last - 1
            (target.after_core if edge else target.after).append(" " + tag if spaced else tag)
        else:
            edge = within.left_core and word == within.first
            (target.before_core if edge else target.before).append(tag + " " if spaced else tag)
