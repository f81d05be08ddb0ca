"""Convert between Marian in Hugging Face's layout and our Transformer with norms after each sub-layer.

Marian's decoder starts with the padding token, the last of the vocabulary, whose embedding is zero; CTranslate2's
converter relies on both. Ours starts with BOS. In an export, its embedding is therefore part of the position vector of
the decoder's first position, which no other token has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F

from regard.errors import UserError
from regard.interop.common import (
    Imported,
    activation,
    count,
    end_of_text,
    fraction,
    hf_activation,
    layers,
    rows,
    token,
    unsupported_settings,
)
from regard.interop.generation import POWER, beams, length_penalty
from regard.interop.hf_folder import Files, HFFolder, TensorInfo, as_json, short_repr
from regard.interop.name_map import Entry, IgnoredTensors, VocabularyRows, layered
from regard.interop.vocabularies import (
    added_tokens,
    ids_of,
    read_fast,
    read_sentencepiece,
    unsupported_tokenizer,
    write_fast,
    write_sentencepiece,
)
from regard.models.transformer_settings import TransformerSettings
from regard.nn.positions import SinusoidalSplit
from regard.recipes.schema import Recipe
from regard.special_tokens import SPECIAL_TOKENS, UNK
from regard.tensor_io import Tensors
from regard.text import BOS, EOS, PAD, Tokenizer
from regard.text.tokenizers import SentencePieceTokenizer

CLASS = "MarianMTModel"
MAX_POSITION_TABLE = 2**26  # elements of a computed position table, whose size no tensor confirms
NEG_LOGIT = -1e4  # bias of an id without a token of theirs; finite, so that losses with label smoothing are finite

ENCODER = [
    Entry("model.encoder.layers.{i}.self_attn.{q,k,v}_proj.{p}", "encoder.{i}.self_attn.qkv_proj.{p}"),
    Entry("model.encoder.layers.{i}.self_attn.out_proj.{p}", "encoder.{i}.self_attn.out_proj.{p}"),
    Entry("model.encoder.layers.{i}.self_attn_layer_norm.{p}", "encoder.{i}.self_attn_residual.norm.{p}"),
    Entry("model.encoder.layers.{i}.fc1.{p}", "encoder.{i}.feed_forward.w_in.{p}"),
    Entry("model.encoder.layers.{i}.fc2.{p}", "encoder.{i}.feed_forward.w_out.{p}"),
    Entry("model.encoder.layers.{i}.final_layer_norm.{p}", "encoder.{i}.feed_forward_residual.norm.{p}"),
]
DECODER = [
    *(Entry(entry.theirs.replace("encoder", "decoder"), entry.ours.replace("encoder", "decoder")) for entry in ENCODER),
    Entry("model.decoder.layers.{i}.encoder_attn.q_proj.{p}", "decoder.{i}.cross_attn.q_proj.{p}"),
    Entry("model.decoder.layers.{i}.encoder_attn.{k,v}_proj.{p}", "decoder.{i}.cross_attn.kv_proj.{p}"),
    Entry("model.decoder.layers.{i}.encoder_attn.out_proj.{p}", "decoder.{i}.cross_attn.out_proj.{p}"),
    Entry("model.decoder.layers.{i}.encoder_attn_layer_norm.{p}", "decoder.{i}.cross_attn_residual.norm.{p}"),
]
SHARED = "model.shared.weight"
SEPARATE = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
OUTPUT = "lm_head.weight"
BIAS = "final_logits_bias"
UNUSED = "<unused>"  # the spelling of our padding token where there is another one


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    settings = cast(TransformerSettings, recipe.model)
    table = layered(ENCODER, settings.encoder_layers) + layered(DECODER, settings.decoder_layers)
    if recipe.text.shared:
        table.append(Entry(SHARED, "source_embedding.table", VocabularyRows(ids_of(source))))
    else:
        table.append(Entry(SEPARATE[0], "source_embedding.table", VocabularyRows(ids_of(source))))
        table.append(Entry(SEPARATE[1], "target_embedding.table", VocabularyRows(ids_of(target))))
    if not settings.tie_embeddings:
        table.append(Entry(OUTPUT, "output", VocabularyRows(ids_of(target))))
    if settings.output_bias:
        table.append(Entry(BIAS, "output_bias", VocabularyRows(ids_of(target), absent=NEG_LOGIT, flat=True)))
    return table


def ignored(recipe: Recipe) -> IgnoredTensors:
    """Tensors of a file that are not converted: positions are computed, and a shared embedding may be stored twice."""
    settings = cast(TransformerSettings, recipe.model)
    copies = dict.fromkeys(SEPARATE, SHARED) if recipe.text.shared else {}
    if settings.tie_embeddings:
        copies[OUTPUT] = SHARED if recipe.text.shared else SEPARATE[1]
    written = SEPARATE if recipe.text.shared and not settings.tie_embeddings else ()
    return IgnoredTensors([r"model\.(en|de)coder\.embed_positions\.weight"], copies, written)


def canonical(header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    return dict(header)


def defaults(target: Tokenizer) -> Tensors:
    """Tensors that a file may lack: the bias on the logits is zero then."""
    return {BIAS: torch.zeros(1, max(ids_of(target)) + 1)}


def constants(recipe: Recipe) -> Tensors:
    return {}


def read(folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
    folder.require(normalize_before=False, normalize_embedding=False, add_final_layer_norm=False)
    return imported(folder, header, norm_first=False, positions="sinusoidal-split")


def imported(folder: HFFolder, header: Mapping[str, TensorInfo], **ours: Any) -> Imported:
    """The recipe and tokenizers of an encoder-decoder with Marian's settings; `ours` are the others of our model."""
    for name in ("attention_heads", "ffn_dim"):
        sizes = count(folder, f"encoder_{name}"), count(folder, f"decoder_{name}")
        if sizes[0] != sizes[1]:
            raise UserError(
                f"{folder.path}: encoder_{name} {sizes[0]} and decoder_{name} {sizes[1]} must be equal here"
            )
    shared = folder.config.boolean("share_encoder_decoder_embeddings", True)
    source, target = _tokenizers(folder, header) if shared else _separate_tokenizers(folder, header)
    width, positions = count(folder, "d_model"), folder.setting("max_position_embeddings", 1024)
    if not isinstance(positions, int) or positions < 2 or positions * width > MAX_POSITION_TABLE:
        raise folder.config.error(
            "max_position_embeddings", f"= {short_repr(positions)} is not a possible number of positions"
        )
    settings: dict[str, Any] = {
        "family": "transformer",
        "width": width,
        "heads": count(folder, "encoder_attention_heads"),
        "encoder_layers": layers(folder, "encoder_layers"),
        "decoder_layers": layers(folder, "decoder_layers"),
        "ffn_width": count(folder, "encoder_ffn_dim"),
        "dropout": fraction(folder, "dropout", 0.1),
        "activation": activation(folder, "activation_function", "gelu"),
        "max_positions": positions,
        "tie_embeddings": folder.config.boolean("tie_word_embeddings", True),
        "scale_embeddings": folder.config.boolean("scale_embedding", False),
        "output_bias": True,
        **ours,
    }
    recipe = {
        "data": {"imported": "pairs"},
        "text": {"unit": source.unit, "vocabulary": max(260, len(source), len(target)), "shared": shared},
        "model": settings,
        "decoding": {"beam": beams(folder, 4), "length_penalty": length_penalty(folder)},
    }
    return Imported(Recipe.model_validate(recipe), source, target)


