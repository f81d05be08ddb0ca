"""Tokenizers: how a line of text becomes ids, and ids become text again.

Ids are laid out the same way for every unit: the four special ids, then the tags (such as `<2de>`), then the pieces.
No special id has a spelling: text that happens to contain `</s>` or `<2de>` is text like any other, so a model can
never be steered or stopped by what somebody typed.

`bpe` and `char` are lossless, `decode(encode(text)) == text`, because all 256 bytes are in their vocabularies. `word`
is not: spacing becomes single spaces, and words that were not learnt are lost. `wordpiece` and `sentencepiece` come
with imported models; they are read and written, not trained.
"""

from __future__ import annotations

import base64
import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import tokenizers as library

from regard.errors import UserError, first_line
from regard.files import parse_json
from regard.special_tokens import BOS, PAD, SPECIAL_TOKENS, UNK

VERSION = 1  # of the JSON layout

# The library runs threads and warns on standard error when a process that used them forks. Saying what we want keeps it
# quiet; a forked child has none of those threads, so it must go without.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


@dataclass(frozen=True)
class ForeignVocabulary:
    """Where the vocabulary of an imported model came from.

    `ids` holds for each of our ids theirs, -1 where they had none; two of ours may have been one of theirs. `marks` is
    how they spelt the special ids and the tags.
    """

    ids: list[int]
    marks: list[str | None]


