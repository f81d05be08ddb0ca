"""Encode raw text as the token ids a model reads: one side of sentence pairs, or plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from regard.errors import UserError
from regard.special_tokens import BOS, EOS, UNK
from regard.text.fast_tokenizer import FastTokenizer
from regard.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from regard.recipes.schema import Recipe

MASK = "<mask>"  # the tag in place of a masked token
TARGET_SHARE = 4  # in a shared context, one position in this many is reserved for the target
BEFORE_WORDS, NOWHERE = re.compile(r"(?<=\n)(?=[A-Za-z])"), re.compile(r"(?!)")
AFTER_LINES, BEFORE_LINES = re.compile(r"(?<=\n)"), re.compile(r"(?<=\S)(?=\n)")


@dataclass(frozen=True)
class ContextBudget:
    """The number of positions a model has, for each side or, in a shared context, for both together.

    Special tokens take positions too.
    """

    positions: int
    shared: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> ContextBudget:
        return cls(recipe.model.max_positions, recipe.model.shares_context)

    @property
    def source(self) -> int:
        """The maximum number of source tokens: three quarters of a shared context.

        >>> ContextBudget(64).source, ContextBudget(64, shared=True).source, ContextBudget(2, shared=True).source
        (64, 48, 1)
        """
        return self.positions - max(self.positions // TARGET_SHARE, 1) if self.shared else self.positions

    def target(self, source_tokens: int) -> int:
        """The maximum number of target tokens after `source_tokens`.

        >>> ContextBudget(64).target(40), ContextBudget(64, shared=True).target(40)
        (64, 24)
        """
        return max(self.positions - source_tokens, 1) if self.shared else self.positions


def prefix_ids(recipe: Recipe) -> tuple[int, ...]:
    """The special tokens before a model's input."""
    return (BOS,) if recipe.model.adds_bos else ()


def encode_side(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    tag: str | None,
    max_len: int | Sequence[int],
    lowercase: bool,
    prefix: Sequence[int] = (),
    masked_word: str | None = None,
) -> tuple[list[list[int]], list[bool]]:
    """Encode each text as [*prefix, tag, *tokens, EOS]; also return which texts were truncated to `max_len`.

    `max_len` is one number for all texts, or one for each. Each `masked_word` becomes the unknown token.
    """
    prefix = [*prefix, *([tokenizer.tag(tag)] if tag else [])]
    limits = [max_len] * len(texts) if isinstance(max_len, int) else max_len
    budgets = [max(limit - len(prefix) - 1, 0) for limit in limits]
    parts = [[text] if masked_word is None else split_at_word(text, masked_word) for text in texts]
    flat = iter(tokenizer.encode_batch([part.lower() if lowercase else part for one in parts for part in one]))
    tokens = [list(chain.from_iterable([*[UNK] * (n > 0), *next(flat)] for n in range(len(one)))) for one in parts]
    pairs = list(zip(tokens, budgets, strict=True))
    return [[*prefix, *ids[:budget], EOS] for ids, budget in pairs], [len(ids) > budget for ids, budget in pairs]


def split_at_word(text: str, word: str) -> list[str]:
    """The parts of a text before, between and after the occurrences of a word.

    >>> split_at_word("a small ___ cross", "___")
    ['a small', ' cross']
    """
    return re.split(rf"(?:^|\s+){re.escape(word)}(?!\S)", text)


def encode_stream(tokenizer: Tokenizer, text: str | Iterable[str]) -> list[int]:
    """Encode running text without special tokens; the result does not depend on how the text is divided into parts.

    Lines are encoded one by one, each with its line feed. A word vocabulary has no token for a line feed and uses EOS.
    For an imported model, the tokens are those of the whole text encoded at once, as in its original framework.
    """
    parts = list(stream_parts(tokenizer, [text] if isinstance(text, str) else text))
    return [token for ids in encode_lines(tokenizer, parts) for token in ids]


def stream_parts(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Divide running text into the parts that are encoded one by one, holding one of them in memory at a time.

    The parts are lines with their line feeds. GPT-2 merges consecutive white space, except for the last character if
    more text follows: a part for an imported model ends before the line feeds that follow a word, the only position
    where encoding the parts surely gives the tokens of the whole text. Newer byte-level tokenizers merge punctuation
    with the line feeds after it: there, a part begins with a letter after a line feed.
    """
    boundaries = AFTER_LINES if tokenizer.foreign is None else BEFORE_LINES
    if isinstance(tokenizer, FastTokenizer):
        boundaries = BEFORE_WORDS if tokenizer.splits_at_lines else NOWHERE
    pending = ""
    for text in texts:
        *complete, pending = boundaries.split(pending + text)
        yield from filter(None, complete)
    if pending:
        yield pending


def encode_lines(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
    """Encode the parts of a stream that `stream_parts` yields."""
    tokens = tokenizer.encode_batch(lines)
    if tokenizer.unit != "word":
        return tokens
    return [[*ids, EOS] if line.endswith("\n") else ids for ids, line in zip(tokens, lines, strict=True)]


def chunk(tokens: Sequence[int], size: int) -> list[list[int]]:
    """Split tokens into consecutive chunks of at most `size`.

    >>> chunk([5, 6, 7, 8, 2], 2)
    [[5, 6], [7, 8], [2]]
    """
    if size < 1:
        raise UserError("the context has no position left beside the special tokens: raise model.max_positions")
    return [list(tokens[start : start + size]) for start in range(0, len(tokens), size)]
