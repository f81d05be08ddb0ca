"""Marian in Hugging Face's layout, and our Transformer: norms after, positions in halves, a bias on the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from regard.errors import UserError
from regard.interop.common import (
    Imported,
    activation,
    count,
    fraction,
    layers,
    obstacles,
    rows,
    spelt_activation,
    token,
)
from regard.interop.hf_folder import Files, HFFolder, Stored, as_json, shown
from regard.interop.name_map import Entry, IgnoredTensors, VocabularyRows, layered
from regard.interop.vocabularies import (
    added_tokens,
    ids_of,
    no_fast,
    read_fast,
    read_sentencepiece,
    write_fast,
    write_sentencepiece,
)
from regard.recipes.schema import Recipe, TransformerSettings
from regard.special_tokens import SPECIAL_TOKENS, UNK
from regard.tensor_io import Tensors
from regard.text import BOS, EOS, PAD, Tokenizer
from regard.text.tokenizers import SentencePieceTokenizer

CLASS = "MarianMTModel"
MAX_POSITION_TABLE = 2**26  # numbers in a table of positions, which no tensor of a file confirms
NEVER = -1e4  # the bias of an id that they did not have; finite, so that smoothed losses are

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
APART = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
OUTPUT = "lm_head.weight"
BIAS = "final_logits_bias"


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    settings = cast(TransformerSettings, recipe.model)
    table = layered(ENCODER, settings.encoder_layers) + layered(DECODER, settings.decoder_layers)
    if recipe.text.shared:
        table.append(Entry(SHARED, "source_embedding.table", VocabularyRows(ids_of(source))))
    else:
        table.append(Entry(APART[0], "source_embedding.table", VocabularyRows(ids_of(source))))
        table.append(Entry(APART[1], "target_embedding.table", VocabularyRows(ids_of(target))))
    if not settings.tie_embeddings:
        table.append(Entry(OUTPUT, "output", VocabularyRows(ids_of(target))))
    if settings.output_bias:
        table.append(Entry(BIAS, "output_bias", VocabularyRows(ids_of(target), absent=NEVER, flat=True)))
    return table


def leftovers(recipe: Recipe) -> IgnoredTensors:
    """Positions are computed, and an embedding that serves several places may be written once for each."""
    settings = cast(TransformerSettings, recipe.model)
    copies = dict.fromkeys(APART, SHARED) if recipe.text.shared else {}
    if settings.tie_embeddings:
        copies[OUTPUT] = SHARED if recipe.text.shared else APART[1]
    written = APART if recipe.text.shared and not settings.tie_embeddings else ()
    return IgnoredTensors([r"model\.(en|de)coder\.embed_positions\.weight"], copies, written)


def canonical(header: Mapping[str, Stored]) -> dict[str, Stored]:
    return dict(header)


def defaults(target: Tokenizer) -> Tensors:
    """A folder need not hold a logits bias, which is zero then."""
    return {BIAS: torch.zeros(1, max(ids_of(target)) + 1)}


def read(folder: HFFolder, header: Mapping[str, Stored]) -> Imported:
    folder.insist(normalize_before=False, normalize_embedding=False, add_final_layer_norm=False)
    for name in ("attention_heads", "ffn_dim"):
        if (one := count(folder, f"encoder_{name}")) != (other := count(folder, f"decoder_{name}")):
            raise UserError(f"{folder.path}: encoder_{name} {one} and decoder_{name} {other} differ, which ours cannot")
    shared = folder.config.flag("share_encoder_decoder_embeddings", True)
    source, target = _tokenizers(folder, header) if shared else _tokenizers_apart(folder, header)
    width, positions = count(folder, "d_model"), folder.setting("max_position_embeddings", 1024)
    if not isinstance(positions, int) or positions < 2 or positions * width > MAX_POSITION_TABLE:
        raise folder.config.fault(
            "max_position_embeddings", f"= {shown(positions)} is no number of positions, or absurd"
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
        "norm_first": False,
        "positions": "sinusoidal-split",
        "max_positions": positions,
        "tie_embeddings": folder.config.flag("tie_word_embeddings", True),
        "scale_embeddings": folder.config.flag("scale_embedding", False),
        "output_bias": True,
    }
    beams = folder.json("generation_config.json").whole("num_beams") or folder.config.whole("num_beams") or 4
    recipe = {
        "data": {"imported": "pairs"},
        "text": {"unit": source.unit, "vocabulary": max(260, len(source), len(target)), "shared": shared},
        "model": settings,
        "decoding": {"beam": beams},
    }
    return Imported(Recipe.model_validate(recipe), source, target)


def _tokenizers(folder: HFFolder, header: Mapping[str, Stored]) -> tuple[Tokenizer, Tokenizer]:
    size = rows(folder, "vocab_size", None, header, SHARED)
    if (other := count(folder, "decoder_vocab_size", size)) != size:
        raise folder.config.fault("decoder_vocab_size", f"= {other}, but both sides share {size} embeddings")
    marks = _marks(folder, size)
    if folder.has("tokenizer.json") and not folder.has("source.spm"):  # a model that was exported from here
        unknown = added_tokens(folder, size).get(folder.specials.get("unk_token", SPECIAL_TOKENS[UNK]))
        one = read_fast(folder, size, (*marks, unknown))
        return one, one
    both = read_sentencepiece(folder, ("source.spm", "target.spm"), "vocab.json", size, marks)
    return both, both.target_side()


def _tokenizers_apart(folder: HFFolder, header: Mapping[str, Stored]) -> tuple[Tokenizer, Tokenizer]:
    size = rows(folder, "vocab_size", None, header, APART[0])
    target_size = rows(folder, "decoder_vocab_size", size, header, APART[1])
    return (
        read_sentencepiece(folder, ("source.spm",), "vocab.json", size, _marks(folder, size)),
        read_sentencepiece(folder, ("target.spm",), "target_vocab.json", target_size, _marks(folder, target_size)),
    )


def _marks(folder: HFFolder, rows: int) -> tuple[int | None, int | None, int]:
    """Their ids of FILL, BEGIN and END: the decoder starts with the padding token, or with one of its own."""
    fill, end = token(folder, "pad_token_id", 58100, rows), token(folder, "eos_token_id", 0, rows)
    begin = token(folder, "decoder_start_token_id", fill, rows)
    if end is None:
        raise UserError(f"{folder.path / 'config.json'}: eos_token_id is missing, or outside the vocabulary")
    return (None if fill == begin else fill), begin, end


def lacks(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[str]:
    """What of a run has no counterpart in Marian."""
    wanted = {"norm": "layer", "norm_first": False, "positions": "sinusoidal-split", "position_base": 10000.0}
    found = obstacles(cast(TransformerSettings, recipe.model), "Marian", **wanted, se_dim=0, qk_norm=False)
    if not isinstance(source, SentencePieceTokenizer):
        found += no_fast(source)
        if not recipe.text.shared:
            found.append(f'text.shared = false with text.unit = "{source.unit}" has no counterpart in Marian\'s files')
    return found


def config(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
    settings = cast(TransformerSettings, recipe.model)
    ids = ids_of(target)
    start, end = ids[BOS], ids[EOS]
    return {
        "architectures": [CLASS],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": max(ids_of(source)) + 1,
        "decoder_vocab_size": max(ids) + 1,
        "d_model": settings.width,
        "encoder_layers": settings.encoder_layers,
        "decoder_layers": settings.decoder_layers,
        "encoder_attention_heads": settings.heads,
        "decoder_attention_heads": settings.heads,
        "encoder_ffn_dim": settings.ffn_width,
        "decoder_ffn_dim": settings.ffn_width,
        "dropout": settings.dropout,
        "activation_function": "swish" if settings.activation == "silu" else spelt_activation(settings.activation),
        "max_position_embeddings": settings.max_positions,
        "scale_embedding": settings.scale_embeddings,
        "share_encoder_decoder_embeddings": recipe.text.shared,
        "tie_word_embeddings": settings.tie_embeddings,
        "pad_token_id": ids[PAD] if ids[PAD] >= 0 else start,
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "forced_eos_token_id": end,
        "dtype": "float32",
    }


def files(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
    """Tokenizer and generation settings: what is not text is never written."""
    found = config(recipe, source, target)
    own = [ids_of(target)[token] for token in target.forbidden()] if target.foreign is None else []
    silent = sorted({found["pad_token_id"], found["decoder_start_token_id"], *own})
    generation = {
        **{name: found[name] for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id")},
        "forced_eos_token_id": found["forced_eos_token_id"],
        "bad_words_ids": [[mark] for mark in silent],
        "num_beams": recipe.decoding.beam,
        "max_length": recipe.model.max_positions,
    }
    written = {"generation_config.json": as_json(generation)}
    if isinstance(source, SentencePieceTokenizer) and isinstance(target, SentencePieceTokenizer):
        return written | write_sentencepiece(source, target, recipe.text.shared)
    return written | write_fast(source, "$A </s>")
