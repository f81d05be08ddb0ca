"""Import encoder-decoders related to Marian: BART, mBART-50, M2M100 and NLLB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from regard.errors import UserError
from regard.interop import marian
from regard.interop.common import Imported, activation, count, end_of_text, fraction, layers, rows, token
from regard.interop.encoders import OFFSET, WithoutFirst
from regard.interop.fast_tokenizers import FILE, read_fast_tokenizer, spelled, surrounding, vocabulary_of
from regard.interop.generation import beams, length_penalty
from regard.interop.hf_folder import HFFolder, TensorInfo, short_repr
from regard.interop.marian import BIAS, NEG_LOGIT, OUTPUT, SEPARATE, SHARED
from regard.interop.name_map import Entry, IgnoredTensors, TensorMap, VocabularyRows, inverse, layered
from regard.interop.pegasus import FINAL_NORMS
from regard.interop.vocabularies import checked_vocabulary, ids_of, read_sentencepiece
from regard.models.transformer_settings import TransformerSettings
from regard.recipes.schema import Recipe
from regard.text import EOS, Tokenizer

SIDES = {"encoder": "source_embedding", "decoder": "target_embedding"}
SPM = "sentencepiece.bpe.model"


@dataclass(frozen=True)
class TranslatorImporter:
    """A model type whose tensors have the names of Marian's."""

    norm_first: bool
    learned: bool  # positions; else fairseq's sinusoids
    embedding_norm: bool
    output_bias: bool

    def canonical(self, header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        return dict(header)

    def read(self, folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
        for name in ("attention_heads", "ffn_dim"):
            sizes = count(folder, f"encoder_{name}"), count(folder, f"decoder_{name}")
            if sizes[0] != sizes[1]:
                raise folder.config.error(
                    f"decoder_{name}", f"= {sizes[1]} must equal encoder_{name} = {sizes[0]} here"
                )
        size = rows(folder, "vocab_size", None, header, SHARED)
        tokenizer, tags = _tokenizer(folder, size)
        recipe = Recipe.model_validate(
            {
                "data": {"imported": "pairs", **tags},
                "text": {"unit": tokenizer.unit, "vocabulary": max(260, len(tokenizer))},
                "model": self._settings(folder, header),
                "decoding": {"beam": beams(folder, 4), "length_penalty": length_penalty(folder)},
            }
        )
        settings = cast(TransformerSettings, recipe.model)
        return Imported(recipe, tokenizer, tokenizer.target_side(), tensors=self._tensors(settings, tokenizer))

    def _settings(self, folder: HFFolder, header: Mapping[str, TensorInfo]) -> dict[str, Any]:
        config = folder.config
        positions = config.integer("max_position_embeddings") or 1024
        if self.learned:
            for side in SIDES:
                name = f"model.{side}.embed_positions.weight"
                if name in header and header[name].shape[:1] != (positions + OFFSET,):
                    raise config.error("max_position_embeddings", f"= {positions} does not fit {name}")
        elif not 2 <= positions <= 1 << 20:
            raise config.error("max_position_embeddings", f"= {positions} is not a possible number of positions")
        return {
            "family": "transformer",
            "width": count(folder, "d_model"),
            "heads": count(folder, "encoder_attention_heads"),
            "encoder_layers": layers(folder, "encoder_layers"),
            "decoder_layers": layers(folder, "decoder_layers"),
            "ffn_width": count(folder, "encoder_ffn_dim"),
            "dropout": fraction(folder, "dropout", 0.1),
            "activation": activation(folder, "activation_function", "gelu" if self.learned else "relu"),
            "norm_first": self.norm_first,
            "embedding_norm": self.embedding_norm,
            "positions": "learned" if self.learned else "sinusoidal-fairseq",
            "max_positions": positions,
            "tie_embeddings": config.boolean("tie_word_embeddings", True),
            "scale_embeddings": config.boolean("scale_embedding", not self.learned),
            "output_bias": self.output_bias,
        }

    def _tensors(self, settings: TransformerSettings, tokenizer: Tokenizer) -> TensorMap:
        vocabulary = VocabularyRows(ids_of(tokenizer))
        table = layered(marian.ENCODER, settings.encoder_layers) + layered(marian.DECODER, settings.decoder_layers)
        table.append(Entry(SHARED, "source_embedding.table", vocabulary))
        if self.norm_first:
            table += layered(FINAL_NORMS)
        for side, ours in SIDES.items():
            if self.embedding_norm:
                table += layered([Entry(f"model.{side}.layernorm_embedding.{{p}}", f"{ours}.norm.{{p}}")])
            if self.learned:
                name = f"model.{side}.embed_positions.weight"
                table.append(Entry(name, f"{ours}.positions.table", WithoutFirst(OFFSET)))
        copies = dict.fromkeys(SEPARATE, SHARED)
        if settings.tie_embeddings:
            copies[OUTPUT] = SHARED
        else:
            table.append(Entry(OUTPUT, "output", vocabulary))
        defaults = {}
        if self.output_bias:
            table.append(Entry(BIAS, "output_bias", VocabularyRows(vocabulary.ids, absent=NEG_LOGIT, flat=True)))
            defaults[BIAS] = torch.zeros(1, max(vocabulary.ids) + 1)
        dropped = [] if self.learned else [r"model\.(en|de)coder\.embed_positions\.weights?"]
        return TensorMap(table, IgnoredTensors(dropped, copies), defaults)


TRANSLATORS = {  # by model_type
    "bart": TranslatorImporter(norm_first=False, learned=True, embedding_norm=True, output_bias=True),
    "mbart": TranslatorImporter(norm_first=True, learned=True, embedding_norm=True, output_bias=True),
    "m2m_100": TranslatorImporter(norm_first=True, learned=False, embedding_norm=False, output_bias=False),
}


def _tokenizer(folder: HFFolder, size: int) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer and the tags of source and target: the language codes, or BART's <s>."""
    eos, pad = end_of_text(folder, 2, size), token(folder, "pad_token_id", 1, size)
    start = token(folder, "decoder_start_token_id", eos, size)
    start = eos if start is None else start
    forced = _forced(folder, size)
    if not folder.has(FILE):
        tokenizer, before = _m2m100(folder, size, (pad, start, eos))
    else:
        vocabulary = vocabulary_of(folder, size)
        unk = spelled(folder, "unk_token", vocabulary)
        before, after = surrounding(folder)
        if len(before) > 1 or after != [eos]:
            raise UserError(
                f"{folder.path / FILE}: post_processor must add at most one token before a text, and EOS after it, to "
                "have a counterpart here"
            )
        specials = None if pad in (start, eos) else pad, start, eos, vocabulary.get("<unk>") if unk is None else unk
        tokenizer = read_fast_tokenizer(folder, size, specials)
    given = folder.json("tokenizer_config.json")
    tags = {"source_tag": _tag(tokenizer, before[0] if before else None)}
    named = given.text("tgt_lang")
    target = _tag(tokenizer, forced)
    tags["target_tag"] = target if target is not None or named not in tokenizer.tags else named
    return tokenizer, {name: tag for name, tag in tags.items() if tag is not None}


def _forced(folder: HFFolder, size: int) -> int | None:
    """The id that every target begins with."""
    for config in (folder.json("generation_config.json"), folder.config):
        if (forced := config.integer("forced_bos_token_id")) is not None:
            if not 0 <= forced < size:
                raise config.error("forced_bos_token_id", f"= {short_repr(forced)} is not one of the {size} tokens")
            return forced
    return None


def _tag(tokenizer: Tokenizer, theirs: int | None) -> str | None:
    """Our tag for one of their ids."""
    ours = None if theirs is None else inverse(ids_of(tokenizer))[theirs]
    if ours is None or ours <= EOS + 1:
        return None
    return tokenizer.tags[ours - EOS - 2] if ours < tokenizer.first else None


def _m2m100(folder: HFFolder, size: int, specials: tuple[int | None, int, int]) -> tuple[Tokenizer, list[int]]:
    """M2M100 has no tokenizer.json: language codes follow the vocabulary in the order of special_tokens_map.json."""
    words = checked_vocabulary(folder.json("vocab.json"), size)
    given = folder.json("special_tokens_map.json")
    codes = [code for code in given.items("additional_special_tokens") or given.items("extra_special_tokens")]
    added = {code: len(words) + i for i, code in enumerate(codes) if isinstance(code, str)}
    pad, start, eos = specials
    tokenizer = read_sentencepiece(
        folder, (SPM,), "vocab.json", size, (None if pad in (start, eos) else pad, start, eos), added
    )
    code = f"__{folder.json('tokenizer_config.json').text('src_lang') or 'en'}__"
    return tokenizer, [added[code]] if code in added else []
