"""GPT-2 in Hugging Face's layout, and our GPT: learned positions, norms before, matrices stored the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from regard.errors import UserError
from regard.formats.counterparts import Imported, activation, count, insist, spelt_activation, token
from regard.formats.folders import Files, Folder
from regard.formats.tables import TURNED, Entry, Leftovers, Rows, inverse, layered
from regard.formats.vocabularies import begins_texts, ids_of, read_bytes_bpe, write_bytes_bpe
from regard.recipes.schema import GPTSettings, Recipe
from regard.text import BEGIN, END, FILL, Tokenizer
from regard.weights import Tensors

CLASS = "GPT2LMHeadModel"
BODY = "transformer."  # what every name but the output's begins with, unless only the body was saved

DECODER = [
    Entry("transformer.wpe.weight", "embedding.positions.table"),
    Entry("transformer.h.{i}.ln_1.{p}", "decoder.{i}.own_residual.norm.{p}"),
    Entry("transformer.h.{i}.attn.c_attn.{p}", "decoder.{i}.own.query_key_value.{p}", TURNED),
    Entry("transformer.h.{i}.attn.c_proj.{p}", "decoder.{i}.own.out.{p}", TURNED),
    Entry("transformer.h.{i}.ln_2.{p}", "decoder.{i}.feed_forward_residual.norm.{p}"),
    Entry("transformer.h.{i}.mlp.c_fc.{p}", "decoder.{i}.feed_forward.into.{p}", TURNED),
    Entry("transformer.h.{i}.mlp.c_proj.{p}", "decoder.{i}.feed_forward.out.{p}", TURNED),
    Entry("transformer.ln_f.{p}", "decoder_norm.{p}"),
]
EMBEDDING = "transformer.wte.weight"
OUTPUT = "lm_head.weight"


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    settings, rows = cast(GPTSettings, recipe.model), Rows(ids_of(target))
    table = [Entry(EMBEDDING, "embedding.table", rows), *layered(DECODER, settings.layers)]
    return table if settings.tied else [*table, Entry(OUTPUT, "output", rows)]


def leftovers(recipe: Recipe) -> Leftovers:
    """Old files hold each layer's causal mask."""
    tied = cast(GPTSettings, recipe.model).tied
    return Leftovers([r"transformer\.h\.\d+\.attn\.(masked_)?bias"], {OUTPUT: EMBEDDING} if tied else {})


def renamed(tensors: Tensors, folder: Folder) -> Tensors:
    if EMBEDDING in tensors:
        return tensors
    return {name if name == OUTPUT else BODY + name: tensor for name, tensor in tensors.items()}


def read(folder: Folder) -> Imported:
    folder.insist(
        add_cross_attention=False,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        layer_norm_epsilon=1e-5,
    )
    rows, width = count(folder, "vocab_size", 50257), count(folder, "n_embd", 768)
    end = token(folder, "eos_token_id", 50256, rows)
    if end is None:
        raise UserError(f"{folder.path / 'config.json'}: eos_token_id is missing, or outside the vocabulary")
    begin, fill = token(folder, "bos_token_id", 50256, rows), token(folder, "pad_token_id", None, rows)
    begin = end if begin is None else begin
    marks = {"fill": None if fill in (begin, end) else fill, "begin": begin, "end": end, "unknown": None}
    tokenizer = read_bytes_bpe(folder, rows, marks)
    settings = {
        "family": "gpt",
        "size": "gpt2",
        "width": width,
        "heads": count(folder, "n_head", 12),
        "layers": count(folder, "n_layer", 12),
        "inner": count(folder, "n_inner") if folder.setting("n_inner") else 4 * width,
        "dropout": folder.setting("resid_pdrop", 0.1),
        "activation": activation(folder, "activation_function", "gelu_new"),
        "max_positions": count(folder, "n_positions", 1024),
        "tied": bool(folder.setting("tie_word_embeddings", True)),
        "unused": _unused(ids_of(tokenizer)),
    }
    recipe = {
        # most of theirs were trained on texts without marks
        "data": {"imported": "text", "documents": "paragraph" if begins_texts(folder) else "stream"},
        "text": {"unit": "bpe", "vocabulary": max(260, len(tokenizer))},
        "model": settings,
    }
    return Imported(Recipe.model_validate(recipe), tokenizer, tokenizer)


def _unused(ids: Sequence[int]) -> list[int]:
    """Ids that they did not have, and BEGIN where it is their END over again: else it would be predicted twice."""
    return sorted(set(range(len(ids))) - set(inverse(ids)))


def config(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
    settings = cast(GPTSettings, recipe.model)
    insist(settings, "GPT-2", norm="layer", positions="learned", mask="causal", scaled=False)
    if not recipe.text.shared:
        raise UserError("text.shared = false has no counterpart in GPT-2, which has one vocabulary")
    ids = ids_of(target)
    insist(settings, "GPT-2", unused=_unused(ids))
    return {
        "architectures": [CLASS],
        "model_type": "gpt2",
        "vocab_size": max(ids) + 1,
        "n_embd": settings.width,
        "n_head": settings.heads,
        "n_layer": settings.layers,
        "n_inner": settings.inner,
        "n_positions": settings.max_positions,
        "activation_function": spelt_activation(settings.activation, "GPT-2"),
        "embd_pdrop": settings.dropout,
        "resid_pdrop": settings.dropout,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": settings.tied,
        "bos_token_id": ids[BEGIN],
        "eos_token_id": ids[END],
        "pad_token_id": ids[FILL] if ids[FILL] >= 0 else None,
        "dtype": "float32",
    }


def files(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
    return write_bytes_bpe(target, begins=recipe.data.documents != "stream")
