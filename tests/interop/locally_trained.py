"""Tokenizers trained here, configured like those of published models, and strings to compare them on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tokenizers as library
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "the cat sat on the mat and the dog saw other cats sitting there in their small house el gato se sentó en la "
    "alfombra y el perro vio a los otros gatos naïve café Straße 12 345 2024 don't I'll we've HELLO World größer"
)
WORDS = TEXT.split()
MARKS = [".", "!", "?", ",", ";", " -- ", "...", "\n", "\n\n", "  ", "\t", " (", ") ", '"', "¿", "🙂", "日本", "☃"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def strings(count: int, seed: int = 0) -> list[str]:
    """Random texts of words in two languages, numbers, punctuation, white space and unseen characters."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 12)):
            parts.append(draw.choice(WORDS) if draw.random() < 0.75 else draw.choice(MARKS))
            parts.append(" " if draw.random() < 0.7 else "")
        texts.append("".join(parts))
    return texts


def _train(tokenizer: library.Tokenizer, size: int, special: list[str], alphabet: list[str] | None = None) -> None:
    kinds = {"BPE": trainers.BpeTrainer, "Unigram": trainers.UnigramTrainer, "WordPiece": trainers.WordPieceTrainer}
    options: dict[str, Any] = {"vocab_size": size, "special_tokens": special, "show_progress": False}
    kind = type(tokenizer.model).__name__
    if kind == "Unigram":
        options |= {"unk_token": "<unk>"}
    if alphabet is not None:
        options |= {"initial_alphabet": alphabet}
    tokenizer.train_from_iterator([text for text in strings(400, 99) if "☃" not in text], kinds[kind](**options))


def byte_level(
    special: list[Any], pattern: str | None = None, bos: str | None = None, nfc: bool = False, prefix: bool = False
) -> library.Tokenizer:
    """Byte-level BPE: of GPT-2, or with the pattern of Llama 3 or Qwen2."""
    tokenizer = library.Tokenizer(models.BPE(ignore_merges=pattern == LLAMA3))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    _train(tokenizer, 420, [], pre_tokenizers.ByteLevel.alphabet())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if bos is not None:
        template = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def byte_fallback(special: list[str], bos: str, prepend: bool) -> library.Tokenizer:
    """SentencePiece's BPE with byte fallback, as Llama 2 (with a space before the text) and Gemma have it."""
    tokenizer = library.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepend else replace
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    _train(tokenizer, 256 + 200, [*special, *bytes_])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    tokenizer = library.Tokenizer.from_str(json.dumps(content))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prepend else parts)
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def unigram(special: list[str], template: str, mask: str | None = None) -> library.Tokenizer:
    """SentencePiece's unigram model, as XLM-R, mBART, NLLB and T5 have it."""
    tokenizer = library.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    _train(tokenizer, 200, special)
    tokenizer.decoder = decoders.Metaspace()
    if mask is not None:
        tokenizer.add_special_tokens([AddedToken(mask, lstrip=True, special=True)])
    known = [(name, tokenizer.token_to_id(name)) for name in template.split() if name != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=known)
    return tokenizer


def save(tokenizer: library.Tokenizer, path: Path, **settings: Any) -> int:
    """Write tokenizer.json and tokenizer_config.json; return the number of tokens."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    names = ["input_ids", "attention_mask"]  # without it, transformers 4 adds token types, which few models take
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
    settings = {**kind, "clean_up_tokenization_spaces": False, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()
