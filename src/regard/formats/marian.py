"""Marian in Hugging Face's layout, and our Transformer: norms after, positions in halves, a bias on the logits."""

from __future__ import annotations

from typing import Any, cast

from regard.errors import UserError
from regard.formats.counterparts import Imported, activation, count, insist, spelt_activation, token
from regard.formats.folders import Files, Folder, as_json
from regard.formats.tables import Entry, Leftovers, Rows, layered
from regard.formats.vocabularies import ids_of, read_sentencepiece, write_fast, write_sentencepiece
from regard.recipes.schema import Recipe, TransformerSettings
from regard.text import BEGIN, END, FILL, Tokenizer
from regard.text.tokenizers import SentencePieceTokenizer
from regard.weights import Tensors

CLASS = "MarianMTModel"
NEVER = -1e4  # the bias of an id that they did not have; finite, so that smoothed losses are

ENCODER = [
    Entry("model.encoder.layers.{i}.self_attn.{q,k,v}_proj.{p}", "encoder.{i}.own.query_key_value.{p}"),
    Entry("model.encoder.layers.{i}.self_attn.out_proj.{p}", "encoder.{i}.own.out.{p}"),
    Entry("model.encoder.layers.{i}.self_attn_layer_norm.{p}", "encoder.{i}.own_residual.norm.{p}"),
    Entry("model.encoder.layers.{i}.fc1.{p}", "encoder.{i}.feed_forward.into.{p}"),
    Entry("model.encoder.layers.{i}.fc2.{p}", "encoder.{i}.feed_forward.out.{p}"),
    Entry("model.encoder.layers.{i}.final_layer_norm.{p}", "encoder.{i}.feed_forward_residual.norm.{p}"),
]
DECODER = [
    *(Entry(entry.theirs.replace("encoder", "decoder"), entry.ours.replace("encoder", "decoder")) for entry in ENCODER),
    Entry("model.decoder.layers.{i}.encoder_attn.q_proj.{p}", "decoder.{i}.cross.query.{p}"),
    Entry("model.decoder.layers.{i}.encoder_attn.{k,v}_proj.{p}", "decoder.{i}.cross.key_value.{p}"),
    Entry("model.decoder.layers.{i}.encoder_attn.out_proj.{p}", "decoder.{i}.cross.out.{p}"),
    Entry("model.decoder.layers.{i}.encoder_attn_layer_norm.{p}", "decoder.{i}.cross_residual.norm.{p}"),
]
SHARED = "model.shared.weight"
APART = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
OUTPUT = "lm_head.weight"


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    settings = cast(TransformerSettings, recipe.model)
    table = layered(ENCODER, settings.encoder_layers) + layered(DECODER, settings.decoder_layers)
    if recipe.text.shared:
        table.append(Entry(SHARED, "source_embedding.table", Rows(ids_of(source))))
    else:
        table.append(Entry(APART[0], "source_embedding.table", Rows(ids_of(source))))
        table.append(Entry(APART[1], "target_embedding.table", Rows(ids_of(target))))
    if not settings.tied:
        table.append(Entry(OUTPUT, "output", Rows(ids_of(target))))
    if settings.output_bias:
        table.append(Entry("final_logits_bias", "output_bias", Rows(ids_of(target), absent=NEVER, flat=True)))
    return table


def leftovers(recipe: Recipe) -> Leftovers:
    """Positions are computed, and an embedding that serves several places may be written once for each."""
    settings = cast(TransformerSettings, recipe.model)
    copies = dict.fromkeys(APART, SHARED) if recipe.text.shared else {}
    if settings.tied:
        copies[OUTPUT] = SHARED if recipe.text.shared else APART[1]
    return Leftovers([r"model\.(en|de)coder\.embed_positions\.weight"], copies)


def renamed(tensors: Tensors, folder: Folder) -> Tensors:
    """A folder need not hold a logits bias, which is zero then."""
    rows = count(folder, "decoder_vocab_size", count(folder, "vocab_size"))
    table = next(iter(tensors.values()))
    return {"final_logits_bias": table.new_zeros(1, rows)} | tensors