def _tokenizers(folder: HFFolder, header: Mapping[str, TensorInfo]) -> tuple[Tokenizer, Tokenizer]:
    size = rows(folder, "vocab_size", None, header, SHARED)
    if (other := count(folder, "decoder_vocab_size", size)) != size:
        raise folder.config.error("decoder_vocab_size", f"= {other}, but both sides share {size} embeddings")
    specials = _special_ids(folder, size)
    if folder.has("tokenizer.json") and not folder.has("source.spm"):  # exported from regard
        added = added_tokens(folder, size)
        bos = added.get(folder.specials.get("bos_token", ""), specials[1])
        pad = token(folder, "pad_token_id", None, size)
        unk = added.get(folder.specials.get("unk_token", SPECIAL_TOKENS[UNK]))
        tokenizer: Tokenizer = read_fast(folder, size, (None if pad == bos else pad, bos, specials[2], unk))
    else:
        tokenizer = read_sentencepiece(folder, ("source.spm", "target.spm"), "vocab.json", size, specials)
    return tokenizer, tokenizer.target_side()


def _separate_tokenizers(folder: HFFolder, header: Mapping[str, TensorInfo]) -> tuple[Tokenizer, Tokenizer]:
    size = rows(folder, "vocab_size", None, header, SEPARATE[0])
    target_size = rows(folder, "decoder_vocab_size", size, header, SEPARATE[1])
    return (
        read_sentencepiece(folder, ("source.spm",), "vocab.json", size, _special_ids(folder, size)),
        read_sentencepiece(
            folder, ("target.spm",), "target_vocab.json", target_size, _special_ids(folder, target_size)
        ),
    )


def _special_ids(folder: HFFolder, rows: int) -> tuple[int | None, int | None, int]:
    """Their ids of PAD, BOS and EOS: the decoder starts with the padding token, or with one of its own."""
    pad, eos = token(folder, "pad_token_id", 58100, rows), end_of_text(folder, 0, rows)
    bos = token(folder, "decoder_start_token_id", pad, rows)
    return (None if pad == bos else pad), bos, eos


