"""Vocabularies in Hugging Face's files, and as our tokenizers: which id of theirs is which of ours.

Ours are laid out special ids, tags, pieces. What theirs has beside those (added tokens, language codes, rows that no
token uses) become tags: ids that no text spells and nothing generates, so that every row has a place here.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers as library

from regard.errors import UserError
from regard.formats.folders import Files, Folder, as_json
from regard.formats.tables import inverse
from regard.text.sides import MASK
from regard.text.tokenizers import (
    SPECIALS,
    BytePairTokenizer,
    Foreign,
    SentencePieceTokenizer,
    Tokenizer,
    WordPieceTokenizer,
    WordTokenizer,
    byte_pieces,
)

Vocabulary = dict[str, int]  # spelling -> their id


def ids_of(tokenizer: Tokenizer) -> Sequence[int]:
    """Their id of each of ours; a vocabulary of our own goes out in its own order."""
    return range(len(tokenizer)) if tokenizer.foreign is None else tokenizer.foreign.ids


@dataclass(frozen=True)
class Layout:
    """Their vocabulary sorted into ours: `specials` are their ids of FILL, BEGIN, END and UNKNOWN (None: none)."""

    vocabulary: Vocabulary
    rows: int  # of their embedding
    specials: tuple[int | None, int | None, int | None, int | None]
    named: Mapping[str, int]  # tags of ours that are tokens of theirs: {"<mask>": 103}

    def tags(self, pieces: Iterable[str]) -> list[str]:
        """The named tags, then one for each row that is neither special nor a piece."""
        taken = {self.vocabulary[piece] for piece in pieces if piece in self.vocabulary}
        taken |= {special for special in self.specials if special is not None} | set(self.named.values())
        spelt = {theirs: spelling for spelling, theirs in self.vocabulary.items()}
        rest = [spelt.get(theirs, f"<row {theirs}>") for theirs in range(self.rows) if theirs not in taken]
        return [*self.named, *rest]

    def foreign(self, tags: Sequence[str], pieces: Iterable[str]) -> Foreign:
        spelt = {theirs: spelling for spelling, theirs in self.vocabulary.items()}
        unnamed = {f"<row {theirs}>": theirs for theirs in range(self.rows) if theirs not in spelt}
        places = unnamed | self.vocabulary | dict(self.named)
        front = [-1 if special is None else special for special in self.specials] + [places[tag] for tag in tags]
        ids = front + [self.vocabulary.get(piece, -1) for piece in pieces]
        if max(ids) >= self.rows:
            raise UserError(f"the vocabulary has ids up to {max(ids)}, but the model only {self.rows} rows")
        return Foreign(ids, [spelt.get(theirs) for theirs in front])


def _added(folder: Folder) -> Vocabulary:
    """Tokens that were added to a vocabulary later, wherever this folder keeps them."""
    found: Vocabulary = dict(folder.json("added_tokens.json"))
    for theirs, token in folder.json("tokenizer_config.json").get("added_tokens_decoder", {}).items():
        found[token["content"]] = int(theirs)
    for token in folder.json("tokenizer.json").get("added_tokens", []):
        found[token["content"]] = int(token["id"])
    return found


# -- byte-level BPE: GPT-2 ---------------------------------------------------------------------------------------------


def read_bytes_bpe(folder: Folder, rows: int, specials: Mapping[str, int | None]) -> BytePairTokenizer:
    """vocab.json and merges.txt, or both from tokenizer.json."""
    if folder.has("vocab.json") and folder.has("merges.txt"):
        vocabulary = folder.json("vocab.json")
        lines = folder.text("merges.txt").split("\n")
        merges = [
            line for number, line in enumerate(lines) if line and not (number == 0 and line.startswith("#version"))
        ]
    elif folder.has("tokenizer.json"):
        model = _byte_level_model(folder)
        vocabulary = dict(model["vocab"])
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    else:
        raise UserError(f"{folder.path} has no tokenizer: neither vocab.json with merges.txt nor tokenizer.json")
    vocabulary |= _added(folder)
    try:
        pieces = byte_pieces(merges)
        lost = [piece for piece in pieces[256:] if piece not in vocabulary]
        if lost:
            raise UserError(f"{folder.path}: merges.txt makes {lost[0]!r}, which vocab.json lacks")
        layout = Layout(vocabulary, rows, _four(specials), {})
        tags = layout.tags(pieces)
        tokenizer = BytePairTokenizer(tags, merges)
    except (ValueError, KeyError) as error:
        raise UserError(f"{folder.path}: merges that are not byte-level BPE: {error}") from error
    tokenizer.foreign = layout.foreign(tags, pieces)
    return tokenizer


def begins_texts(folder: Folder) -> bool:
    """Whether their tokenizer puts a begin mark in front of every text."""
    told = folder.json("tokenizer_config.json") if folder.has("tokenizer_config.json") else {}
    whole = folder.json("tokenizer.json") if folder.has("tokenizer.json") else {}
    first = ((whole.get("post_processor") or {}).get("single") or [{}])[0]
    return bool(told.get("add_bos_token")) or "SpecialToken" in first


def _four(specials: Mapping[str, int | None]) -> tuple[int | None, int | None, int | None, int | None]:
    return specials["fill"], specials["begin"], specials["end"], specials["unknown"]


def _byte_level_model(folder: Folder) -> dict[str, Any]:
    """The BPE model in tokenizer.json, if text is cut as GPT-2 cuts it."""
    whole = folder.json("tokenizer.json")
    model, cut = whole.get("model") or {}, whole.get("pre_tokenizer") or {}
    wanted = (model.get("type"), cut.get("type"), cut.get("add_prefix_space"), cut.get("use_regex", True))
    if wanted != ("BPE", "ByteLevel", False, True) or whole.get("normalizer") or model.get("byte_fallback"):
        raise UserError(f"{folder.path / 'tokenizer.json'}: not the byte-level BPE of GPT-2 (no spaces put in front)")
    return model


def _spelt_by_id(tokenizer: Tokenizer, pieces: Sequence[str], names: Sequence[str] | None = None) -> Vocabulary:
    """Spelling -> their id, of every token that has one, in the order of their ids.

    Marks and tags are spelt as they spelt them, or else by our names; rows that no token used stay unnamed.
    """
    shown = [*(names or (*SPECIALS, *tokenizer.tags)), *pieces]
    if tokenizer.foreign is not None:
        shown[: tokenizer.first] = [mark or "" for mark in tokenizer.foreign.marks]
    order = inverse(ids_of(tokenizer))
    return {shown[ours]: theirs for theirs, ours in enumerate(order) if shown[ours]}


def write_bytes_bpe(tokenizer: Tokenizer, begins: bool) -> Files:
    """vocab.json, merges.txt, and for tokenizers of our own tokenizer.json; `begins`: a text starts with <s>."""
    if not isinstance(tokenizer, BytePairTokenizer):
        raise UserError(f'text.unit = "{tokenizer.unit}" has no counterpart in GPT-2\'s files (only bpe has)')
    vocabulary = _spelt_by_id(tokenizer, byte_pieces(tokenizer.merges))
    files = {
        "vocab.json": as_json(vocabulary),
        "merges.txt": "\n".join(["#version: 0.2", *tokenizer.merges, ""]).encode(),
    }
    if tokenizer.foreign is None:
        return files | write_fast(tokenizer, "<s> $A" if begins else "$A")
    _, begin, end, _, *_ = tokenizer.foreign.marks
    roles = {"bos_token": begin or end, "eos_token": end, "unk_token": end} | (
        {"add_bos_token": True} if begins else {}
    )
    return files | {"tokenizer_config.json": as_json({"tokenizer_class": "GPT2Tokenizer", **roles})}


# -- WordPiece: BERT ---------------------------------------------------------------------------------------------------

BERT_MARKS = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}


def read_wordpiece(folder: Folder, rows: int) -> WordPieceTokenizer:
    """vocab.txt and tokenizer_config.json, or tokenizer.json."""
    settings = folder.json("tokenizer_config.json")
    if folder.has("vocab.txt"):
        lines = folder.text("vocab.txt").removesuffix("\n").split("\n")
        vocabulary = {line.removesuffix("\r"): number for number, line in enumerate(lines)}
        lower, accents, chinese = (
            settings.get(name, usual)
            for name, usual in (("do_lower_case", True), ("strip_accents", None), ("tokenize_chinese_chars", True))
        )
    elif folder.has("tokenizer.json"):
        whole = folder.json("tokenizer.json")
        if (whole.get("model") or {}).get("type") != "WordPiece" or not whole.get("normalizer"):
            raise UserError(f"{folder.path / 'tokenizer.json'}: not BERT's WordPiece")
        vocabulary = dict(whole["model"]["vocab"])
        cleaning = whole["normalizer"]
        lower, accents, chinese = (
            cleaning.get(name) for name in ("lowercase", "strip_accents", "handle_chinese_chars")
        )
    else:
        raise UserError(f"{folder.path} has no tokenizer: neither vocab.txt nor tokenizer.json")
    added = _added(folder)
    spellings = {role: folder.specials.get(role, usual) for role, usual in BERT_MARKS.items()}
    mask = folder.specials.get("mask_token", "[MASK]")
    everything = vocabulary | added
    lost = [spelling for spelling in (*spellings.values(), mask) if spelling not in everything]
    if lost:
        raise UserError(f"{folder.path}: the vocabulary has no {lost[0]}")
    fill, begin, end, unknown = (everything[spelling] for spelling in spellings.values())
    layout = Layout(everything, rows, (fill, begin, end, unknown), {MASK: everything[mask]})
    apart = {*spellings.values(), mask, *added}
    words = sorted((word for word in vocabulary if word not in apart), key=vocabulary.__getitem__)
    tags = layout.tags(words)
    tokenizer = WordPieceTokenizer(tags, words, bool(lower), accents, bool(chinese))
    tokenizer.foreign = layout.foreign(tags, words)
    return tokenizer


def write_wordpiece(tokenizer: WordPieceTokenizer) -> Files:
    """vocab.txt, a token a line in the order of their ids, and tokenizer_config.json."""
    vocabulary = _spelt_by_id(tokenizer, tokenizer.words, [*BERT_MARKS.values(), *_mask_spelt(tokenizer.tags)])
    spelt = {theirs: spelling for spelling, theirs in vocabulary.items()}
    marks = tokenizer.foreign.marks if tokenizer.foreign else [*BERT_MARKS.values(), *_mask_spelt(tokenizer.tags)]
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
    folder: Folder, files: tuple[str, ...], vocabulary: str, rows: int, specials: tuple[int | None, int | None, int]
) -> SentencePieceTokenizer:
    """`files` are the SentencePiece models (of both sides, or of one); `specials` are FILL, BEGIN and END."""
    for name in (*files, vocabulary):
        if not folder.has(name):
            raise UserError(f"{folder.path} has no {name}, which is part of Marian's tokenizer")
    spelt: Vocabulary = folder.json(vocabulary) | _added(folder)
    unknown = spelt.get(folder.specials.get("unk_token", "<unk>"))
    fill, begin, end = specials
    layout = Layout(spelt, rows, (fill, begin, end, unknown), {})
    apart = {special for special in layout.specials if special is not None}
    words = [
        word
        for word, theirs in sorted(spelt.items(), key=lambda item: item[1])
        if theirs not in apart and not (word.startswith(">>") and word.endswith("<<"))  # a target language: a tag
    ]
    tags = layout.tags(words)
    models = [base64.b64encode(folder.read(name)).decode() for name in files]
    tokenizer = SentencePieceTokenizer(tags, words, *models)
    tokenizer.foreign = layout.foreign(tags, words)
    return tokenizer


def write_sentencepiece(source: SentencePieceTokenizer, target: SentencePieceTokenizer, shared: bool) -> Files:
    """source.spm, target.spm and vocab.json (and target_vocab.json where the sides have one each)."""
    files = {
        "source.spm": base64.b64decode(source.model),
        "target.spm": base64.b64decode(target.model),
        "vocab.json": as_json(_spelt_by_id(source, source.words)),
    }
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": not shared}
    if source.foreign is not None:
        fill, begin, end, unknown, *_ = source.foreign.marks
        settings |= {"pad_token": fill or begin, "eos_token": end, "unk_token": unknown}
    if not shared:
        files["target_vocab.json"] = as_json(_spelt_by_id(target, target.words))
    return files | {"tokenizer_config.json": as_json(settings)}


# -- our own, as a tokenizer.json --------------------------------------------------------------------------------------


def write_fast(tokenizer: Tokenizer, template: str) -> Files:
    """A tokenizer of our own as tokenizer.json; `template` says which marks stand around a text: "<s> $A </s>"."""
    names = [*SPECIALS, *tokenizer.tags]
    marks = {name: number for number, name in enumerate(names)}
    if isinstance(tokenizer, BytePairTokenizer):
        pieces = {spelt: tokenizer.first + index for index, spelt in enumerate(byte_pieces(tokenizer.merges))}
        merges = [(left, right) for left, right in (merge.split(" ") for merge in tokenizer.merges)]
        whole = library.Tokenizer(library.models.BPE(vocab=marks | pieces, merges=merges))
        whole.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        whole.decoder = library.decoders.ByteLevel()
    elif isinstance(tokenizer, WordTokenizer):
        words = {word: tokenizer.first + index for index, word in enumerate(tokenizer.words)}
        whole = library.Tokenizer(library.models.WordLevel(words | marks, unk_token=SPECIALS[3]))
        whole.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    else:
        raise UserError(f'text.unit = "{tokenizer.unit}" has no counterpart in a Hugging Face tokenizer')
    whole.add_special_tokens(names)
    around = [(name, marks[name]) for name in template.split() if name in marks]
    whole.post_processor = library.processors.TemplateProcessing(single=template, special_tokens=around)
    roles = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    if MASK in tokenizer.tags:
        roles["mask_token"] = MASK
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    return {"tokenizer.json": whole.to_str().encode(), "tokenizer_config.json": as_json(settings)}
