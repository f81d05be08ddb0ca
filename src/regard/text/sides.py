"""One side of sentence pairs, from raw text to the tokens a model sees."""

from __future__ import annotations

from collections.abc import Sequence

from regard.text.tokenizers import END, Tokenizer


def encode_side(
    tokenizer: Tokenizer, texts: Sequence[str], *, tag: str | None, longest: int, lowercase: bool
) -> tuple[list[list[int]], list[bool]]:
    """The tokens of each text, tag first and end mark last; and which had to be cut to the longest."""
    front = [tokenizer.tag(tag)] if tag else []
    room = longest - len(front) - 1
    pieces = tokenizer.encode_batch([text.lower() if lowercase else text for text in texts])
    return [[*front, *p[:room], END] for p in pieces], [len(p) > room for p in pieces]