class Tokenizer(ABC):
    """A vocabulary, and the way from text to ids and back.

    >>> tokenizer = train(["a cat", "a cat"], "char", 300)
    >>> tokenizer.decode(tokenizer.encode("a tac"))
    'a tac'
    """

    unit: ClassVar[str]
    foreign: ForeignVocabulary | None = None  # of an imported model's

    def __init__(self, tags: Sequence[str], count: int) -> None:
        """`count` is the number of pieces, which follow the special ids and the tags."""
        self.tags = tuple(tags)
        self.first = len(SPECIAL_TOKENS) + len(self.tags)  # id of the first piece
        self._size = self.first + count

    def __len__(self) -> int:
        """Size of the vocabulary, special ids and tags included."""
        return self._size

    def __repr__(self) -> str:
        return f"<{self.unit} tokenizer, {len(self)} tokens>"

    def target_side(self) -> Tokenizer:
        """The tokenizer of the target side where one vocabulary serves both: this one, unless the sides cut apart."""
        return self

    def with_tags(self, tags: Sequence[str]) -> Tokenizer:
        """This tokenizer with more tags, after those that it has; the ids of all pieces rise by their number."""
        content = json.loads(self.to_json())
        content["tags"] += tags
        if self.foreign is not None:
            content["foreign"]["ids"][self.first : self.first] = [-1] * len(tags)
            content["foreign"]["marks"] += [None] * len(tags)
        return Tokenizer.from_json(json.dumps(content))

    def tag(self, name: str) -> int:
        """The id of a tag."""
        if name not in self.tags:
            known = ", ".join(self.tags) or "none"
            raise UserError(f"the tokenizer knows no tag {name!r} (known: {known})")
        return len(SPECIAL_TOKENS) + self.tags.index(name)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without begin or end marks."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of many texts; as `encode` for each, but faster."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ids and tags are skipped."""

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, for display.

        Joined, the pieces are the decoded text, but that a token which holds part of a character only shows its bytes
        (`⟨e2⟩`; `joined` makes such characters whole), and that special ids and tags show their names.
        """
        names = SPECIAL_TOKENS + self.tags
        fresh = True  # no piece yet: the first word has no space in front
        shown = []
        for token in ids:
            shown.append(names[token] if token < self.first else self._piece(token - self.first, fresh))
            fresh = fresh and token < self.first
        return shown

    @abstractmethod
    def _piece(self, index: int, fresh: bool) -> str:
        """How a piece is shown; `fresh` if it is the first of its text."""

    def forbidden(self) -> list[int]:
        """Ids that must never be generated: all that are not text, but the end mark, and pieces that break a line."""
        return [PAD, BOS, UNK, *range(len(SPECIAL_TOKENS), self.first), *self._line_breaks()]

    @abstractmethod
    def _line_breaks(self) -> list[int]:
        """Ids of the pieces that contain a line feed or a carriage return."""

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """What, beside unit and tags, makes this tokenizer: plain JSON, and arguments of the class."""

    def to_json(self) -> str:
        """Everything about the tokenizer as JSON."""
        head = {"format": "regard tokenizer", "version": VERSION, "unit": self.unit, "tags": list(self.tags)}
        origin = {} if self.foreign is None else {"foreign": asdict(self.foreign)}
        return json.dumps(head | self._content() | origin, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """The tokenizer that `to_json` wrote."""
        try:
            content = parse_json(text)
            found, version = content.pop("format"), content.pop("version")
            if (found, version) != ("regard tokenizer", VERSION):
                raise UserError(f"not a tokenizer this version can read: format {found!r}, version {version!r}")
            origin = content.pop("foreign", None)
            unit = content.pop("unit")
            _check_types(content)
            tokenizer: Tokenizer = UNITS[unit](**content)
            if origin is not None:
                if not all(isinstance(theirs, int) for theirs in origin["ids"]):
                    raise ValueError("foreign ids are not whole numbers")
                tokenizer.foreign = ForeignVocabulary(**origin)
                if len(tokenizer.foreign.ids) != len(tokenizer):
                    raise ValueError(f"{len(tokenizer.foreign.ids)} foreign ids for {len(tokenizer)} tokens")
            return tokenizer
        except UserError:
            raise
        except Exception as error:  # the library raises bare ones, for a merge of pieces that it does not know, say
            raise UserError(f"not a tokenizer file, or a damaged one: {first_line(error)}") from error


def _check_types(content: dict[str, Any]) -> None:
    """Refuse entries of a tokenizer file of another type than `to_json` writes."""
    for key, value in content.items():
        lists = key in ("tags", "merges", "words")
        if lists and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
            raise ValueError(f"{key} is not a list of texts")
        if key in ("characters", "model", "target_model") and not isinstance(value, str | None):
            raise ValueError(f"{key} is not a text")


class _ByteLevelTokenizer(Tokenizer):
    """A tokenizer whose pieces are strings of bytes; the first 256 are the bytes themselves, in order."""

    def __init__(self, tags: Sequence[str], longer: Iterable[bytes]) -> None:
        self._bytes = [bytes([value]) for value in range(256)]
        self._bytes.extend(longer)
        super().__init__(tags, len(self._bytes))

    def decode(self, ids: Sequence[int]) -> str:
        text = b"".join(self._bytes[token - self.first] for token in ids if token >= self.first)
        return text.decode("utf-8", errors="replace")

    def _piece(self, index: int, fresh: bool) -> str:
        return _shown(self._bytes[index])

    def _line_breaks(self) -> list[int]:
        return [self.first + index for index, piece in enumerate(self._bytes) if b"\n" in piece or b"\r" in piece]


class BytePairTokenizer(_ByteLevelTokenizer):
    """Byte-level BPE: bytes, joined pair by pair in the order of `merges`.

    The merges are the whole vocabulary, so nothing beside them is stored. They are written in the usual spelling, one
    printable character a byte, which holds no space: "Ġt he" joins " t" with "he".
    """

    unit = "bpe"

    def __init__(self, tags: Sequence[str], merges: Sequence[str]) -> None:
        self.merges = list(merges)
        pieces = byte_pieces(self.merges)
        super().__init__(tags, (bytes(_BYTE_OF[sign] for sign in spelt) for spelt in pieces[256:]))
        # Our ids are the library's ids: it is given no special tokens, and a vocabulary that begins at `first`.
        vocabulary = {spelt: self.first + index for index, spelt in enumerate(pieces)}
        self._library = _byte_level(library.models.BPE(vocab=vocabulary, merges=[_pair(merge) for merge in merges]))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        try:
            return [encoding.ids for encoding in self._library.encode_batch_fast(texts)]
        except TypeError as error:  # what the library says of a lone surrogate
            raise UserError(f"text that is not valid Unicode: {_invalid(texts)}") from error

    def _content(self) -> dict[str, Any]:
        return {"merges": self.merges}


class CharacterTokenizer(_ByteLevelTokenizer):
    """Characters. ASCII is its bytes, `characters` are the learnt others, and what is neither is spelt in bytes."""

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
            raise UserError(f"text that is not valid Unicode: {_invalid(texts)}") from error

    def _character(self, character: str) -> list[int]:
        return self._ids.get(character) or [self.first + value for value in character.encode()]

    def _content(self) -> dict[str, Any]:
        return {"characters": self.characters}


class WordTokenizer(Tokenizer):
    """Words between white space. Lossy: unknown words become UNKNOWN, and decoding puts single spaces between words."""

    unit = "word"

    def __init__(self, tags: Sequence[str], words: Sequence[str]) -> None:
        self.words = list(words)
        super().__init__(tags, len(self.words))
        self._ids = {word: self.first + index for index, word in enumerate(self.words)}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"text that is not valid Unicode: {_invalid(texts)}") from error
        return [[self._ids.get(word, UNK) for word in text.split()] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[token - self.first] for token in ids if token >= self.first)

    def _piece(self, index: int, fresh: bool) -> str:
        return self.words[index] if fresh else " " + self.words[index]

    def _line_breaks(self) -> list[int]:
        return []  # a line break is white space, so no word holds one

    def _content(self) -> dict[str, Any]:
        return {"words": self.words}


