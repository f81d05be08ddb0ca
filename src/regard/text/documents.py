"""Texts longer than a sentence: taken apart into sentences, and put together again from their translations.

    document = prepare("Good morning.  How are you?\n", language="en")
    document.sentences                       # ["Good morning.", "How are you?"]
    document.assemble(["Buenos días.", "¿Cómo estás?"])   # "Buenos días.  ¿Cómo estás?\n"

White space between sentences, paragraphs, block tags, comments, scripts and styles stay as they are. In HTML, entities
are translated as the characters they stand for.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import pairwise
from typing import Literal

from regard.cancel import check
from regard.text.markup import Link, MarkedText, Span, find_placeholders, transfer

try:
    from sentencex import segment  # type: ignore[import-untyped]
except ImportError:  # an extra
    segment = None

Format = Literal["text", "html"]
VOID = frozenset({"img", "wbr"})  # inline tags without an end tag
INLINE = frozenset(
    {"a", "abbr", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "g", "i", "img", "ins"}
    | {"kbd", "label", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u"}
    | {"var", "wbr", "x"}
)
MAX_DEPTH = 100  # maximum depth of inline tags; deeper ones stay where they are
RAW = frozenset({"script", "style", "textarea"})  # their content is not translated
NO_TAGS = (*sorted(RAW), "title")  # their content is text: what looks like a tag in it is none


@dataclass(frozen=True)
class Piece:
    """A sentence with its tags, or text that stays as it is."""

    verbatim: str = ""
    sentence: MarkedText | None = None


@dataclass(frozen=True)
class Document:
    """A text in pieces; `sentences` are what is to be translated."""

    pieces: tuple[Piece, ...]
    escape: bool

    @property
    def marked(self) -> list[MarkedText]:
        return [piece.sentence for piece in self.pieces if piece.sentence is not None]

    @property
    def sentences(self) -> list[str]:
        return [sentence.text for sentence in self.marked]

    @property
    def needs_links(self) -> list[bool]:
        """The sentences that have tags, so that their alignment is needed."""
        return [bool(sentence.spans) for sentence in self.marked]

    def assemble(self, translations: Sequence[str], links: Sequence[Iterable[Link]] | None = None) -> str:
        """Put the translations of all sentences together; `links` align the words of those with tags."""
        aligned = [()] * len(translations) if links is None else links
        results = iter(zip(translations, aligned, strict=True))
        parts = []
        for piece in self.pieces:
            check()
            if piece.sentence is None:
                parts.append(piece.verbatim)
            else:
                parts.append(transfer(piece.sentence, *next(results), escape=self.escape))
        if next(results, None) is not None:
            raise ValueError(f"{len(translations)} translations of {len(self.marked)} sentences")
        return "".join(parts)


def prepare(text: str, format: Format = "text", language: str | None = None) -> Document:
    """Take a text apart. Without a language, or without the sentence splitter, a sentence is a line."""
    if format == "text":
        lines = re.split(r"(\r\n|\r|\n)", text)
        pieces = [p for n, line in enumerate(lines) for p in ([Piece(line)] if n % 2 else _plain(line, language))]
        return Document(tuple(p for p in pieces if p.sentence or p.verbatim), escape=False)
    parser = _Parser(language)
    parser.feed(text)
    parser.close()
    parser.flush()
    return Document(tuple(p for p in parser.pieces if p.sentence or p.verbatim), escape=True)


def _plain(line: str, language: str | None) -> list[Piece]:
    marked = find_placeholders(line)
    return _pieces(marked, language, str)


def sentence_spans(text: str, language: str | None) -> list[tuple[int, int]]:
    """The positions where the sentences of a text begin and end, without the white space around them."""
    try:
        parts = [text] if segment is None or language is None else list(segment(language, text))
    except UnicodeEncodeError:  # half of a surrogate pair, which the tokenizer refuses
        parts = [text]
    if "".join(parts) != text:
        parts = [text]
    spans, start = [], 0
    for part in parts:
        stripped = part.strip()
        if stripped:
            begin = start + part.index(stripped)
            spans.append((begin, begin + len(stripped)))
        start += len(part)
    return spans


def _pieces(marked: MarkedText, language: str | None, escape: Callable[[str], str]) -> list[Piece]:
    """The sentences of a text with tags, and the white space between them."""
    text, spans = marked.text, marked.spans
    sentences = _merged(sentence_spans(text, language), spans)
    if not sentences:
        inner = sorted(spans, key=lambda span: span.start)
        return [Piece("".join(span.opening + span.closing for span in inner) + escape(text))]
    stops = [stop for _, stop in sentences]
    spans_of: list[list[Span]] = [[] for _ in sentences]
    for span in spans:
        spans_of[_sentence_of(span, stops)].append(span)
    pieces, end = [], 0
    for (start, stop), inside in zip(sentences, spans_of, strict=True):
        check()
        pieces.append(Piece(escape(text[end:start])))
        parents: dict[int, Span] = {}
        moved = tuple(span.moved(start, parents) for span in inside)
        pieces.append(Piece(sentence=MarkedText(text[start:stop], moved)))
        end = stop
    return [*pieces, Piece(escape(text[end:]))]


def _sentence_of(span: Span, stops: list[int]) -> int:
    """The number of the sentence that a tag belongs to: the first that ends behind its beginning, or the last.

    A tag without content right behind a sentence belongs to that sentence. `stops` are the ends of the sentences.
    """
    behind = (bisect_left if span.start == span.end else bisect_right)(stops, span.start)
    return min(behind, len(stops) - 1)


def _merged(sentences: list[tuple[int, int]], spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Join sentences that are partly inside an element, so that each element is inside one sentence."""
    joined: list[tuple[int, int]] = []
    for start, stop in sentences:
        if joined and any(span.start < joined[-1][1] and span.end > start for span in spans):
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


