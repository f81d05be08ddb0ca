"""From raw text to the tokens a model sees: one side of sentence pairs, or plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard.errors import UserError
from regard.special_tokens import BOS, EOS
from regard.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from regard.recipes.schema import Recipe

MASK = "<mask>"  # the tag that stands where BERT has to guess
TO_WRITE = 4  # one place in so many of a shared context is kept free of the source
AFTER_LINES, BEFORE_LINES = re.compile(r"(?<=\n)"), re.compile(r"(?<=\S)(?=\n)")


@dataclass(frozen=True)
class ContextBudget:
    """How many tokens, marks included, a model has places for: on each side or, in a shared context, together."""

    places: int
    shared: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> ContextBudget:
        return cls(recipe.model.max_positions, recipe.model.shares_context)

    @property
    def source(self) -> int:
        """The most tokens of a source that is to be followed by something: of a shared context three quarters.

        >>> ContextBudget(64).source, ContextBudget(64, shared=True).source, ContextBudget(2, shared=True).source
        (64, 48, 1)
        """
        return self.places - max(self.places // TO_WRITE, 1) if self.shared else self.places

    def target(self, source: int) -> int:
        """The most tokens of the target of a source of so many.

        >>> ContextBudget(64).target(40), ContextBudget(64, shared=True).target(40)
        (64, 24)
        """
        return max(self.places - source, 1) if self.shared else self.places


def prefix_ids(recipe: Recipe) -> tuple[int, ...]:
    """The marks in front of what a recipe's model reads: BERT gathers what a text is about at a begin mark."""
    return (BOS,) if recipe.model.family == "bert" else ()


def encode_side(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    tag: str | None,
    longest: int | Sequence[int],
    lowercase: bool,
    front: Sequence[int] = (),
) -> tuple[list[list[int]], list[bool]]:
    """The tokens of each text, `front` and tag first and end mark last; and which had to be cut to the longest.

    `longest` is the same for all texts, or a number for each.
    """
    head = [*front, *([tokenizer.tag(tag)] if tag else [])]
    most = [longest] * len(texts) if isinstance(longest, int) else longest
    rooms = [max(places - len(head) - 1, 0) for places in most]
    pieces = tokenizer.encode_batch([text.lower() if lowercase else text for text in texts])
    pairs = list(zip(pieces, rooms, strict=True))
    return [[*head, *p[:room], EOS] for p, room in pairs], [len(p) > room for p, room in pairs]


def encode_stream(tokenizer: Tokenizer, text: str | Iterable[str]) -> list[int]:
    """The tokens of running text without marks, the same whether it comes whole or in parts.

    Lines are encoded one by one, each with its line feed. Words cannot spell one: the end mark stands for it. What an
    imported model reads is cut as if it were encoded whole, as it was where the model was made.
    """
    parts = list(stream_parts(tokenizer, [text] if isinstance(text, str) else text))
    return [token for ids in encode_lines(tokenizer, parts) for token in ids]


def stream_parts(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Running text, given in any parts, in the parts that are encoded one by one; only one of them is held at a time.

    They are lines with their line feeds. GPT-2 joins blanks and line feeds that follow each other, all but the last of
    them where more text comes: a part for an imported model ends before the line feeds that follow a word, the one
    place where its tokens are surely those of the whole text.
    """
    borders = AFTER_LINES if tokenizer.foreign is None else BEFORE_LINES
    held = ""
    for text in texts:
        *whole, held = borders.split(held + text)
        yield from filter(None, whole)
    if held:
        yield held


def encode_lines(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
    """The tokens of each part of a stream, such as `stream_parts` gives; lines hold their line feeds."""
    tokens = tokenizer.encode_batch(lines)
    if tokenizer.unit != "word":
        return tokens
    return [[*ids, EOS] if line.endswith("\n") else ids for ids, line in zip(tokens, lines, strict=True)]


def chunk(tokens: Sequence[int], longest: int) -> list[list[int]]:
    """Pieces of at most `longest` tokens which, end to end, are the tokens again.

    >>> chunk([5, 6, 7, 8, 2], 2)
    [[5, 6], [7, 8], [2]]
    """
    if longest < 1:
        raise UserError("there is no place for a word between the marks: raise model.max_positions")
    return [list(tokens[at : at + longest]) for at in range(0, len(tokens), longest)]
