"""Tokens as a trace describes them: id, text, which word it is a piece of, and what kind of token it is."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.interpret.explain.models import group
from regard.text import UNK, Tokenizer
from regard.text.display import labels


@dataclass(frozen=True)
class TokenSpan:
    """Some neighbouring tokens that one tokenizer knows; `given`: they stood there before the model wrote."""

    ids: Sequence[int]
    tokenizer: Tokenizer
    given: bool = False


@dataclass(frozen=True)
class TokenSide:
    """One row of tokens, in parts."""

    parts: tuple[TokenSpan, ...] = ()
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", [token for part in self.parts for token in part.ids])

    def __len__(self) -> int:
        return len(self.ids)

    def ids_of(self, tokenizer: Tokenizer) -> list[int | None]:
        """The ids in this vocabulary; None for tokens of another one."""
        return [token if part.tokenizer is tokenizer else None for part in self.parts for token in part.ids]

    @property
    def given(self) -> list[bool]:
        return [part.given for part in self.parts for _ in part.ids]

    def words(self) -> list[int]:
        """For each token the word it is a piece of, counted from 0; -1 for a mark.

        Words go on from one part to the next where the same tokenizer cut both, as a prompt and what follows it.
        """
        found: list[int] = []
        for part in _merged(self.parts):
            owners = [-1] * len(part.ids)
            first = max(found, default=-1) + 1
            for number, places in enumerate(group(part.ids, part.tokenizer, "words")):
                for place in places:
                    owners[place] = first + number
            found += owners
        return found

    def to_json(self) -> list[dict[str, Any]]:
        pieces = [piece for part in _merged(self.parts) for piece in part.tokenizer.token_texts(part.ids)]
        marks = [is_mark(token, part.tokenizer) for part in self.parts for token in part.ids]
        rows = zip(self.ids, pieces, labels(pieces), self.words(), marks, self.given, strict=True)
        return [
            {
                "id": token,
                "piece": piece,
                "label": label,
                "word": word,
                "mark": mark,
                "punctuation": not mark and is_punctuation(piece),
                "given": given,
            }
            for token, piece, label, word, mark, given in rows
        ]


def _merged(parts: Sequence[TokenSpan]) -> list[TokenSpan]:
    """Neighbours of one tokenizer as one part."""
    merged: list[TokenSpan] = []
    for part in parts:
        if merged and merged[-1].tokenizer is part.tokenizer:
            merged[-1] = TokenSpan([*merged[-1].ids, *part.ids], part.tokenizer)
        else:
            merged.append(part)
    return merged


def is_mark(token: int, tokenizer: Tokenizer) -> bool:
    """Whether a token is a begin or end mark, a tag or a gap: known by its id, so that no text is taken for one."""
    return token < tokenizer.first and token != UNK


def is_punctuation(piece: str) -> bool:
    """Whether a piece is signs only.

    >>> is_punctuation(" ."), is_punctuation(" a.")
    (True, False)
    """
    signs = piece.strip()
    return bool(signs) and all(unicodedata.category(sign)[0] in "PS" for sign in signs)


class Spelling:
    """How single tokens of a vocabulary are written in lists, as they stand inside a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._known:  # after another token, so that a word has the blank before it
            self._known[token] = self.tokenizer.token_texts([self.tokenizer.first, token])[1]
        return self._known[token]
