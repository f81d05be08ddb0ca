"""Read `tokenizer.json` of any kind, and the roles of its special tokens."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from regard.errors import UserError
from regard.interop.common import token
from regard.interop.hf_folder import Fields, HFFolder, short_repr
from regard.interop.vocabularies import Specials, VocabularyLayout, checked_vocabulary
from regard.text import Tokenizer
from regard.text.fast_tokenizer import FastTokenizer, library_errors, load_library

FILE = "tokenizer.json"
MAX_GROWTH = 1000  # how many times longer a normalizer may make a text; NFKC: 18 times


@dataclass(frozen=True)
class Roles:
    """Their ids of the special tokens of a decoder. `others` also end a text."""

    pad: int | None
    bos: int
    eos: int
    unk: int | None
    others: tuple[int, ...] = ()

    @property
    def specials(self) -> Specials:
        """Without roles that share a token with a later one, except BOS and EOS."""
        pad = None if self.pad in (self.bos, self.eos, self.unk) else self.pad
        return pad, self.bos, self.eos, None if self.unk in (self.bos, self.eos) else self.unk


def spelled(folder: HFFolder, role: str, vocabulary: Mapping[str, int]) -> int | None:
    """The id of the token that tokenizer_config.json gives a role, such as eos_token."""
    return vocabulary.get(folder.specials.get(role, ""))


def roles(folder: HFFolder, vocabulary: Mapping[str, int], rows: int, eos: int | None, bos: int | None) -> Roles:
    """The special tokens by config.json, generation_config.json or the tokenizer's settings, else these defaults."""
    generation = folder.json("generation_config.json")
    ends = [*_ids(folder.config, "eos_token_id", rows), *_ids(generation, "eos_token_id", rows)]
    if not ends:
        named = spelled(folder, "eos_token", vocabulary)
        ends = [found for found in (named, eos) if found is not None and found < rows][:1]
    if not ends:
        raise UserError(f"{folder.path / 'config.json'}: eos_token_id is missing, or outside the vocabulary")
    begin = token(folder, "bos_token_id", bos, rows)
    begin = spelled(folder, "bos_token", vocabulary) if begin is None else begin
    pad = token(folder, "pad_token_id", None, rows)
    unk = spelled(folder, "unk_token", vocabulary)
    others = tuple(dict.fromkeys(end for end in ends if end != ends[0]))
    return Roles(pad, ends[0] if begin is None else begin, ends[0], unk, others)


def _ids(fields: Fields, name: str, rows: int) -> list[int]:
    given: Any = fields.content.get(name)
    listed = given if isinstance(given, list) else [given]
    return [i for i in listed if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < rows]


def vocabulary_of(folder: HFFolder, rows: int) -> dict[str, int]:
    """Spelling -> id of every token in tokenizer.json, added ones included."""
    if not folder.has(FILE):
        raise UserError(f"{folder.path} has no tokenizer: {FILE} is missing")
    made = _library(folder)
    return checked_vocabulary(Fields(folder.path / FILE, made.get_vocab(with_added_tokens=True)), rows)


def _library(folder: HFFolder) -> Any:
    whole = folder.json(FILE)  # checks the text
    try:
        made = load_library(folder.text(FILE))
    except UserError as error:
        raise UserError(f"{whole.where}: {error}") from error
    if (growth := _growth(whole.content.get("normalizer"))) > MAX_GROWTH:
        raise whole.error("normalizer", f"can make a text {growth:.2g} times as long: at most {MAX_GROWTH} is allowed")
    return made


def _growth(normalizer: Any) -> float:
    """By how many times a normalizer can lengthen a text, in characters, at most."""
    if not normalizer:
        return 1.0
    if (kind := normalizer["type"]) == "Sequence":
        return math.prod(map(_growth, normalizer["normalizers"]))
    if kind == "Prepend":
        return 1.0 + len(normalizer["prepend"])
    if kind == "Replace":
        pattern, length = normalizer["pattern"], len(normalizer["content"])
        if "String" in pattern:
            return max(1.0, length / max(1, len(pattern["String"])))
        return 1.0 + length  # an expression may match the empty string between any two characters
    if kind == "Precompiled":  # SentencePiece's: a trie, then the replacements, which end in NUL
        table = base64.b64decode(normalizer["precompiled_charsmap"])
        return max(1.0, *map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
    return 18.0  # NFKC; the others lengthen less


def read_fast_tokenizer(
    folder: HFFolder,
    rows: int,
    specials: Specials,
    named: Mapping[str, int] | None = None,
    reserved: re.Pattern[str] | None = None,
) -> FastTokenizer:
    """Read tokenizer.json; special tokens without a role, and rows without a token, become tags.

    `reserved` matches the added tokens that are special even if the file does not say so.
    """
    vocabulary = vocabulary_of(folder, rows)
    whole = folder.json(FILE)
    special = set()
    for token_ in whole.items("added_tokens"):
        fields = Fields(f"{whole.where}: added_tokens", token_ if isinstance(token_, dict) else {})
        if (content := fields.text("content")) is None:
            raise whole.error("added_tokens", f"must list tokens with their content, not {short_repr(token_)}")
        if fields.boolean("special") or (reserved is not None and reserved.fullmatch(content)):
            special.add(content)
    taken = {*specials, *(named or {}).values()}
    words = [
        w for w in sorted(vocabulary, key=vocabulary.__getitem__) if w not in special and vocabulary[w] not in taken
    ]
    layout = VocabularyLayout(vocabulary, rows, specials, named or {})
    tags = layout.tags(words)
    try:
        tokenizer = FastTokenizer(list(tags), words, folder.text(FILE))
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{whole.where} is damaged: {error}") from error
    tokenizer.foreign = replace(layout.foreign(tags, words), roles=folder.specials)
    try:
        tokenizer.encode("a")
    except UserError as error:
        raise UserError(f"{whole.where}: {error}") from error
    return tokenizer


def surrounding(folder: HFFolder) -> tuple[list[int], list[int]]:
    """The ids that their tokenizer adds before and after every text."""
    made = _library(folder)
    with library_errors(f"{folder.path / FILE}: the tokenizer fails on a text"):
        plain, whole = (made.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    start = next((i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain), 0)
    before, after = whole[:start], whole[start + len(plain) :]
    adds_bos = folder.json("tokenizer_config.json").boolean("add_bos_token")
    if adds_bos is False:
        before = []
    return before, after


def reads_bos(folder: HFFolder, bos: int, tokenizer: Tokenizer) -> bool:
    """Whether their tokenizer adds BOS before every text of a decoder; other additions have no counterpart."""
    before, after = surrounding(folder)
    if before not in ([], [bos]) or after:
        raise UserError(
            f"{folder.path / FILE}: post_processor adds other tokens than BOS, which has no counterpart here"
        )
    return bool(before) or bool(folder.json("tokenizer_config.json").boolean("add_bos_token", False))