def read(folder: Folder) -> Imported:
    folder.insist(normalize_before=False, normalize_embedding=False, add_final_layer_norm=False)
    for name in ("attention_heads", "ffn_dim"):
        if (one := count(folder, f"encoder_{name}")) != (other := count(folder, f"decoder_{name}")):
            raise UserError(f"{folder.path}: encoder_{name} {one} and decoder_{name} {other} differ, which ours cannot")
    shared = bool(folder.setting("share_encoder_decoder_embeddings", True))
    source, target = _tokenizers(folder, shared)
    settings: dict[str, Any] = {
        "family": "transformer",
        "width": count(folder, "d_model"),
        "heads": count(folder, "encoder_attention_heads"),
        "encoder_layers": count(folder, "encoder_layers"),
        "decoder_layers": count(folder, "decoder_layers"),
        "inner": count(folder, "encoder_ffn_dim"),
        "dropout": folder.setting("dropout", 0.1),
        "activation": activation(folder, "activation_function", "gelu"),
        "norm_first": False,
        "positions": "halves",
        "max_positions": count(folder, "max_position_embeddings", 1024),
        "tied": bool(folder.setting("tie_word_embeddings", True)),
        "scaled": bool(folder.setting("scale_embedding", False)),
        "output_bias": True,
    }
    beams = folder.json("generation_config.json").get("num_beams", folder.setting("num_beams", 4))
    recipe = {
        "data": {"imported": "pairs"},
        "text": {"unit": "sentencepiece", "vocabulary": max(260, len(source), len(target)), "shared": shared},
        "model": settings,
        "decoding": {"beam": beams},
    }
    return Imported(Recipe.model_validate(recipe), source, target)


def _tokenizers(folder: Folder, shared: bool) -> tuple[Tokenizer, Tokenizer]:
    rows = count(folder, "vocab_size")
    source_marks, target_marks = (_marks(folder, size) for size in (rows, count(folder, "decoder_vocab_size", rows)))
    if shared:
        both = read_sentencepiece(folder, ("source.spm", "target.spm"), "vocab.json", rows, source_marks)
        return both, both.target_side()
    target_rows = count(folder, "decoder_vocab_size", rows)
    return (
        read_sentencepiece(folder, ("source.spm",), "vocab.json", rows, source_marks),
        read_sentencepiece(folder, ("target.spm",), "target_vocab.json", target_rows, target_marks),
    )


def _marks(folder: Folder, rows: int) -> tuple[int | None, int | None, int]:
    """Their ids of FILL, BEGIN and END: the decoder starts with the padding token, or with one of its own."""
    fill, end = token(folder, "pad_token_id", 58100, rows), token(folder, "eos_token_id", 0, rows)
    begin = token(folder, "decoder_start_token_id", fill, rows)
    if end is None:
        raise UserError(f"{folder.path / 'config.json'}: eos_token_id is missing, or outside the vocabulary")
    return (None if fill == begin else fill), begin, end


def config(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
    settings = cast(TransformerSettings, recipe.model)
    insist(settings, "Marian", norm="layer", norm_first=False, positions="halves", position_base=10000.0)
    insist(settings, "Marian", squeeze=0, qk_norm=False)
    ids = ids_of(target)
    start, end = ids[BEGIN], ids[END]
    shown = spelt_activation(settings.activation, "Marian")
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
        "encoder_ffn_dim": settings.inner,
        "decoder_ffn_dim": settings.inner,
        "dropout": settings.dropout,
        "activation_function": {"silu": "swish"}.get(shown, shown),
        "max_position_embeddings": settings.max_positions,
        "scale_embedding": settings.scaled,
        "share_encoder_decoder_embeddings": recipe.text.shared,
        "tie_word_embeddings": settings.tied,
        "pad_token_id": ids[FILL] if ids[FILL] >= 0 else start,
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "forced_eos_token_id": end,
        "dtype": "float32",
    }


def files(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
    """Tokenizer and generation settings: what marks a beginning or fill is never written."""
    found = config(recipe, source, target)
    silent = sorted({found["pad_token_id"], found["decoder_start_token_id"]})
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
    if not recipe.text.shared:
        raise UserError(f'text.unit = "{source.unit}" with text.shared = false has no counterpart in Marian\'s files')
    return written | write_fast(source, "$A </s>")