class WordPieceTokenizer(Tokenizer):
    """BERT's pieces: words cut into the longest pieces that are known, those inside a word written with ## in front.

    Lossy: text is cleaned, perhaps lower-cased and stripped of accents; spacing becomes single spaces; a word that the
    pieces cannot spell becomes UNKNOWN.
    """

    unit = "wordpiece"
    inside = "##"
    _unknown = "[UNK]"  # what the library calls it; no text spells it, because brackets are cut from words

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
        except TypeError as error:  # what the library says of a lone surrogate
            raise UserError(f"text that is not valid Unicode: {_invalid(texts)}") from error

    def decode(self, ids: Sequence[int]) -> str:
        known = [token - self.first for token in ids if token >= self.first]
        return "".join(self._piece(index, place == 0) for place, index in enumerate(known))

    def _piece(self, index: int, fresh: bool) -> str:
        word = self.words[index]
        if fresh:
            return word
        return word.removeprefix(self.inside) if word.startswith(self.inside) else " " + word

    def _line_breaks(self) -> list[int]:
        return [self.first + index for index, word in enumerate(self.words) if "\n" in word or "\r" in word]

    def _content(self) -> dict[str, Any]:
        settings = {"lowercase": self.lowercase, "strip_accents": self.strip_accents, "chinese": self.chinese}
        return {"words": self.words, **settings}


class SentencePieceTokenizer(Tokenizer):
    """Pieces as a SentencePiece model cuts them; what is not among `words` becomes UNKNOWN.

    `model` is the SentencePiece file in base 64; `target_model` another one for the target side, where one vocabulary
    serves two languages that are cut differently. `▁` begins a word; pieces such as <0x0A> are single bytes. Lossy, as
    the model's own normalisation is.
    """

    unit = "sentencepiece"
    space = "▁"

    def __init__(self, tags: Sequence[str], words: Sequence[str], model: str, target_model: str | None = None) -> None:
        self.words, self.model, self.target_model = list(words), model, target_model
        super().__init__(tags, len(self.words))
        self._ids = {word: self.first + index for index, word in enumerate(self.words)}
        self._bytes = [self._spelt(word) for word in self.words]

    def _spelt(self, word: str) -> bytes:
        single = re.fullmatch("<0x([0-9A-F]{2})>", word)
        return bytes.fromhex(single[1]) if single else word.replace(self.space, " ").encode()

    @cached_property
    def _library(self) -> Any:
        try:
            import sentencepiece
        except ImportError:
            raise UserError("this model's text needs sentencepiece: pip install 'regard[formats]'") from None
        try:
            model = base64.b64decode(self.model, validate=True) or b"?"  # an empty one would be taken for none
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
        try:
            cut = self._library.encode(texts, out_type=str)
        except (UnicodeEncodeError, TypeError) as error:
            raise UserError(f"text that is not valid Unicode: {_invalid(texts)}") from error
        return [[self._ids.get(word, UNK) for word in words] for words in cut]

    def decode(self, ids: Sequence[int]) -> str:
        text = b"".join(self._bytes[token - self.first] for token in ids if token >= self.first)
        return text.decode("utf-8", errors="replace").strip()

    def _piece(self, index: int, fresh: bool) -> str:
        text = _shown(self._bytes[index])
        return text.removeprefix(" ") if fresh else text

    def _line_breaks(self) -> list[int]:
        return [self.first + index for index, word in enumerate(self._bytes) if b"\n" in word or b"\r" in word]

    def _content(self) -> dict[str, Any]:
        target = {} if self.target_model is None else {"target_model": self.target_model}
        return {"words": self.words, "model": self.model, **target}


