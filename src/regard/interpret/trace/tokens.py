"""Tokens as a trace describes them: id, text, the word it belongs to, and the kind of token."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.interpret.explain.models import ClassVocabulary, Unit, Vocabulary, group
from regard.text import UNK
from regard.text.display import labels


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of one vocabulary; `given`: they are part of the input, not written by the model."""

    ids: Sequence[int]
    tokenizer: Vocabulary
    given: bool = False


@dataclass(frozen=True)
class TokenSide:
    """One token sequence of a forward pass, as a concatenation of spans."""

    spans: tuple[TokenSpan, ...] = ()
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", [token for span in self.spans for token in span.ids])

    def __len__(self) -> int:
        return len(self.ids)

    def ids_of(self, tokenizer: Vocabulary) -> list[int | None]:
        """The ids in this vocabulary, and None for tokens of another one."""
        return [token if span.tokenizer is tokenizer else None for span in self.spans for token in span.ids]

    @property
    def given(self) -> list[bool]:
        return [span.given for span in self.spans for _ in span.ids]

    def words(self) -> list[int]:
        """The index of the word of each token, from 0; -1 for a special token.

        A word may continue from one span to the next if both have the same tokenizer, as a prompt and its continuation.
        """
        indices: list[int] = []
        for span in _merge(self.spans):
            of_span = [-1] * len(span.ids)
            first = max(indices, default=-1) + 1
            unit: Unit = "tokens" if isinstance(span.tokenizer, ClassVocabulary) else "words"  # a class is one word
            for number, positions in enumerate(group(span.ids, span.tokenizer, unit)):
                for position in positions:
                    of_span[position] = first + number
            indices += of_span
        return indices

    @property
    def rows(self) -> None:
        """Every position is an element."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": "tokens", "elements": self.elements()}

    def elements(self) -> list[dict[str, Any]]:
        texts = [text for span in _merge(self.spans) for text in span.tokenizer.token_texts(span.ids)]
        special = [is_special(token, span.tokenizer) for span in self.spans for token in span.ids]
        named = any(isinstance(span.tokenizer, ClassVocabulary) for span in self.spans)  # names of classes or actions
        shown = texts if named else labels(texts)
        columns = zip(self.ids, texts, shown, self.words(), special, self.given, strict=True)
        return [
            {
                "id": token,
                "text": text,
                "label": label,
                "group": word,
                "special": is_special_id,
                "punctuation": not is_special_id and is_punctuation(text),
                "given": given,
            }
            for token, text, label, word, is_special_id, given in columns
        ]


def _merge(spans: Sequence[TokenSpan]) -> list[TokenSpan]:
    """Join neighbouring spans of the same tokenizer."""
    merged: list[TokenSpan] = []
    for span in spans:
        if merged and merged[-1].tokenizer is span.tokenizer:
            merged[-1] = TokenSpan([*merged[-1].ids, *span.ids], span.tokenizer)
        else:
            merged.append(span)
    return merged


def is_special(token: int, tokenizer: Vocabulary) -> bool:
    """Whether a token is BOS, EOS, a tag or a mask; decided by its id, since ordinary text may look the same."""
    return token < tokenizer.first and token != UNK


def is_punctuation(text: str) -> bool:
    """Whether a token consists of punctuation and symbols only.

    >>> is_punctuation(" ."), is_punctuation(" a.")
    (True, False)
    """
    characters = text.strip()
    return bool(characters) and all(unicodedata.category(character)[0] in "PS" for character in characters)


class TokenTexts:
    """The text of single tokens of a vocabulary, as they are written inside a text."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._cache:  # decoded after another token, so that a word keeps the space before it
            self._cache[token] = self.tokenizer.token_texts([self.tokenizer.first, token])[1]
        return self._cache[token]
