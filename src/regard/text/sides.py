"""From raw text to the tokens a model sees: one side of sentence pairs, or plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from regard.text.tokenizers import BEGIN, END, Tokenizer

if TYPE_CHECKING:
    from regard.recipes.schema import Recipe

MASK = "<mask>"  # the tag that stands where BERT has to guess


def front_of(recipe: Recipe) -> tuple[int, ...]:
    """The marks in front of what a recipe's model reads: BERT gathers what a text is about at a begin mark."""
    return (BEGIN,) if recipe.model.family == "bert" else ()


def encode_side(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    tag: str | None,
    longest: int,
    lowercase: bool,
    front: Sequence[int] = (),
) -> tuple[list[list[int]], list[bool]]:
    """The tokens of each text, `front` and tag first and end mark last; and which had to be cut to the longest."""
    head = [*front, *([tokenizer.tag(tag)] if tag else [])]
    room = longest - len(head) - 1
    pieces = tokenizer.encode_batch([text.lower() if lowercase else text for text in texts])
    return [[*head, *p[:room], END] for p in pieces], [len(p) > room for p in pieces]


def encode_stream(tokenizer: Tokenizer, text: str | Iterable[str]) -> list[int]:
    """The tokens of running text without marks, the same whether it comes whole or in parts.

    Lines are encoded one by one, each with its line feed. Words cannot spell one: the end mark stands for it. An
    imported model gets its text whole, as it did where it was made.
    """
    whole = text if isinstance(text, str) else "".join(text)
    if tokenizer.foreign is not None:
        return tokenizer.encode(whole)
    lines = re.findall(r"[^\n]*\n|[^\n]+", whole)
    return [token for ids in encode_lines(tokenizer, lines) for token in ids]


def encode_lines(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
    """The tokens of each line of a stream; lines hold their line feeds."""
    tokens = tokenizer.encode_batch(lines)
    if tokenizer.unit != "word":
        return tokens
    return [[*ids, END] if line.endswith("\n") else ids for ids, line in zip(tokens, lines, strict=True)]


def cut(tokens: Sequence[int], longest: int) -> list[list[int]]:
    """Pieces of at most `longest` tokens which, end to end, are the tokens again.

    >>> cut([5, 6, 7, 8, 2], 2)
    [[5, 6], [7, 8], [2]]
    """
    return [list(tokens[at : at + longest]) for at in range(0, len(tokens), longest)]
