"""Tokenizers: from text to token ids and back.

Ids have the same order for every unit: the four special tokens, the tags (such as `<2de>`), then the ordinary tokens.
Special tokens and tags have no spelling: `</s>` or `<2de>` in a text is ordinary text, so that user input can neither
steer nor stop a model.

`bpe` and `char` are lossless, `decode(encode(text)) == text`, because all 256 bytes are in their vocabularies. `word`
is not: white space becomes single spaces, and unknown words are lost. `wordpiece` and `sentencepiece` come with
imported models; they are read and written, not trained.
"""

from __future__ import annotations

import base64
import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import tokenizers as library

from regard.errors import UserError, first_line
from regard.files import parse_json
from regard.special_tokens import BOS, PAD, SPECIAL_TOKENS, UNK

VERSION = 1  # version of the JSON layout
LANGUAGE_CODE = re.compile(r">>\S+?<<")  # how multilingual Marian models name the target language before a text

# The library uses threads and warns on standard error when a process that used them forks, unless this variable is set.
# A forked child does not inherit the threads and must not use them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


@dataclass(frozen=True)
class ForeignVocabulary:
    """The original vocabulary of an imported model.

    `ids` maps each of our ids to the original id, -1 if there is none; two of our ids may map to the same one.
    `spellings` are the original spellings of the special tokens and the tags; `roles` are the special tokens that the
    original names, such as {"eos_token": "</s>"}, for chat templates.
    """

    ids: list[int]
    spellings: list[str | None]
    roles: dict[str, str] = field(default_factory=dict)


class Tokenizer(ABC):
    """A vocabulary with encoding and decoding.

    >>> tokenizer = train(["a cat", "a cat"], "char", 300)
    >>> tokenizer.decode(tokenizer.encode("a tac"))
    'a tac'
    """

    unit: ClassVar[str]
    foreign: ForeignVocabulary | None = None  # set for an imported model
    mask_takes_space: bool = False  # whether the space before a mask belongs to it, as it does to a word

    def __init__(self, tags: Sequence[str], count: int) -> None:
        """`count` is the number of ordinary tokens, which follow the special tokens and the tags."""
        self.tags = tuple(tags)
        self.first = len(SPECIAL_TOKENS) + len(self.tags)  # id of the first ordinary token
        self._size = self.first + count

    def __len__(self) -> int:
        """The size of the vocabulary, including special tokens and tags."""
        return self._size

    def __repr__(self) -> str:
        return f"<{self.unit} tokenizer, {len(self)} tokens>"

    def target_side(self) -> Tokenizer:
        """The tokenizer of the target side if both share a vocabulary; usually this one."""
        return self

    def with_tags(self, tags: Sequence[str]) -> Tokenizer:
        """Return a tokenizer with additional tags; the ids of ordinary tokens rise by their number."""
        content = json.loads(self.to_json())
        content["tags"] += tags
        if self.foreign is not None:
            content["foreign"]["ids"][self.first : self.first] = [-1] * len(tags)
            content["foreign"]["spellings"] += [None] * len(tags)
        return Tokenizer.from_json(json.dumps(content))

    def tag(self, name: str) -> int:
        """The id of a tag."""
        if name not in self.tags:
            known = ", ".join(self.tags) or "none"
            raise UserError(f"the tokenizer has no tag {name!r} (known: {known})")
        return len(SPECIAL_TOKENS) + self.tags.index(name)

    def encode(self, text: str) -> list[int]:
        """Encode a text, without special tokens."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode several texts; the same as `encode` for each, but faster."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; special tokens and tags are skipped."""

    def decode_continuation(self, ids: Sequence[int]) -> str:
        """Decode ids that continue a text: the space before the first word stays, where tokens hold it."""
        return self.decode(ids)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, for display.

        Concatenated, they are the decoded text, except that a token with only part of a character's bytes shows them
        (`⟨e2⟩`; `join_tokens` restores such characters), and that special tokens and tags show their names.
        """
        names = SPECIAL_TOKENS + self.tags
        at_start = True  # the first word has no space before it
        texts = []
        for token in ids:
            texts.append(names[token] if token < self.first else self._token_text(token - self.first, at_start))
            at_start = at_start and token < self.first
        return texts

    @abstractmethod
    def _token_text(self, index: int, at_start: bool) -> str:
        """The text of ordinary token `index` for display; `at_start` if it is the first of its text."""

    def forbidden(self) -> list[int]:
        """Ids that are never generated: special tokens except EOS, tags, and tokens that contain a line break."""
        return [PAD, BOS, UNK, *range(len(SPECIAL_TOKENS), self.first), *self._line_breaks()]

    @abstractmethod
    def _line_breaks(self) -> list[int]:
        """Ids of the tokens that contain a line feed or a carriage return."""

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """The remaining constructor arguments beside the tags, as plain JSON values."""

    def to_json(self) -> str:
        """Serialize the tokenizer as JSON."""
        head = {"format": "regard tokenizer", "version": VERSION, "unit": self.unit, "tags": list(self.tags)}
        origin = {} if self.foreign is None else {"foreign": asdict(self.foreign)}
        return json.dumps(head | self._content() | origin, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Load a tokenizer that `to_json` wrote."""
        try:
            content = parse_json(text)
            kind, version = content.pop("format"), content.pop("version")
            if (kind, version) != ("regard tokenizer", VERSION):
                raise UserError(f"not a tokenizer this version can read: format {kind!r}, version {version!r}")
            foreign = content.pop("foreign", None)
            unit = content.pop("unit")
            _check_types(content)
            tokenizer: Tokenizer = UNITS[unit](**content)
            if foreign is not None:
                if not all(isinstance(theirs, int) for theirs in foreign["ids"]):
                    raise ValueError("foreign ids are not integers")
                tokenizer.foreign = ForeignVocabulary(**foreign)
                if len(tokenizer.foreign.ids) != len(tokenizer):
                    raise ValueError(f"{len(tokenizer.foreign.ids)} foreign ids for {len(tokenizer)} tokens")
            return tokenizer
        except UserError:
            raise
        except Exception as error:  # the library raises plain Exception, for example for an unknown merge
            raise UserError(f"not a tokenizer file, or a damaged one: {first_line(error)}") from error


