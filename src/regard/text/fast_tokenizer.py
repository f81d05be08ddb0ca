"""Tokenizers of imported models in the format of the `tokenizers` library, `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import tokenizers as library

from regard.errors import UserError
from regard.special_tokens import UNK
from regard.text.tokenizers import (
    BYTE_OF,
    UNITS,
    SentencePieceTokenizer,
    Tokenizer,
    WordPieceTokenizer,
    display,
    invalid,
)

METASPACE = SentencePieceTokenizer.space


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn the exceptions of the library into errors in one line."""
    try:
        yield
    except BaseException as error:  # the library raises plain Exception; its panics are not even that
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError | UserError):
            raise
        raise UserError(f"{what}: {str(error).partition(chr(10))[0][:200]}") from None


def load_library(text: str) -> library.Tokenizer:
    """Parse `tokenizer.json`; a damaged one is an error in one line."""
    with library_errors("the tokenizer is damaged"):
        made = library.Tokenizer.from_str(text)
    made.no_truncation()
    made.no_padding()
    return made


class FastTokenizer(Tokenizer):
    """Any tokenizer of the `tokenizers` library.

    `model` is the content of `tokenizer.json`, `words` are its ordinary tokens in the order of our ids. Special tokens
    are not parsed from text, except by `encode_with_specials`.
    """

    unit = "huggingface"

    def __init__(self, tags: Sequence[str], words: Sequence[str], model: str) -> None:
        self.words, self.model = list(words), model
        super().__init__(tags, len(self.words))
        content = json.loads(model)
        self._kind = decoder_kind(content)
        self._strips = strips_space(content)  # the space before the first word
        added = {token["content"] for token in content.get("added_tokens") or []}
        self.mask_takes_space = any(token.get("lstrip") for token in content.get("added_tokens") or [])
        self._bytes = [self._to_bytes(word, word in added) for word in self.words]

    @property
    def splits_at_lines(self) -> bool:
        """Whether a text can be encoded in parts, each of which begins with a letter after a line feed."""
        return self._kind == "bytes"

    def _to_bytes(self, word: str, literal: bool) -> bytes:
        if literal:
            return word.encode()
        if self._kind == "bytes":
            return bytes(BYTE_OF[c] for c in word) if all(c in BYTE_OF for c in word) else word.encode()
        if self._kind == "metaspace":
            return SentencePieceTokenizer.to_bytes(word)
        continues = word.startswith(WordPieceTokenizer.continuation) and self._kind == "wordpiece"
        return word.removeprefix(WordPieceTokenizer.continuation).encode() if continues else f" {word}".encode()

    @cached_property
    def _library(self) -> library.Tokenizer:
        made = load_library(self.model)
        # Special tokens are encoded as text, not as the tokens that they spell; so are tags not marked in the file.
        known = {token.content: token for token in made.get_added_tokens_decoder().values()}
        made.add_special_tokens([known[tag] for tag in self.tags if tag in known and not known[tag].special])
        made.encode_special_tokens = True
        return made

    @cached_property
    def _ids(self) -> dict[int | None, int]:
        """Our id for each of theirs."""
        return {self._library.token_to_id(word): self.first + index for index, word in enumerate(self.words)}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        ids = self._ids
        with library_errors("the tokenizer fails on a text"):
            try:
                encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
            except TypeError as error:  # raised by the library for an unpaired surrogate
                raise UserError(f"text that is not valid Unicode: {invalid(texts)}") from error
        return [[ids.get(token, UNK) for token in encoding.ids] for encoding in encodings]

    def encode_with_specials(self, text: str) -> list[int]:
        """Encode a text in which special tokens are spelled, as a chat template writes it."""
        assert self.foreign is not None
        made = load_library(self.model)
        ours = {theirs: index for index, theirs in enumerate(self.foreign.ids)}
        with library_errors("the tokenizer fails on a text"):
            return [ours.get(token, UNK) for token in made.encode(text, add_special_tokens=False).ids]

    def specials_in(self, text: str) -> list[str]:
        """The special tokens that a text spells."""
        added = json.loads(self.model).get("added_tokens") or []
        return [token["content"] for token in added if token.get("special") and token["content"] in text]

    def decode(self, ids: Sequence[int]) -> str:
        text = self.decode_continuation(ids)
        return text.removeprefix(" ") if self._strips else text

    def decode_continuation(self, ids: Sequence[int]) -> str:
        text = b"".join(self._bytes[token - self.first] for token in ids if token >= self.first)
        return text.decode("utf-8", errors="replace")

    def _token_text(self, index: int, at_start: bool) -> str:
        text = display(self._bytes[index])
        return text.removeprefix(" ") if at_start and self._strips else text

    def _line_breaks(self) -> list[int]:
        return [self.first + index for index, word in enumerate(self._bytes) if b"\n" in word or b"\r" in word]

    def _content(self) -> dict[str, Any]:
        return {"words": self.words, "model": self.model}


def decoder_kind(content: dict[str, Any]) -> str:
    """The spelling of text by tokens: "bytes" (byte-level BPE), "metaspace" (▁ is a space), "wordpiece" or "words"."""
    decoder = content.get("decoder") or {}
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    replaced = {json.dumps(part.get("pattern")) for part in parts if isinstance(part, dict)}
    if "ByteLevel" in kinds:
        return "bytes"
    if "Metaspace" in kinds or json.dumps({"String": METASPACE}) in replaced:
        return "metaspace"
    return "wordpiece" if "WordPiece" in kinds else "words"


def strips_space(content: dict[str, Any]) -> bool:
    """Whether decoding drops the space before the first word, because encoding adds one."""
    decoder = content.get("decoder") or {}
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    for part in parts:
        if part.get("type") == "Metaspace":
            return str(part.get("prepend_scheme", "always")) != "never"
        if part.get("type") == "Strip":
            return bool(part.get("start"))
    return decoder_kind(content) in ("wordpiece", "words")


UNITS[FastTokenizer.unit] = FastTokenizer