def unsupported(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[str]:
    """The settings of a run that Marian cannot express."""
    wanted = {"norm_first": False, "positions": "sinusoidal-split", "position_base": 10000.0}
    return unsupported_translator(recipe, source, "Marian", **wanted)


def unsupported_translator(recipe: Recipe, source: Tokenizer, whose: str, **wanted: Any) -> list[str]:
    wanted |= {"norm": "layer", "se_dim": 0, "qk_norm": False}
    problems = unsupported_settings(cast(TransformerSettings, recipe.model), whose, **wanted)
    if not isinstance(source, SentencePieceTokenizer):
        problems += unsupported_tokenizer(source)
        if not recipe.text.shared:
            unit = f'text.shared = false with text.unit = "{source.unit}"'
            problems.append(f"{unit} has no counterpart in {whose}'s files")
    return problems


def _starts_from_padding(recipe: Recipe, target: Tokenizer) -> bool:
    """Whether an export moves the embedding of BOS into the positions: also that of an export imported again."""
    ids, is_ours = ids_of(target), not isinstance(target, SentencePieceTokenizer)
    return is_ours and not cast(TransformerSettings, recipe.model).norm_first and 0 <= ids[PAD] != ids[BOS]


def _adds_padding(recipe: Recipe, target: Tokenizer) -> bool:
    """Whether an export has a padding token after our vocabulary: an imported one has its own."""
    return _starts_from_padding(recipe, target) and target.foreign is None


def with_zero_start(tensors: Tensors, recipe: Recipe, target: Tokenizer) -> Tensors:
    """Add the row of the padding token, and the positions of the decoder with the embedding of BOS."""
    if not _starts_from_padding(recipe, target):
        return tensors
    settings = cast(TransformerSettings, recipe.model)
    positions = torch.arange(settings.max_positions)
    table = SinusoidalSplit(settings.width)(positions, positions).clone()
    scale = settings.width**0.5 if settings.scale_embeddings else 1.0
    table[0] += scale * tensors[SHARED if recipe.text.shared else SEPARATE[1]][ids_of(target)[BOS]]
    if _adds_padding(recipe, target):
        added = {name: F.pad(tensors[name], (0, 0, 0, 1)) for name in (SHARED, *SEPARATE, OUTPUT) if name in tensors}
        added |= {BIAS: F.pad(tensors[BIAS], (0, 1), value=NEG_LOGIT)} if BIAS in tensors else {}
        tensors = tensors | added
    return tensors | {"model.decoder.embed_positions.weight": table}


def config(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
    settings = cast(TransformerSettings, recipe.model)
    ids = ids_of(target)
    added = int(_adds_padding(recipe, target))
    padding = max(ids) + 1 if added else ids[PAD]
    start, end = padding if _starts_from_padding(recipe, target) else ids[BOS], ids[EOS]
    return {
        "architectures": [CLASS],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": max(ids_of(source)) + 1 + added,
        "decoder_vocab_size": max(ids) + 1 + added,
        "d_model": settings.width,
        "encoder_layers": settings.encoder_layers,
        "decoder_layers": settings.decoder_layers,
        "encoder_attention_heads": settings.heads,
        "decoder_attention_heads": settings.heads,
        "encoder_ffn_dim": settings.ffn_width,
        "decoder_ffn_dim": settings.ffn_width,
        "dropout": settings.dropout,
        "activation_function": "swish" if settings.activation == "silu" else hf_activation(settings.activation),
        "max_position_embeddings": settings.max_positions,
        "scale_embedding": settings.scale_embeddings,
        "share_encoder_decoder_embeddings": recipe.text.shared,
        "tie_word_embeddings": settings.tie_embeddings,
        "pad_token_id": padding if padding >= 0 else start,
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "forced_eos_token_id": end,
        "dtype": "float32",
    }


def files(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
    """The tokenizer's files, and generation settings that suppress special tokens."""
    written = generation_settings(config(recipe, source, target), recipe, target)
    if isinstance(source, SentencePieceTokenizer) and isinstance(target, SentencePieceTokenizer):
        return written | write_sentencepiece(source, target, recipe.text.shared)
    fast = write_fast(source, "$A </s>")
    return written | (_with_padding(fast, max(ids_of(target)) + 1) if _adds_padding(recipe, target) else fast)


def _with_padding(files: Files, padding: int) -> Files:
    """Rename our padding token, which is first, and add another one after all tokens."""
    tokenizer = json.loads(files["tokenizer.json"])
    first, vocabulary = tokenizer["added_tokens"][0], tokenizer["model"]["vocab"]
    last = {**first, "id": padding}
    first["content"] = UNUSED
    tokenizer["added_tokens"].append(last)
    vocabulary[UNUSED] = vocabulary.pop(last["content"])
    vocabulary[last["content"]] = padding
    return files | {"tokenizer.json": as_json(tokenizer)}


def generation_settings(config: Mapping[str, Any], recipe: Recipe, target: Tokenizer) -> Files:
    roles = ("pad_token_id", "decoder_start_token_id", "eos_token_id", "forced_eos_token_id")
    forbidden = [ids_of(target)[token] for token in target.forbidden()] if target.foreign is None else []
    suppressed = sorted({config["pad_token_id"], config["decoder_start_token_id"], *forbidden})
    generation = {
        **{name: config[name] for name in roles},
        "bad_words_ids": [[token] for token in suppressed],
        "num_beams": recipe.decoding.beam,
        "length_penalty": round(POWER * recipe.decoding.length_penalty, 6),
        "max_length": recipe.model.max_positions,
    }
    return {"generation_config.json": as_json(generation)}