def _check_types(content: dict[str, Any]) -> None:
    """Raise an error for values of other types than `to_json` writes."""
    for key, value in content.items():
        lists = key in ("tags", "merges", "words")
        if lists and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
            raise ValueError(f"{key} is not a list of strings")
        if key in ("characters", "model", "target_model") and not isinstance(value, str | None):
            raise ValueError(f"{key} is not a string")


class _ByteLevelTokenizer(Tokenizer):
    """A tokenizer whose tokens are byte strings; the first 256 are the single bytes, in order."""

    def __init__(self, tags: Sequence[str], longer_tokens: Iterable[bytes]) -> None:
        self._bytes = [bytes([value]) for value in range(256)]
        self._bytes.extend(longer_tokens)
        super().__init__(tags, len(self._bytes))

    def decode(self, ids: Sequence[int]) -> str:
        text = b"".join(self._bytes[token - self.first] for token in ids if token >= self.first)
        return text.decode("utf-8", errors="replace")

    def _token_text(self, index: int, at_start: bool) -> str:
        return display(self._bytes[index])

    def _line_breaks(self) -> list[int]:
        return [self.first + index for index, token in enumerate(self._bytes) if b"\n" in token or b"\r" in token]


class BytePairTokenizer(_ByteLevelTokenizer):
    """Byte-level BPE: bytes, merged pair by pair in the order of `merges`.

    The merges determine the vocabulary, so only they are stored. They are written in GPT-2's spelling, one printable
    character other than a space for each byte: "Ġt he" merges " t" with "he".
    """

    unit = "bpe"
    mask_takes_space = True

    def __init__(self, tags: Sequence[str], merges: Sequence[str]) -> None:
        self.merges = list(merges)
        spellings = bpe_vocabulary(self.merges)
        super().__init__(tags, (bytes(BYTE_OF[character] for character in token) for token in spellings[256:]))
        # The library has no special tokens, and a vocabulary whose ids start at `first`: its ids are ours.
        vocabulary = {spelling: self.first + index for index, spelling in enumerate(spellings)}
        self._library = _byte_level(library.models.BPE(vocab=vocabulary, merges=[_pair(merge) for merge in merges]))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        try:
            return [encoding.ids for encoding in self._library.encode_batch_fast(texts)]
        except TypeError as error:  # raised by the library for an unpaired surrogate
            raise UserError(f"text that is not valid Unicode: {invalid(texts)}") from error

    def _content(self) -> dict[str, Any]:
        return {"merges": self.merges}


