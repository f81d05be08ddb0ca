"""Convert vocabularies between Hugging Face's files and our tokenizers, with a mapping between their ids and ours.

Our ids are special tokens, tags, then ordinary tokens. The other tokens of their vocabulary (added tokens, language
codes, unused rows of the embedding) become tags, which are not generated, so that every row has an id here.
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
from regard.interop.hf_folder import Fields, Files, HFFolder, as_json, short_repr
from regard.interop.name_map import inverse
from regard.special_tokens import BOS, EOS, SPECIAL_TOKENS, UNK
from regard.text.encode import MASK
from regard.text.tokenizers import (
    LANGUAGE_CODE,
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
Specials = tuple[int | None, int | None, int | None, int | None]  # their ids of PAD, BOS, EOS and UNK


def ids_of(tokenizer: Tokenizer) -> Sequence[int]:
    """Their id for each of ours; the same one for a vocabulary that was not imported."""
    return range(len(tokenizer)) if tokenizer.foreign is None else tokenizer.foreign.ids


@dataclass(frozen=True)
class VocabularyLayout:
    """Assigns the ids of their vocabulary to special tokens, tags and ordinary tokens of ours."""

    vocabulary: Vocabulary
    rows: int  # rows of the embedding in their model
    specials: Specials
    named: Mapping[str, int]  # tags that have a token in their vocabulary: {"<mask>": 103}

    def tags(self, tokens: Iterable[str]) -> dict[str, int]:
        """Tag -> their id: the named tags, then one for each row that is neither a special nor an ordinary token."""
        taken = {self.vocabulary[token] for token in tokens if token in self.vocabulary}
        taken |= {special for special in self.specials if special is not None} | set(self.named.values())
        by_id = {theirs: spelling for spelling, theirs in self.vocabulary.items() if not spelling.startswith("<row ")}
        tags = dict(self.named)
        for theirs in range(self.rows):
            if theirs not in taken:
                name = by_id.get(theirs, "")
                tags[f"<row {theirs}>" if not name or name in tags else name] = theirs
        return tags

    def foreign(self, tags: Mapping[str, int], tokens: Iterable[str]) -> ForeignVocabulary:
        by_id = {theirs: spelling for spelling, theirs in self.vocabulary.items()}
        reserved = [-1 if special is None else special for special in self.specials] + list(tags.values())
        ids = reserved + [self.vocabulary.get(token, -1) for token in tokens]
        return ForeignVocabulary(ids, [by_id.get(theirs) for theirs in reserved])


def checked_vocabulary(given: Fields, rows: int) -> Vocabulary:
    """Check an object of spellings and ids; each id must be a row of the embedding."""
    for spelling, theirs in given.content.items():
        if not isinstance(theirs, int) or isinstance(theirs, bool) or theirs < 0:
            raise given.error(short_repr(spelling), f"must have a whole number as its id, not {short_repr(theirs)}")
    if given.content and (largest := max(given.content.values())) >= rows:
        raise UserError(f"{given.where}: the vocabulary has ids up to {largest}, but the embedding only {rows} rows")
    return dict(given.content)


def added_tokens(folder: HFFolder, rows: int) -> Vocabulary:
    """Read the added tokens of a vocabulary from any of the files that may hold them."""
    vocabulary = checked_vocabulary(folder.json("added_tokens.json"), rows)
    decoder = folder.json("tokenizer_config.json").object("added_tokens_decoder")
    tokens: list[tuple[Fields, Any]] = [(decoder.object(theirs), theirs) for theirs in decoder.content]
    whole = folder.json("tokenizer.json")
    for token in whole.items("added_tokens"):
        if not isinstance(token, dict):
            raise whole.error("added_tokens", f"must list objects, not {short_repr(token)}")
        tokens.append((Fields(f"{whole.where}: added_tokens", token), token.get("id")))
    for fields, theirs in tokens:
        content = fields.text("content")
        if content is None or not re.fullmatch("[0-9]{1,9}", str(theirs)):
            raise UserError(f"{fields.where}: a token needs an id and its content")
        vocabulary |= checked_vocabulary(Fields(fields.where, {content: int(theirs)}), rows)
    return vocabulary


def _construct(folder: HFFolder, make: Callable[[], T]) -> T:
    """Construct a tokenizer; an exception of the library becomes an error in one line."""
    try:
        return make()
    except Exception as error:  # the library raises plain Exception
        why = f"no {error.args[0]!r}" if isinstance(error, KeyError) else first_line(error)
        raise UserError(f"{folder.path}: its tokenizer is damaged: {why}") from error


# -- byte-level BPE: GPT-2 ---------------------------------------------------------------------------------------------


def read_bpe(
    folder: HFFolder, rows: int, specials: Specials, named: Mapping[str, int] | None = None
) -> BytePairTokenizer:
    """Read vocab.json and merges.txt, or both from tokenizer.json."""
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
    vocabulary = checked_vocabulary(given, rows) | added_tokens(folder, rows)
    for merge in merges:
        if merge.count(" ") != 1 or merge.replace(" ", "") not in vocabulary:
            raise UserError(f"{folder.path}: the merge {short_repr(merge)} makes no token of the vocabulary")
    tokens = bpe_vocabulary(merges)
    layout = VocabularyLayout(vocabulary, rows, specials, named or {})
    tags = layout.tags(tokens)
    tokenizer = _construct(folder, lambda: BytePairTokenizer(list(tags), merges))
    tokenizer.foreign = layout.foreign(tags, tokens)
    return tokenizer


def _spaced(model: Fields, merge: object) -> str:
    if not isinstance(merge, list) or not all(isinstance(part, str) for part in merge):
        raise model.error("merges", f"must list pairs, not {short_repr(merge)}")
    return " ".join(merge)


def adds_bos(folder: HFFolder) -> bool:
    """Whether their tokenizer adds BOS before every text."""
    template = folder.json("tokenizer.json").object("post_processor").items("single")
    first = template[0] if template else None
    adds = folder.json("tokenizer_config.json").boolean("add_bos_token", False)
    return bool(adds) or (isinstance(first, dict) and "SpecialToken" in first)


def _byte_level_model(folder: HFFolder) -> Fields:
    """The BPE model in tokenizer.json, if it splits text as GPT-2 does."""
    whole = folder.json("tokenizer.json")
    model, pre = whole.object("model"), whole.object("pre_tokenizer").content
    wanted = (model.content.get("type"), pre.get("type"), pre.get("add_prefix_space"), pre.get("use_regex", True))
    changed = whole.content.get("normalizer") or model.content.get("byte_fallback")
    if wanted != ("BPE", "ByteLevel", False, True) or changed:
        raise UserError(f"{folder.path / 'tokenizer.json'}: not the byte-level BPE of GPT-2 (without prefix spaces)")
    return model


def _their_vocabulary(tokenizer: Tokenizer, tokens: Sequence[str], names: Sequence[str] | None = None) -> Vocabulary:
    """Spelling -> their id for every token that has one, in the order of their ids.

    Special tokens and tags keep their original spelling, or else get our names; unused rows have no entry.
    """
    spellings = [*(names or (*SPECIAL_TOKENS, *tokenizer.tags)), *tokens]
    if tokenizer.foreign is not None:
        spellings[: tokenizer.first] = [spelling or "" for spelling in tokenizer.foreign.spellings]
    order = inverse(ids_of(tokenizer))
    return {spellings[ours]: theirs for theirs, ours in enumerate(order) if spellings[ours]}


def write_bpe(tokenizer: BytePairTokenizer, add_bos: bool) -> Files:
    """Write vocab.json and merges.txt and, unless the tokenizer was imported, tokenizer.json."""
    vocabulary = _their_vocabulary(tokenizer, bpe_vocabulary(tokenizer.merges))
    files = {
        "vocab.json": as_json(vocabulary),
        "merges.txt": "\n".join(["#version: 0.2", *tokenizer.merges, ""]).encode(),
    }
    if tokenizer.foreign is None:
        return files | write_fast(tokenizer, "<s> $A" if add_bos else "$A")
    _, bos, eos, _, *_ = tokenizer.foreign.spellings
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": bos or eos, "eos_token": eos, "unk_token": eos}
    return files | {"tokenizer_config.json": as_json(settings | ({"add_bos_token": True} if add_bos else {}))}


def write_foreign(tokenizer: Tokenizer, template: str) -> bytes:
    """Write tokenizer.json of an imported byte-level BPE with the original spellings; `<s>` in `template` is BOS."""
    assert isinstance(tokenizer, BytePairTokenizer) and tokenizer.foreign is not None
    vocabulary = _their_vocabulary(tokenizer, bpe_vocabulary(tokenizer.merges))
    merges = [(left, right) for left, right in (merge.split(" ") for merge in tokenizer.merges)]
    whole = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=merges))
    whole.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = library.decoders.ByteLevel()
    special = [spelling for spelling in dict.fromkeys(tokenizer.foreign.spellings) if spelling]
    whole.add_special_tokens([library.AddedToken(spelling, special=True) for spelling in special])
    bos = tokenizer.foreign.spellings[BOS] or tokenizer.foreign.spellings[EOS] or ""
    if "<s>" in template:
        template, known = template.replace("<s>", bos), [(bos, vocabulary[bos])]
        whole.post_processor = library.processors.TemplateProcessing(single=template, special_tokens=known)
    text: str = whole.to_str()
    return text.encode()


# -- WordPiece: BERT ---------------------------------------------------------------------------------------------------

BERT_SPECIAL_TOKENS = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}


def read_wordpiece(folder: HFFolder, rows: int) -> WordPieceTokenizer:
    """Read vocab.txt and tokenizer_config.json, or tokenizer.json."""
    settings = folder.json("tokenizer_config.json")
    if folder.has("vocab.txt"):
        lines = folder.text("vocab.txt").removesuffix("\n").split("\n")
        given = Fields(folder.path / "vocab.txt", {line.removesuffix("\r"): n for n, line in enumerate(lines)})
        lower, chinese = settings.boolean("do_lower_case", True), settings.boolean("tokenize_chinese_chars", True)
        accents = settings.boolean("strip_accents")
    elif folder.has("tokenizer.json"):
        whole = folder.json("tokenizer.json")
        model, cleaning = whole.object("model"), whole.object("normalizer")
        if model.content.get("type") != "WordPiece" or not cleaning.content:
            raise UserError(f"{folder.path / 'tokenizer.json'}: not BERT's WordPiece")
        given = model.object("vocab")
        lower, chinese = cleaning.boolean("lowercase", False), cleaning.boolean("handle_chinese_chars", False)
        accents = cleaning.boolean("strip_accents")
    else:
        raise UserError(f"{folder.path} has no tokenizer: neither vocab.txt nor tokenizer.json")
    vocabulary, added = checked_vocabulary(given, rows), added_tokens(folder, rows)
    everything = vocabulary | added
    spellings = {role: folder.specials.get(role, default) for role, default in BERT_SPECIAL_TOKENS.items()}
    pad, bos, eos, unk = (id_of(folder, spelling, everything) for spelling in spellings.values())
    mask = folder.specials.get("mask_token", "[MASK]")
    layout = VocabularyLayout(everything, rows, (pad, bos, eos, unk), {MASK: id_of(folder, mask, everything)})
    special = {*spellings.values(), mask, *added}
    words = sorted((word for word in vocabulary if word not in special), key=vocabulary.__getitem__)
    tags = layout.tags(words)
    tokenizer = _construct(folder, lambda: WordPieceTokenizer(list(tags), words, bool(lower), accents, bool(chinese)))
    tokenizer.foreign = layout.foreign(tags, words)
    return tokenizer


def id_of(folder: HFFolder, spelling: str, vocabulary: Vocabulary) -> int:
    if spelling not in vocabulary:
        raise UserError(f"{folder.path}: the vocabulary has no {spelling}")
    return vocabulary[spelling]


def write_wordpiece(tokenizer: WordPieceTokenizer) -> Files:
    """Write vocab.txt, one token a line in the order of their ids, and tokenizer_config.json."""
    names = [*BERT_SPECIAL_TOKENS.values(), *("[MASK]" if tag == MASK else tag for tag in tokenizer.tags)]
    by_id = {theirs: spelling for spelling, theirs in _their_vocabulary(tokenizer, tokenizer.words, names).items()}
    special = tokenizer.foreign.spellings if tokenizer.foreign else names
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": tokenizer.lowercase,
        "strip_accents": tokenizer.strip_accents,
        "tokenize_chinese_chars": tokenizer.chinese,
        **dict(zip(BERT_SPECIAL_TOKENS, special, strict=False)),
        "mask_token": special[tokenizer.tag(MASK)],
    }
    lines = [by_id.get(theirs, f"[row{theirs}]") for theirs in range(max(by_id) + 1)]  # without unused rows at the end
    return {"vocab.txt": "\n".join([*lines, ""]).encode(), "tokenizer_config.json": as_json(settings)}


# -- SentencePiece: Marian ---------------------------------------------------------------------------------------------


def read_sentencepiece(
    folder: HFFolder,
    files: tuple[str, ...],
    vocabulary: str,
    rows: int,
    specials: tuple[int | None, int | None, int],
    codes: Mapping[str, int] | None = None,
) -> SentencePieceTokenizer:
    """Read SentencePiece models and their vocabulary.

    `files` are the models (of both sides, or of one); `specials` are their ids of PAD, BOS and EOS; `codes` are the ids
    of languages that are not in the vocabulary.
    """
    for name in (*files, vocabulary):
        if not folder.has(name):
            raise UserError(f"{folder.path} has no {name}, which is part of its tokenizer")
    codes = {code: theirs for code, theirs in (codes or {}).items() if theirs < rows}
    ids = checked_vocabulary(folder.json(vocabulary), rows) | added_tokens(folder, rows) | codes
    layout = VocabularyLayout(ids, rows, (*specials, ids.get(folder.specials.get("unk_token", "<unk>"))), {})
    words = [
        word
        for word, theirs in sorted(ids.items(), key=lambda item: item[1])
        # language codes become tags
        if theirs not in layout.specials and not LANGUAGE_CODE.fullmatch(word) and word not in codes
    ]
    tags = layout.tags(words)
    models = [base64.b64encode(folder.read(name)).decode() for name in files]
    tokenizer = _construct(folder, lambda: SentencePieceTokenizer(list(tags), words, *models))
    for name, side in zip(files, (tokenizer, tokenizer.target_side()), strict=False):
        _check_sentencepiece(folder.path / name, side)
    tokenizer.foreign = layout.foreign(tags, words)
    return tokenizer


def _check_sentencepiece(path: Path, tokenizer: Tokenizer) -> None:
    """Check that a SentencePiece model works, if the library is installed."""
    if find_spec("sentencepiece") is not None:
        try:
            tokenizer.encode("a")
        except UserError as error:
            raise UserError(f"{path}: {error}") from error


def write_sentencepiece(source: SentencePieceTokenizer, target: SentencePieceTokenizer, shared: bool) -> Files:
    """Write source.spm, target.spm and vocab.json (and target_vocab.json if the sides have separate vocabularies)."""
    files = {
        "source.spm": base64.b64decode(source.model),
        "target.spm": base64.b64decode(target.model),
        "vocab.json": as_json(_their_vocabulary(source, source.words)),
    }
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": not shared}
    if source.foreign is not None:
        pad, bos, eos, unk, *_ = source.foreign.spellings
        settings |= {"pad_token": pad or bos, "eos_token": eos, "unk_token": unk}
    if not shared:
        files["target_vocab.json"] = as_json(_their_vocabulary(target, target.words))
    return files | {"tokenizer_config.json": as_json(settings)}


# -- tokenizers trained here, as tokenizer.json ------------------------------------------------------------------------


def read_fast(
    folder: HFFolder, rows: int, specials: Specials, named: Mapping[str, int] | None = None
) -> BytePairTokenizer | WordTokenizer:
    """Read a tokenizer.json such as `write_fast` writes: byte-level BPE, or words between white space."""
    whole = folder.json("tokenizer.json")
    model, pre = whole.object("model"), whole.object("pre_tokenizer")
    if model.content.get("type") != "WordLevel":
        return read_bpe(folder, rows, specials, named)
    if pre.content.get("type") != "WhitespaceSplit" or whole.content.get("normalizer"):
        raise whole.error("pre_tokenizer", "must be WhitespaceSplit alone")
    added = added_tokens(folder, rows)
    vocabulary = checked_vocabulary(model.object("vocab"), rows) | added
    layout = VocabularyLayout(vocabulary, rows, specials, named or {})
    words = sorted((word for word in vocabulary if word not in added), key=vocabulary.__getitem__)
    tags = layout.tags(words)
    tokenizer = WordTokenizer(list(tags), words)
    tokenizer.foreign = layout.foreign(tags, words)
    return tokenizer


def unsupported_tokenizer(tokenizer: Tokenizer) -> list[str]:
    """Why a tokenizer cannot be written as tokenizer.json; an empty list if it can."""
    if isinstance(tokenizer, BytePairTokenizer | WordTokenizer):
        return []
    return [f'text.unit = "{tokenizer.unit}" has no counterpart in a Hugging Face tokenizer (only bpe and word have)']


def write_fast(tokenizer: Tokenizer, template: str, **roles: str) -> Files:
    """Write a tokenizer as tokenizer.json; `template` places the special tokens around a text: "<s> $A </s>".

    `roles` assign special tokens beyond the default ones: cls_token="<s>". Special tokens are not parsed from text,
    except in a tokenizer with a mask, because transformers has one switch for all of them. The mask includes the space
    before it, as words do.
    """
    ids, names = ids_of(tokenizer), [*SPECIAL_TOKENS, *tokenizer.tags]
    special = {name: ids[number] for number, name in enumerate(names)}
    if isinstance(tokenizer, BytePairTokenizer):
        ordinary = dict(zip(bpe_vocabulary(tokenizer.merges), ids[tokenizer.first :], strict=True))
        merges = [(left, right) for left, right in (merge.split(" ") for merge in tokenizer.merges)]
        whole = library.Tokenizer(library.models.BPE(vocab=special | ordinary, merges=merges))
        whole.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        whole.decoder = library.decoders.ByteLevel()
    else:
        ordinary = dict(zip(cast(WordTokenizer, tokenizer).words, ids[tokenizer.first :], strict=True))
        whole = library.Tokenizer(library.models.WordLevel(ordinary | special, unk_token=SPECIAL_TOKENS[UNK]))
        whole.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    whole.add_special_tokens([library.AddedToken(name, special=True, lstrip=name == MASK) for name in names])
    roles = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True)) | roles
    if MASK in tokenizer.tags:
        roles["mask_token"] = MASK
    added = [(name, special[name]) for name in template.split() if name in special]
    whole.post_processor = library.processors.TemplateProcessing(single=template, special_tokens=added)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],  # GPT-2 looks up token_type_ids as words
        "split_special_tokens": MASK not in tokenizer.tags,
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    return {"tokenizer.json": whole.to_str().encode(), "tokenizer_config.json": as_json(settings)}
