"""Vocabularies in Hugging Face's files, and as our tokenizers: which id of theirs is which of ours.

Ours are laid out special ids, tags, pieces. What theirs has beside those (added tokens, language codes, rows that no
token uses) become tags: ids that no text spells and nothing generates, so that every row has a place here.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import tokenizers as library

from regard.errors import UserError, first_line
from regard.interop.hf_folder import Fields, Files, HFFolder, as_json, shown
from regard.interop.name_map import inverse
from regard.text.encode import MASK
from regard.text.tokenizers import (
    SPECIAL_TOKENS,
    BytePairTokenizer,
    ForeignVocabulary,
    SentencePieceTokenizer,
    Tokenizer,
    WordPieceTokenizer,
    WordTokenizer,
    bpe_vocabulary,
)

Vocabulary = dict[str, int]  # spelling -> their id
T = TypeVar("T", bound=Tokenizer)
Specials = tuple[int | None, int | None, int | None, int | None]  # their ids of FILL, BEGIN, END and UNKNOWN


def ids_of(tokenizer: Tokenizer) -> Sequence[int]:
    """Their id of each of ours; a vocabulary of our own goes out in its own order."""
    return range(len(tokenizer)) if tokenizer.foreign is None else tokenizer.foreign.ids


@dataclass(frozen=True)
class VocabularyLayout:
    """Their vocabulary sorted into ours: `specials` are their ids of FILL, BEGIN, END and UNKNOWN (None: none)."""

    vocabulary: Vocabulary
    rows: int  # of their embedding
    specials: Specials
    named: Mapping[str, int]  # tags of ours that are tokens of theirs: {"<mask>": 103}

    def tags(self, pieces: Iterable[str]) -> dict[str, int]:
        """Tag -> their id: the named ones, then one for each row that is neither special nor a piece."""
        taken = {self.vocabulary[piece] for piece in pieces if piece in self.vocabulary}
        taken |= {special for special in self.specials if special is not None} | set(self.named.values())
        spelt = {theirs: spelling for spelling, theirs in self.vocabulary.items() if not spelling.startswith("<row ")}
        found = dict(self.named)
        for theirs in range(self.rows):
            if theirs not in taken:
                name = spelt.get(theirs, "")
                found[f"<row {theirs}>" if not name or name in found else name] = theirs
        return found

    def foreign(self, tags: Mapping[str, int], pieces: Iterable[str]) -> ForeignVocabulary:
        spelt = {theirs: spelling for spelling, theirs in self.vocabulary.items()}
        front = [-1 if special is None else special for special in self.specials] + list(tags.values())
        ids = front + [self.vocabulary.get(piece, -1) for piece in pieces]
        return ForeignVocabulary(ids, [spelt.get(theirs) for theirs in front])


def _vocabulary(given: Fields, rows: int) -> Vocabulary:
    """An object of spellings and ids, each of which is a row of the embedding."""
    for spelling, theirs in given.content.items():
        if not isinstance(theirs, int) or isinstance(theirs, bool) or theirs < 0:
            raise given.fault(shown(spelling), f"must have a whole number as its id, not {shown(theirs)}")
    if given.content and (most := max(given.content.values())) >= rows:
        raise UserError(f"{given.where}: the vocabulary has ids up to {most}, but the model only {rows} rows")
    return dict(given.content)


def added_tokens(folder: HFFolder, rows: int) -> Vocabulary:
    """Tokens that were added to a vocabulary later, wherever this folder keeps them."""
    found = _vocabulary(folder.json("added_tokens.json"), rows)
    decoder = folder.json("tokenizer_config.json").object("added_tokens_decoder")
    tokens: list[tuple[Fields, Any]] = [(decoder.object(theirs), theirs) for theirs in decoder.content]
    whole = folder.json("tokenizer.json")
    for token in whole.items("added_tokens"):
        if not isinstance(token, dict):
            raise whole.fault("added_tokens", f"must list objects, not {shown(token)}")
        tokens.append((Fields(f"{whole.where}: added_tokens", token), token.get("id")))
    for fields, theirs in tokens:
        content = fields.text("content")
        if content is None or not re.fullmatch("[0-9]{1,9}", str(theirs)):
            raise UserError(f"{fields.where}: a token needs an id and its content")
        found |= _vocabulary(Fields(fields.where, {content: int(theirs)}), rows)
    return found


def _made(folder: HFFolder, make: Callable[[], T]) -> T:
    """A tokenizer of what a folder holds; what the library says against it is an error in one line."""
    try:
        return make()
    except Exception as error:  # the library raises nothing more special
        said = f"no {error.args[0]!r}" if isinstance(error, KeyError) else first_line(error)
        raise UserError(f"{folder.path}: its tokenizer is damaged: {said}") from error


# -- byte-level BPE: GPT-2 ---------------------------------------------------------------------------------------------


def read_bytes_bpe(
    folder: HFFolder, rows: int, specials: Specials, named: Mapping[str, int] | None = None
) -> BytePairTokenizer:
    """vocab.json and merges.txt, or both from tokenizer.json."""
    if folder.has("vocab.json") and folder.has("merges.txt"):
        given = folder.json("vocab.json")
        lines = folder.text("merges.txt").split("\n")
        merges = [
            line for number, line in enumerate(lines) if line and not (number == 0 and line.startswith("#version"))
        ]
    elif folder.has("tokenizer.json"):
        model = _byte_level_model(folder)
        given = model.object("vocab")
        merges = [merge if isinstance(merge, str) else _spaced(model, merge) for merge in model.items("merges")]
    else:
        raise UserError(f"{folder.path} has no tokenizer: neither vocab.json with merges.txt nor tokenizer.json")
    vocabulary = _vocabulary(given, rows) | added_tokens(folder, rows)
    for merge in merges:
        if merge.count(" ") != 1 or merge.replace(" ", "") not in vocabulary:
            raise UserError(f"{folder.path}: the merge {shown(merge)} makes no token that is in the vocabulary")
    pieces = bpe_vocabulary(merges)
    layout = VocabularyLayout(vocabulary, rows, specials, named or {})
    tags = layout.tags(pieces)
    tokenizer = _made(folder, lambda: BytePairTokenizer(list(tags), merges))
    tokenizer.foreign = layout.foreign(tags, pieces)
    return tokenizer


def _spaced(model: Fields, merge: object) -> str:
    if not isinstance(merge, list) or not all(isinstance(part, str) for part in merge):
        raise model.fault("merges", f"must list pairs, not {shown(merge)}")
    return " ".join(merge)


def begins_texts(folder: HFFolder) -> bool:
    """Whether their tokenizer puts a begin mark in front of every text."""
    around = folder.json("tokenizer.json").object("post_processor").items("single")
    first = around[0] if around else None
    begins = folder.json("tokenizer_config.json").flag("add_bos_token", False)
    return bool(begins) or (isinstance(first, dict) and "SpecialToken" in first)


def _byte_level_model(folder: HFFolder) -> Fields:
    """The BPE model in tokenizer.json, if text is cut as GPT-2 cuts it."""
    whole = folder.json("tokenizer.json")
    model, cut = whole.object("model"), whole.object("pre_tokenizer").content
    wanted = (model.content.get("type"), cut.get("type"), cut.get("add_prefix_space"), cut.get("use_regex", True))
    changed = whole.content.get("normalizer") or model.content.get("byte_fallback")
    if wanted != ("BPE", "ByteLevel", False, True) or changed:
        raise UserError(f"{folder.path / 'tokenizer.json'}: not the byte-level BPE of GPT-2 (no spaces put in front)")
    return model


def _spelt_by_id(tokenizer: Tokenizer, pieces: Sequence[str], names: Sequence[str] | None = None) -> Vocabulary:
    """Spelling -> their id, of every token that has one, in the order of their ids.

    Marks and tags are spelt as they spelt them, or else by our names; rows that no token used stay unnamed.
    """
    shown = [*(names or (*SPECIAL_TOKENS, *tokenizer.tags)), *pieces]
    if tokenizer.foreign is not None:
        shown[: tokenizer.first] = [mark or "" for mark in tokenizer.foreign.spellings]
    order = inverse(ids_of(tokenizer))
    return {shown[ours]: theirs for theirs, ours in enumerate(order) if shown[ours]}


def write_bytes_bpe(tokenizer: BytePairTokenizer, begins: bool) -> Files:
    """vocab.json, merges.txt, and for tokenizers of our own tokenizer.json; `begins`: a text starts with <s>."""
    vocabulary = _spelt_by_id(tokenizer, bpe_vocabulary(tokenizer.merges))
    files = {
        "vocab.json": as_json(vocabulary),
        "merges.txt": "\n".join(["#version: 0.2", *tokenizer.merges, ""]).encode(),
    }
    if tokenizer.foreign is None:
        return files | write_fast(tokenizer, "<s> $A" if begins else "$A")
    _, begin, end, _, *_ = tokenizer.foreign.spellings
    roles = {"bos_token": begin or end, "eos_token": end, "unk_token": end} | (
        {"add_bos_token": True} if begins else {}
    )
    return files | {"tokenizer_config.json": as_json({"tokenizer_class": "GPT2Tokenizer", **roles})}


# -- WordPiece: BERT ---------------------------------------------------------------------------------------------------

BERT_MARKS = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}


def read_wordpiece(folder: HFFolder, rows: int) -> WordPieceTokenizer:
    """vocab.txt and tokenizer_config.json, or tokenizer.json."""
    settings = folder.json("tokenizer_config.json")
    if folder.has("vocab.txt"):
        lines = folder.text("vocab.txt").removesuffix("\n").split("\n")
        given = Fields(folder.path / "vocab.txt", {line.removesuffix("\r"): n for n, line in enumerate(lines)})
        lower, chinese = settings.flag("do_lower_case", True), settings.flag("tokenize_chinese_chars", True)
        accents = settings.flag("strip_accents")
    elif folder.has("tokenizer.json"):
        whole = folder.json("tokenizer.json")
        model, cleaning = whole.object("model"), whole.object("normalizer")
        if model.content.get("type") != "WordPiece" or not cleaning.content:
            raise UserError(f"{folder.path / 'tokenizer.json'}: not BERT's WordPiece")
        given = model.object("vocab")
        lower, chinese = cleaning.flag("lowercase", False), cleaning.flag("handle_chinese_chars", False)
        accents = cleaning.flag("strip_accents")
    else:
        raise UserError(f"{folder.path} has no tokenizer: neither vocab.txt nor tokenizer.json")
    vocabulary, added = _vocabulary(given, rows), added_tokens(folder, rows)
    everything = vocabulary | added
    spellings = {role: folder.specials.get(role, usual) for role, usual in BERT_MARKS.items()}
    fill, begin, end, unknown = (id_of(folder, spelling, everything) for spelling in spellings.values())
    mask = folder.specials.get("mask_token", "[MASK]")
    layout = VocabularyLayout(everything, rows, (fill, begin, end, unknown), {MASK: id_of(folder, mask, everything)})
    apart = {*spellings.values(), mask, *added}
    words = sorted((word for word in vocabulary if word not in apart), key=vocabulary.__getitem__)
    tags = layout.tags(words)
    tokenizer = _made(folder, lambda: WordPieceTokenizer(list(tags), words, bool(lower), accents, bool(chinese)))
    tokenizer.foreign = layout.foreign(tags, words)
    return tokenizer


def id_of(folder: HFFolder, spelling: str, vocabulary: Vocabulary) -> int:
    if spelling not in vocabulary:
        raise UserError(f"{folder.path}: the vocabulary has no {spelling}")
    return vocabulary[spelling]


def write_wordpiece(tokenizer: WordPieceTokenizer) -> Files:
    """vocab.txt, a token a line in the order of their ids, and tokenizer_config.json."""
    vocabulary = _spelt_by_id(tokenizer, tokenizer.words, [*BERT_MARKS.values(), *_mask_spelt(tokenizer.tags)])
    spelt = {theirs: spelling for spelling, theirs in vocabulary.items()}
    marks = tokenizer.foreign.spellings if tokenizer.foreign else [*BERT_MARKS.values(), *_mask_spelt(tokenizer.tags)]
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": tokenizer.lowercase,
        "strip_accents": tokenizer.strip_accents,
        "tokenize_chinese_chars": tokenizer.chinese,
        **dict(zip(BERT_MARKS, marks, strict=False)),
        "mask_token": marks[tokenizer.tag(MASK)],
    }
    last = max(spelt) + 1  # rows at the end that no token uses are not written
    lines = [spelt.get(theirs, f"[row{theirs}]") for theirs in range(last)]
    return {"vocab.txt": "\n".join([*lines, ""]).encode(), "tokenizer_config.json": as_json(settings)}


def _mask_spelt(tags: Sequence[str]) -> list[str]:
    return ["[MASK]" if tag == MASK else tag for tag in tags]


# -- SentencePiece: Marian ---------------------------------------------------------------------------------------------


def read_sentencepiece(
    folder: HFFolder, files: tuple[str, ...], vocabulary: str, rows: int, specials: tuple[int | None, int | None, int]
) -> SentencePieceTokenizer:
    """`files` are the SentencePiece models (of both sides, or of one); `specials` are FILL, BEGIN and END."""
    for name in (*files, vocabulary):
        if not folder.has(name):
            raise UserError(f"{folder.path} has no {name}, which is part of Marian's tokenizer")
    spelt = _vocabulary(folder.json(vocabulary), rows) | added_tokens(folder, rows)
    unknown = spelt.get(folder.specials.get("unk_token", "<unk>"))
    fill, begin, end = specials
    layout = VocabularyLayout(spelt, rows, (fill, begin, end, unknown), {})
    apart = {special for special in layout.specials if special is not None}
    words = [
        word
        for word, theirs in sorted(spelt.items(), key=lambda item: item[1])
        if theirs not in apart and not (word.startswith(">>") and word.endswith("<<"))  # a target language: a tag
    ]
    tags = layout.tags(words)
    models = [base64.b64encode(folder.read(name)).decode() for name in files]
    tokenizer = _made(folder, lambda: SentencePieceTokenizer(list(tags), words, *models))
    for name, side in zip(files, (tokenizer, tokenizer.target_side()), strict=False):
        _check_sentencepiece(folder.path / name, side)
    tokenizer.foreign = layout.foreign(tags, words)
    return tokenizer


def _check_sentencepiece(path: Path, tokenizer: Tokenizer) -> None:
    """Try a SentencePiece model, if the library is there."""
    if find_spec("sentencepiece") is not None:
        try:
            tokenizer.encode("a")
        except UserError as error:
            raise UserError(f"{path}: {error}") from error


def write_sentencepiece(source: SentencePieceTokenizer, target: SentencePieceTokenizer, shared: bool) -> Files:
    """source.spm, target.spm and vocab.json (and target_vocab.json where the sides have one each)."""
    files = {
        "source.spm": base64.b64decode(source.model),
        "target.spm": base64.b64decode(target.model),
        "vocab.json": as_json(_spelt_by_id(source, source.words)),
    }
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": not shared}
    if source.foreign is not None:
        fill, begin, end, unknown, *_ = source.foreign.spellings
        settings |= {"pad_token": fill or begin, "eos_token": end, "unk_token": unknown}
    if not shared:
        files["target_vocab.json"] = as_json(_spelt_by_id(target, target.words))
    return files | {"tokenizer_config.json": as_json(settings)}


# -- our own, as a tokenizer.json --------------------------------------------------------------------------------------


def read_fast(
    folder: HFFolder, rows: int, specials: Specials, named: Mapping[str, int] | None = None
) -> BytePairTokenizer | WordTokenizer:
    """A tokenizer.json such as `write_fast` writes: byte-level BPE, or words between white space."""
    whole = folder.json("tokenizer.json")
    model, cut = whole.object("model"), whole.object("pre_tokenizer")
    if model.content.get("type") != "WordLevel":
        return read_bytes_bpe(folder, rows, specials, named)
    if cut.content.get("type") != "WhitespaceSplit" or whole.content.get("normalizer"):
        raise whole.fault("pre_tokenizer", "is not WhitespaceSplit alone, which words here need")
    added = added_tokens(folder, rows)
    vocabulary = _vocabulary(model.object("vocab"), rows) | added
    layout = VocabularyLayout(vocabulary, rows, specials, named or {})
    words = sorted((word for word in vocabulary if word not in added), key=vocabulary.__getitem__)
    tags = layout.tags(words)
    tokenizer = WordTokenizer(list(tags), words)
    tokenizer.foreign = layout.foreign(tags, words)
    return tokenizer


def no_fast(tokenizer: Tokenizer) -> list[str]:
    """Why a tokenizer has no counterpart in a tokenizer.json, if it has none."""
    if isinstance(tokenizer, BytePairTokenizer | WordTokenizer):
        return []
    return [f'text.unit = "{tokenizer.unit}" has no counterpart in a Hugging Face tokenizer (only bpe and word have)']


def write_fast(tokenizer: Tokenizer, template: str, **roles: str) -> Files:
    """A tokenizer as tokenizer.json; `template` says which special tokens stand around a text: "<s> $A </s>".

    `roles` are special tokens by what they are for, beside the usual ones: cls_token="<s>". No text spells a special
    token; but where there is a mask, all of them are spelt, because transformers knows no exceptions. The mask takes in
    the space in front of it, as words do.
    """
    ids, names = ids_of(tokenizer), [*SPECIAL_TOKENS, *tokenizer.tags]
    marks = {name: ids[number] for number, name in enumerate(names)}
    if isinstance(tokenizer, BytePairTokenizer):
        pieces = dict(zip(bpe_vocabulary(tokenizer.merges), ids[tokenizer.first :], strict=True))
        merges = [(left, right) for left, right in (merge.split(" ") for merge in tokenizer.merges)]
        whole = library.Tokenizer(library.models.BPE(vocab=marks | pieces, merges=merges))
        whole.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        whole.decoder = library.decoders.ByteLevel()
    else:
        words = cast(WordTokenizer, tokenizer).words
        numbered = dict(zip(words, ids[tokenizer.first :], strict=True))
        whole = library.Tokenizer(library.models.WordLevel(numbered | marks, unk_token=SPECIAL_TOKENS[3]))
        whole.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    whole.add_special_tokens([library.AddedToken(name, special=True, lstrip=name == MASK) for name in names])
    roles = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True)) | roles
    if MASK in tokenizer.tags:
        roles["mask_token"] = MASK
    around = [(name, marks[name]) for name in template.split() if name in marks]
    whole.post_processor = library.processors.TemplateProcessing(single=template, special_tokens=around)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],  # token_type_ids would be words to GPT-2
        "split_special_tokens": MASK not in tokenizer.tags,
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    return {"tokenizer.json": whole.to_str().encode(), "tokenizer_config.json": as_json(settings)}