class _Parser(HTMLParser):
    """Collects text with inline tags; a block tag, or an inline tag without its start or end tag, ends it."""

    CDATA_CONTENT_ELEMENTS = NO_TAGS  # type: ignore[misc]

    def __init__(self, language: str | None) -> None:
        super().__init__(convert_charrefs=False)
        self.language = language
        self.pieces: list[Piece] = []
        self.text, self.spans, self.open = "", list[Span](), list[tuple[str, Span]]()
        self.end_tag, self.raw = "", ""

    def flush(self) -> None:
        """End the text collected so far. Elements that are still open are cut: their tags stay where they are."""
        cuts = [span for _, span in self.open]
        order = {id(span): n for n, span in enumerate(self.spans)}
        positions = [-1, *(order[id(cut)] for cut in cuts), len(self.spans)]
        starts = [0, *(span.start for span in cuts), len(self.text)]
        for number, (start, stop) in enumerate(pairwise(starts)):
            if number:
                self.pieces.append(Piece(cuts[number - 1].opening))
            first, last = positions[number], positions[number + 1]
            parents: dict[int, Span] = {}
            inside = [span.moved(start, parents) for span in self.spans[first + 1 : last]]
            self.pieces.extend(_pieces(MarkedText(self.text[start:stop], tuple(inside)), self.language, _escape))
        self.text, self.spans, self.open = "", [], []

    def verbatim(self, text: str) -> None:
        self.flush()
        self.pieces.append(Piece(text))

    def point(self, text: str) -> None:
        self.spans.append(Span(text, "", len(self.text), len(self.text), self._parent()))

    def _parent(self) -> Span | None:
        return self.open[-1][1] if self.open else None

    def handle_starttag(self, tag: str, attrs: object) -> None:
        opening = self.get_starttag_text() or ""
        if tag not in INLINE:
            self.verbatim(opening)
            self.raw = tag if tag in RAW else ""
        elif tag in VOID:
            self.point(opening)
        elif len(self.open) >= MAX_DEPTH:  # this also cuts those around it, whose end tags then stay as well
            self.verbatim(opening)
        else:
            span = Span(opening, "", len(self.text), len(self.text), self._parent())
            self.spans.append(span)
            self.open.append((tag, span))

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        opening = self.get_starttag_text() or ""
        (self.point if tag in INLINE else self.verbatim)(opening)

    def parse_endtag(self, i: int) -> int:
        self.end_tag = self.rawdata[i : self.rawdata.find(">", i) + 1]
        return super().parse_endtag(i)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1][0] != tag:
            self.verbatim(self.end_tag)
            self.raw = ""
            return
        _, span = self.open.pop()
        span.closing, span.end = self.end_tag, len(self.text)
        if not self.text[span.start :].strip():  # nothing to translate inside: it moves as a whole
            position = self.spans.index(span)
            inner = "".join(child.opening for child in self.spans[position + 1 :])
            span.opening, span.closing = span.opening + inner + _escape(self.text[span.start :]) + span.closing, ""
            self.text, span.end = self.text[: span.start], span.start
            del self.spans[position + 1 :]

    def handle_data(self, data: str) -> None:
        if self.raw:
            self.pieces.append(Piece(data))
            return
        if self.cdata_elem is not None:  # a title, whose entities the library leaves as they are
            data = html.unescape(data)
        marked = find_placeholders(data)
        for span in marked.spans:
            start = len(self.text) + span.start
            self.spans.append(Span(_escape(span.opening), "", start, start, self._parent(), span.spaced))
        self.text += marked.text

    def handle_entityref(self, name: str) -> None:
        self._character(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self._character(f"&#{name};")

    def _character(self, reference: str) -> None:
        character = html.unescape(reference)
        if self.raw:
            self.pieces.append(Piece(reference))
        elif character == reference:  # unknown
            self.point(reference)
        else:
            self.text += character

    def handle_comment(self, data: str) -> None:
        self.point(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self.verbatim(f"<!{decl}>")

    def handle_pi(self, data: str) -> None:
        self.verbatim(f"<?{data}>")

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """Leave `<![...]>` as it is; the library fails on those it does not know."""
        closing = "]]>" if self.rawdata.startswith("<![CDATA[", i) else ">"
        end = self.rawdata.find(closing, i)
        stop = len(self.rawdata) if end < 0 else end + len(closing)
        self.verbatim(self.rawdata[i:stop])
        return stop


def _escape(text: str) -> str:
    return html.escape(text, quote=False)