LEARNED_UNITS = (BytePairTokenizer, CharacterTokenizer, WordTokenizer)
UNITS: dict[str, Any] = {kind.unit: kind for kind in (*LEARNED_UNITS, WordPieceTokenizer, SentencePieceTokenizer)}

_STRAY = re.compile("⟨([89a-f][0-9a-f])⟩".encode())  # how a byte that is no character by itself is shown


def _shown(text: bytes) -> str:
    """Text for display: where bytes spell no character, they show themselves."""
    shown = text.decode("utf-8", errors="surrogateescape")  # stray bytes become U+DC80..U+DCFF
    return re.sub("[\udc80-\udcff]", lambda stray: f"⟨{ord(stray[0]) - 0xDC00:02x}⟩", shown)


def joined(pieces: Sequence[str]) -> str:
    """What neighbouring pieces spell: a character whose bytes they share is whole again.

    Bytes are looked for in each piece by itself, so text that reads `⟨c3⟩` is left as it is: BPE cuts signs, letters
    and digits apart, so that no piece of it can read so. And a piece alone stays as it is.

    >>> joined(["na⟨c3⟩", "⟨af⟩ve", "⟨e2⟩"])
    'naïve⟨e2⟩'
    """
    if len(pieces) < 2:
        return "".join(pieces)
    spelt = (piece.encode("utf-8", errors="surrogatepass") for piece in pieces)
    return _shown(b"".join(_STRAY.sub(lambda stray: bytes.fromhex(stray[1].decode()), piece) for piece in spelt))


def train(texts: Iterable[str], unit: str, size: int, tags: Sequence[str] = ()) -> Tokenizer:
    """Learn a vocabulary of at most `size` tokens, special ids and tags included; the same texts give the same one.

    A small corpus may not fill it: no BPE piece is learnt that was seen only once.
    """
    learnt = [kind.unit for kind in LEARNED_UNITS]
    if unit not in learnt:
        what = "only imported models have" if unit in UNITS else "no such unit of text:"
        raise UserError(f"{what} {unit!r} (choose from {', '.join(learnt)})")
    if len(set(tags)) < len(tags) or not all(tags):
        raise UserError(f"tags must differ and not be empty: {', '.join(map(repr, tags))}")
    marks = len(SPECIAL_TOKENS) + len(tags)
    least = marks + (1 if unit == "word" else 256)
    if size < least:
        raise UserError(f"a {unit} vocabulary needs at least {least} tokens ({marks} are marks and tags), not {size}")
    if unit == "word":
        counts = Counter(word for text in texts for word in text.split())
        return WordTokenizer(tags, _most_frequent(counts, size - marks))
    room = size - marks - 256
    if unit == "char":
        characters = Counter(character for text in texts for character in text if not character.isascii())
        return CharacterTokenizer(tags, "".join(_most_frequent(characters, room)))
    return BytePairTokenizer(tags, _learn_merges(texts, room))


def _most_frequent(counts: Counter[str], room: int) -> list[str]:
    """The commonest, ties in the order of their text."""
    return sorted(counts, key=lambda text: (-counts[text], text))[:room]


def _learn_merges(texts: Iterable[str], room: int) -> list[str]:
    """At most `room` merges in the order they were learnt, each as "left right"."""
    learner = _byte_level(library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=256 + room, min_frequency=2, initial_alphabet=_SPELLING, special_tokens=[], show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    return [" ".join(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]


def _byte_level(model: library.models.BPE) -> library.Tokenizer:
    """A library tokenizer that cuts text at words and spells it in bytes. It holds no special tokens."""
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def byte_pieces(merges: Sequence[str]) -> list[str]:
    """The pieces of byte-level BPE in the order of their ids, in the usual spelling: bytes, then what merges make."""
    joined = ("".join(_pair(merge)) for merge in merges)
    return [*_SPELLING, *dict.fromkeys(joined)]  # two merges may spell the same piece


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _spelling() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return [chr(value if value in printable else 256 + others.index(value)) for value in range(256)]


_SPELLING = _spelling()
_BYTE_OF = {sign: value for value, sign in enumerate(_SPELLING)}


def _invalid(texts: Iterable[str]) -> str:
    """The first text with a lone surrogate, in ASCII, cut short."""
    wrong = next((text for text in texts if re.search("[\ud800-\udfff]", text)), "")
    return ascii(wrong)[:60]