class CharacterTokenizer(_ByteLevelTokenizer):
    """Characters: ASCII and `characters` have a token each; other characters are encoded as their UTF-8 bytes."""

    unit = "char"

    def __init__(self, tags: Sequence[str], characters: str) -> None:
        self.characters = characters
        super().__init__(tags, (character.encode() for character in characters))
        self._ids = {chr(value): [self.first + value] for value in range(128)}
        self._ids |= {character: [self.first + 256 + index] for index, character in enumerate(characters)}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        try:
            return [[token for character in text for token in self._character(character)] for text in texts]
        except UnicodeEncodeError as error:
            raise UserError(f"text that is not valid Unicode: {invalid(texts)}") from error

    def _character(self, character: str) -> list[int]:
        return self._ids.get(character) or [self.first + value for value in character.encode()]

    def _content(self) -> dict[str, Any]:
        return {"characters": self.characters}


class WordTokenizer(Tokenizer):
    """Words between white space. Lossy: unknown words become UNK, and decoding puts single spaces between words."""

    unit = "word"

    def __init__(self, tags: Sequence[str], words: Sequence[str]) -> None:
        self.words = list(words)
        super().__init__(tags, len(self.words))
        self._ids = {word: self.first + index for index, word in enumerate(self.words)}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"text that is not valid Unicode: {invalid(texts)}") from error
        return [[self._ids.get(word, UNK) for word in text.split()] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[token - self.first] for token in ids if token >= self.first)

    def _token_text(self, index: int, at_start: bool) -> str:
        return self.words[index] if at_start else " " + self.words[index]

    def _line_breaks(self) -> list[int]:
        return []  # words contain no white space

    def _content(self) -> dict[str, Any]:
        return {"words": self.words}


class WordPieceTokenizer(Tokenizer):
    """BERT's WordPiece: words split greedily into the longest known subwords; ## marks those inside a word.

    Lossy: text is cleaned, optionally lower-cased and stripped of accents; white space becomes single spaces; a word
    that cannot be split into known subwords becomes UNK.
    """

    unit = "wordpiece"
    continuation = "##"
    _unknown = "[UNK]"  # the library's name; no text is parsed as it, because brackets are split from words

    def __init__(
        self, tags: Sequence[str], words: Sequence[str], lowercase: bool, strip_accents: bool | None, chinese: bool
    ) -> None:
        self.words = list(words)
        self.lowercase, self.strip_accents, self.chinese = lowercase, strip_accents, chinese
        super().__init__(tags, len(self.words))
        vocabulary = {word: self.first + index for index, word in enumerate(self.words)} | {self._unknown: UNK}
        self._library = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token=self._unknown))
        self._library.normalizer = library.normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase
        )
        self._library.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        try:
            return [encoding.ids for encoding in self._library.encode_batch_fast(texts)]
        except TypeError as error:  # raised by the library for an unpaired surrogate
            raise UserError(f"text that is not valid Unicode: {invalid(texts)}") from error

    def decode(self, ids: Sequence[int]) -> str:
        indices = [token - self.first for token in ids if token >= self.first]
        return "".join(self._token_text(index, number == 0) for number, index in enumerate(indices))

    def _token_text(self, index: int, at_start: bool) -> str:
        word = self.words[index]
        if at_start:
            return word
        return word.removeprefix(self.continuation) if word.startswith(self.continuation) else " " + word

    def _line_breaks(self) -> list[int]:
        return [self.first + index for index, word in enumerate(self.words) if "\n" in word or "\r" in word]

    def _content(self) -> dict[str, Any]:
        settings = {"lowercase": self.lowercase, "strip_accents": self.strip_accents, "chinese": self.chinese}
        return {"words": self.words, **settings}


