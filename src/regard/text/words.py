"""Words and their tokens: which tokens of a sentence belong to which of its words. Words are separated by `split()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regard.special_tokens import EOS
from regard.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class WordTokens:
    """The tokens of one side of a pair, and for each the index of its word (-1: a special token)."""

    tokens: list[int]
    words: list[int]
    count: int  # number of words, also those after a truncation
    truncated: bool

    def table(self) -> np.ndarray:
        """[words, tokens] with one where a token belongs to a word."""
        return (np.arange(self.count)[:, None] == np.array(self.words)).astype(np.float32)


def split_words(
    tokenizer: Tokenizer, texts: Sequence[str], *, tag: str | None, max_len: int, lowercase: bool
) -> list[WordTokens]:
    """Encode texts as `encode_side` does (with single spaces between words), and record the word of each token.

    No token reaches from one word into the next, so words are encoded one by one; where the space before a word is part
    of a token, it belongs to the word.
    """
    space = " " if tokenizer.unit in ("bpe", "char") else ""
    split = [(text.lower() if lowercase else text).split() for text in texts]
    encoded = iter(tokenizer.encode_batch([space * (k > 0) + word for words in split for k, word in enumerate(words)]))
    prefix = [tokenizer.tag(tag)] if tag else []
    sides = []
    for words in split:
        all_tokens = [(token, k) for k in range(len(words)) for token in next(encoded)]
        kept = all_tokens[: max_len - len(prefix) - 1]
        tokens = [*prefix, *(token for token, _ in kept), EOS]
        indices = [*(-1 for _ in prefix), *(k for _, k in kept), -1]
        sides.append(WordTokens(tokens, indices, len(words), len(kept) < len(all_tokens)))
    return sides
