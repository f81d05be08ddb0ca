"""Glossaries: when a source term occurs, one of its translations must appear, or a word must not.

A glossary file has one entry per line: the source term, a tab, and its translation; more columns are further forms of
it, of which any may appear. A form that begins with "!" must not appear; where the source term is empty, in no
translation at all. Blank lines and lines that begin with # are skipped.

    cat<TAB>gato<TAB>gata
    bank<TAB>banco<TAB>!orilla

Terms are whole words, and white space inside them matches any white space. A source term in lower case matches in any
case; one with capitals matches as it is written. The longest of overlapping terms counts. A translation that is listed
in lower case may also begin with a capital where the source term does, or where it is the first word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from regard.data.lines import read_lines
from regard.decoding.terms import INNER, LEFT, RIGHT, Term, TokenClasses
from regard.errors import UserError
from regard.special_tokens import UNK
from regard.text import Tokenizer

AVOID = "!"  # before a form that must not appear
PART_OF_CHARACTER = re.compile(r"⟨[0-9a-f]{2}⟩")  # how `token_texts` shows single bytes
# Scripts that are written without spaces between words: a word may begin or end anywhere in them.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = rf"[^\W{UNSPACED}]"  # a character of a word between spaces


@dataclass(frozen=True)
class GlossaryEntry:
    """One line of a glossary; an empty source applies to every sentence."""

    source: str
    forms: tuple[str, ...]  # one of them must appear
    avoided: tuple[str, ...] = ()  # none of them may appear


@dataclass(frozen=True)
class Requirement:
    """A requirement on a translation: it must contain any of `forms`; or, with `avoid`, none of them."""

    source: str  # as it occurs in the sentence
    forms: tuple[str, ...]
    avoid: bool = False

    def is_met(self, text: str) -> bool:
        """Whether a translation satisfies it."""
        return any(_whole_words(form).search(text) is not None for form in self.forms) != self.avoid

    def lower(self) -> Requirement:
        """The same in lower case, for models that write nothing else."""
        return replace(self, forms=tuple(dict.fromkeys(form.lower() for form in self.forms)))

    def __str__(self) -> str:
        forms = " or ".join(map(repr, self.forms[:3])) + ("" if len(self.forms) <= 3 else " or ...")
        if self.avoid:
            return f"the translation contains {forms}"
        return f"{self.source!r} is not translated as {forms}"


class TermIndex:
    """Finds terms in sentences, in time that hardly depends on the number of terms.

    At every position where a term may begin, the lengths of the terms with this first character are tried, the longest
    first. The search continues after a term that was found.
    """

    def __init__(self, terms: Iterable[str]) -> None:
        """`terms` are single-spaced; one with capitals matches as it is written, any other in any case."""
        self._terms: dict[str, list[str]] = {}  # by their folded text
        lengths: dict[str, set[int]] = {}
        for term in sorted(terms):  # capitals first
            folded = _folded(term)
            self._terms.setdefault(folded, []).append(term)
            lengths.setdefault(folded[0], set()).add(len(folded))
        self._lengths = {first: sorted(each, reverse=True) for first, each in lengths.items()}

    def find(self, sentence: str) -> Iterator[tuple[str, int, int]]:
        """Yield each term that occurs, and where: the longest at every position, from left to right."""
        spans = [m.span() for m in re.finditer(r"\S+", sentence)]
        text = " ".join(sentence[start:stop] for start, stop in spans)  # single-spaced, as the terms are
        origin = [i for start, stop in spans for i in (*range(start, stop), stop)]  # position in `sentence`
        folded, in_word, free = _folded(text), [re.match(WORD, c) is not None for c in text] + [False], 0
        for start, first in enumerate(folded):
            if start < free or (start and in_word[start] and in_word[start - 1]):
                continue
            for length in self._lengths.get(first, ()):
                stop = start + length
                if stop <= len(text) and not (in_word[stop - 1] and in_word[stop]):
                    written = text[start:stop]
                    terms = self._terms.get(folded[start:stop], ())
                    if match := next((term for term in terms if term in (term.lower(), written)), None):
                        yield match, origin[start], origin[stop - 1] + 1
                        free = stop
                        break


def _folded(text: str) -> str:
    """Case-folded character by character, so that positions stay."""
    if text.isascii():
        return text.lower()
    return "".join(next(f for f in (c.casefold(), c.lower(), c) if len(f) == 1) for c in text)


@dataclass(frozen=True)
class Glossary:
    """Entries, and where they apply: `Glossary.of({"cat": ["gato", "gata"]}).requirements("a cat")`."""

    entries: tuple[GlossaryEntry, ...]

    @classmethod
    def of(cls, terms: Mapping[str, str | Iterable[str]] | Glossary | str | Path) -> Glossary:
        """Make a glossary from a dict of terms and their forms, or read its file."""
        if isinstance(terms, Glossary):
            return terms
        if isinstance(terms, str | Path):
            return cls.read(Path(terms))
        if not isinstance(terms, Mapping):
            raise UserError(f"a glossary is a dict of terms and translations, or a file, not {type(terms).__name__}")
        return cls(tuple(_entry(source, forms, "glossary") for source, forms in terms.items()))

    @classmethod
    def read(cls, path: Path) -> Glossary:
        """Read a file of tab-separated entries."""
        entries = []
        for number, line in enumerate(read_lines(path), 1):
            if line.strip() and not line.startswith("#"):
                source, *forms = line.split("\t")
                entries.append(_entry(source, forms, f"{path}, line {number}"))
        return cls(tuple(entries))

    def with_defaults(self, other: Glossary | None) -> Glossary:
        """This glossary, and the entries of another one for terms that it does not have."""
        if other is None:
            return self
        return Glossary((*self.entries, *(entry for entry in other.entries if entry.source not in self._by_source)))

    @cached_property
    def _index(self) -> TermIndex:
        return TermIndex(source for source in self._by_source if source)

    @cached_property
    def _by_source(self) -> dict[str, list[GlossaryEntry]]:
        entries: dict[str, list[GlossaryEntry]] = {}
        for entry in self.entries:
            entries.setdefault(entry.source, []).append(entry)
        return entries

    def requirements(self, sentence: str) -> list[Requirement]:
        """The requirements on the translation of a sentence."""
        matches = [("", False, entry) for entry in self._by_source.get("", [])]
        for source, start, stop in self._index.find(sentence):
            text, first = sentence[start:stop], not sentence[:start].strip()
            capital = source == source.lower() and (first or text[:1].isupper())
            matches += [(text, capital, entry) for entry in self._by_source[source]]
        required: dict[Requirement, None] = {}
        for text, capital, entry in matches:
            if entry.forms:
                forms = [*entry.forms, *(_capitalized(form) for form in entry.forms if capital)]
                required[Requirement(text, tuple(dict.fromkeys(forms)))] = None
            if entry.avoided:
                forms = [*entry.avoided, *map(_capitalized, entry.avoided)]
                required[Requirement(text, tuple(dict.fromkeys(forms)), avoid=True)] = None
        return list(required)


def _entry(source: str, forms: str | Iterable[str], where: str) -> GlossaryEntry:
    """Check and make one entry."""
    given = [forms] if isinstance(forms, str) else list(forms)
    if not all(isinstance(form, str) for form in (source, *given)):
        raise UserError(f"{where}: terms and translations are strings")
    cleaned = [" ".join(form.split()) for form in given]
    required = tuple(form for form in cleaned if form and not form.startswith(AVOID))
    avoided = tuple(form[1:].strip() for form in cleaned if form.startswith(AVOID) and form[1:].strip())
    source = " ".join(source.split())
    if not required and not avoided:
        raise UserError(f"{where}: the term {source!r} has no translation (expected: term, tab, translation)")
    if not source and required:
        raise UserError(f"{where}: {required[0]!r} is the translation of no term; only avoided words (!) may have none")
    return GlossaryEntry(source, required, avoided)


def _capitalized(form: str) -> str:
    return form[:1].upper() + form[1:]


@lru_cache(maxsize=4096)
def _whole_words(form: str) -> re.Pattern[str]:
    """A regular expression for a form as whole words."""
    words = r"\s+".join(map(re.escape, form.split()))
    before = f"(?<!{WORD})" if re.match(WORD, form) else ""
    after = f"(?!{WORD})" if re.match(WORD, form[-1]) else ""
    return re.compile(before + words + after)


# --- tokens ---------------------------------------------------------------------------------------------------------


def term(requirement: Requirement, tokenizer: Tokenizer) -> Term | None:
    """The token patterns of a requirement; None if the vocabulary cannot express any of its forms."""
    patterns = dict.fromkeys(pattern for form in requirement.forms for pattern in _patterns(form, tokenizer))
    return Term(tuple(patterns), requirement.avoid) if patterns else None


def _patterns(form: str, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    """The tokens of a form at the beginning of a word and after a space, with the boundaries that a word needs."""
    plain, spaced = tokenizer.encode_batch([form, " " + form])
    if UNK in plain:
        return []
    left = (LEFT,) if re.match(WORD, form) else ()
    right = (RIGHT,) if re.match(WORD, form[-1]) else ()
    if plain == spaced:  # words are tokens, or begin with a mark: no token can be mistaken for the middle of a word
        return [(*plain, *right)]
    return [(*left, *plain, *right), (INNER, *spaced, *right)]


@lru_cache(maxsize=8)
def token_classes(tokenizer: Tokenizer) -> TokenClasses:
    """The tokens at which words may begin and end, by the texts of a vocabulary."""
    first = tokenizer.first
    ids = range(first, len(tokenizer))
    texts = tokenizer.token_texts([first, *ids])[1:]  # not the beginning of a text
    special = [True] * first
    left = [text != "" and not _in_word(text, -1) for text in texts]
    right = [text != "" and not _in_word(text, 0) for text in texts]
    inner = [False] * first + [True] * len(texts)
    return TokenClasses(*(torch.tensor(member) for member in (special + left, inner, special + right)))


def _in_word(text: str, index: int) -> bool:
    """Whether the first (0) or last (-1) character of a token's text is part of a word, or of a character."""
    bytes_shown = PART_OF_CHARACTER.match(text) if index == 0 else PART_OF_CHARACTER.fullmatch(text[-4:])
    return bytes_shown is not None or re.match(WORD, text[index]) is not None