class SentencePieceTokenizer(Tokenizer):
    """Subwords of a SentencePiece model; those that are not in `words` become UNK.

    `model` is the SentencePiece file in base 64; `target_model` is another one for the target side, if one vocabulary
    serves two languages with different models. `▁` starts a word; tokens such as <0x0A> are single bytes. Lossy: the
    model normalizes its input. A language code at the start of a text is its tag, as Marian expects it.
    """

    unit = "sentencepiece"
    space = "▁"

    def __init__(self, tags: Sequence[str], words: Sequence[str], model: str, target_model: str | None = None) -> None:
        self.words, self.model, self.target_model = list(words), model, target_model
        super().__init__(tags, len(self.words))
        self._ids = {word: self.first + index for index, word in enumerate(self.words)}
        self._bytes = [self.to_bytes(word) for word in self.words]

    @classmethod
    def to_bytes(cls, word: str) -> bytes:
        """The text of a subword: `▁` is a space, and <0x0A> a byte."""
        byte = re.fullmatch("<0x([0-9A-F]{2})>", word)
        return bytes.fromhex(byte[1]) if byte else word.replace(cls.space, " ").encode()

    @cached_property
    def _library(self) -> Any:
        try:
            import sentencepiece
        except ImportError:
            raise UserError("this model's tokenizer needs sentencepiece: pip install 'regard[formats]'") from None
        try:
            model = base64.b64decode(self.model, validate=True) or b"?"  # the library treats b"" as no model
            return sentencepiece.SentencePieceProcessor(model_proto=model)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"the tokenizer's SentencePiece model is damaged: {first_line(error)}") from error

    def target_side(self) -> Tokenizer:
        if self.target_model is None:
            return self
        other = SentencePieceTokenizer(self.tags, self.words, self.target_model)
        other.foreign = self.foreign
        return other

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        codes = [self._language_code(text) for text in texts]
        try:
            split = self._library.encode([t[len(c) :] for t, c in zip(texts, codes, strict=True)], out_type=str)
        except (UnicodeEncodeError, TypeError) as error:
            raise UserError(f"text that is not valid Unicode: {invalid(texts)}") from error
        tags = [[self.tag(code)] if code else [] for code in codes]
        return [[*tag, *(self._ids.get(word, UNK) for word in words)] for tag, words in zip(tags, split, strict=True)]

    def _language_code(self, text: str) -> str:
        """The tag of a target language at the start of a text, as in Marian's `>>deu<< text`; "" if there is none."""
        code = LANGUAGE_CODE.match(text)
        return code[0] if code and code[0] in self.tags else ""

    def decode(self, ids: Sequence[int]) -> str:
        text = b"".join(self._bytes[token - self.first] for token in ids if token >= self.first)
        return text.decode("utf-8", errors="replace").strip()

    def _token_text(self, index: int, at_start: bool) -> str:
        text = display(self._bytes[index])
        return text.removeprefix(" ") if at_start else text

    def _line_breaks(self) -> list[int]:
        return [self.first + index for index, word in enumerate(self._bytes) if b"\n" in word or b"\r" in word]

    def _content(self) -> dict[str, Any]:
        target = {} if self.target_model is None else {"target_model": self.target_model}
        return {"words": self.words, "model": self.model, **target}


LEARNED_UNITS = (BytePairTokenizer, CharacterTokenizer, WordTokenizer)
UNITS: dict[str, Any] = {kind.unit: kind for kind in (*LEARNED_UNITS, WordPieceTokenizer, SentencePieceTokenizer)}

_STRAY = re.compile("⟨([89a-f][0-9a-f])⟩".encode())  # how an incomplete character's byte is displayed


def display(text: bytes) -> str:
    """Decode bytes for display; bytes that are not valid UTF-8 are shown in hexadecimal."""
    decoded = text.decode("utf-8", errors="surrogateescape")  # stray bytes become U+DC80..U+DCFF
    return re.sub("[\udc80-\udcff]", lambda stray: f"⟨{ord(stray[0]) - 0xDC00:02x}⟩", decoded)


def join_tokens(texts: Sequence[str]) -> str:
    """Join the texts of adjacent tokens, restoring characters whose bytes they share.

    Displayed bytes are replaced within one token's text only, so a text that literally contains `⟨c3⟩` is unchanged:
    BPE separates symbols, letters and digits, so that no token contains all of it. A single token stays unchanged.

    >>> join_tokens(["na⟨c3⟩", "⟨af⟩ve", "⟨e2⟩"])
    'naïve⟨e2⟩'
    """
    if len(texts) < 2:
        return "".join(texts)
    encoded = (text.encode("utf-8", errors="surrogatepass") for text in texts)
    return display(b"".join(_STRAY.sub(lambda stray: bytes.fromhex(stray[1].decode()), text) for text in encoded))


def train(texts: Iterable[str], unit: str, size: int, tags: Sequence[str] = ()) -> Tokenizer:
    """Train a tokenizer of at most `size` tokens, including special tokens and tags; training is deterministic.

    A small corpus may give fewer tokens: BPE merges a pair only if it occurs at least twice.
    """
    trainable = [kind.unit for kind in LEARNED_UNITS]
    if unit not in trainable:
        what = "only imported models have" if unit in UNITS else "no such unit of text:"
        raise UserError(f"{what} {unit!r} (choose from {', '.join(trainable)})")
    if len(set(tags)) < len(tags) or not all(tags):
        raise UserError(f"tags must be distinct and not empty: {', '.join(map(repr, tags))}")
    reserved = len(SPECIAL_TOKENS) + len(tags)
    minimum = reserved + (1 if unit == "word" else 256)
    if size < minimum:
        raise UserError(
            f"a {unit} vocabulary needs at least {minimum} tokens ({reserved} are special tokens and tags), not {size}"
        )
    if unit == "word":
        counts = Counter(word for text in texts for word in text.split())
        return WordTokenizer(tags, _most_frequent(counts, size - reserved))
    count = size - reserved - 256
    if unit == "char":
        characters = Counter(character for text in texts for character in text if not character.isascii())
        return CharacterTokenizer(tags, "".join(_most_frequent(characters, count)))
    return BytePairTokenizer(tags, _train_merges(texts, count))


def _most_frequent(counts: Counter[str], size: int) -> list[str]:
    """The `size` most frequent texts; ties are sorted alphabetically."""
    return sorted(counts, key=lambda text: (-counts[text], text))[:size]


def _train_merges(texts: Iterable[str], count: int) -> list[str]:
    """Train at most `count` merges, each as "left right", in order of priority."""
    tokenizer = _byte_level(library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=256 + count,
        min_frequency=2,
        initial_alphabet=_BYTE_SPELLINGS,
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def _byte_level(model: library.models.BPE) -> library.Tokenizer:
    """A library tokenizer that splits text into words and spells them in bytes, without special tokens."""
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def bpe_vocabulary(merges: Sequence[str]) -> list[str]:
    """The tokens of byte-level BPE in the order of their ids, in GPT-2's spelling: bytes, then merged pairs."""
    merged = ("".join(_pair(merge)) for merge in merges)
    return [*_BYTE_SPELLINGS, *dict.fromkeys(merged)]  # two merges may produce the same token


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _byte_spellings() -> list[str]:
    """The printable character for each byte in byte-level BPE: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return [chr(value if value in printable else 256 + others.index(value)) for value in range(256)]


_BYTE_SPELLINGS = _byte_spellings()
BYTE_OF = {character: value for value, character in enumerate(_BYTE_SPELLINGS)}


def invalid(texts: Iterable[str]) -> str:
    """The start of the first text with an unpaired surrogate, in ASCII."""
    text = next((text for text in texts if re.search("[\ud800-\udfff]", text)), "")
    return ascii(text)[:60]
