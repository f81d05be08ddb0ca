"""GPT-2 in Hugging Face's layout, and our GPT: learned positions, norms before, matrices stored the other way round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

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
from regard.interop.hf_folder import Files, HFFolder, Stored, as_json
from regard.interop.name_map import TURNED, Entry, IgnoredTensors, VocabularyRows, inverse, layered
from regard.interop.vocabularies import begins_texts, ids_of, read_bytes_bpe, write_bytes_bpe
from regard.recipes.schema import GPTSettings, Recipe
from regard.special_tokens import SPECIAL_TOKENS, UNK
from regard.tensor_io import Tensors
from regard.text import BOS, EOS, PAD, Tokenizer
from regard.text.tokenizers import BytePairTokenizer

CLASS = "GPT2LMHeadModel"
BODY = "transformer."  # what every name but the output's begins with, unless only the body was saved

DECODER = [
    Entry("transformer.wpe.weight", "embedding.positions.table"),
    Entry("transformer.h.{i}.ln_1.{p}", "decoder.{i}.self_attn_residual.norm.{p}"),
    Entry("transformer.h.{i}.attn.c_attn.{p}", "decoder.{i}.self_attn.qkv_proj.{p}", TURNED),
    Entry("transformer.h.{i}.attn.c_proj.{p}", "decoder.{i}.self_attn.out_proj.{p}", TURNED),
    Entry("transformer.h.{i}.ln_2.{p}", "decoder.{i}.feed_forward_residual.norm.{p}"),
    Entry("transformer.h.{i}.mlp.c_fc.{p}", "decoder.{i}.feed_forward.w_in.{p}", TURNED),
    Entry("transformer.h.{i}.mlp.c_proj.{p}", "decoder.{i}.feed_forward.w_out.{p}", TURNED),
    Entry("transformer.ln_f.{p}", "decoder.norm.{p}"),
]
EMBEDDING = "transformer.wte.weight"
OUTPUT = "lm_head.weight"


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    settings, vectors = cast(GPTSettings, recipe.model), VocabularyRows(ids_of(target))
    table = [Entry(EMBEDDING, "embedding.table", vectors), *layered(DECODER, settings.layers)]
    return table if settings.tie_embeddings else [*table, Entry(OUTPUT, "output", vectors)]


def leftovers(recipe: Recipe) -> IgnoredTensors:
    """Old files hold each layer's causal mask."""
    tied = cast(GPTSettings, recipe.model).tie_embeddings
    return IgnoredTensors([r"transformer\.h\.\d+\.attn\.(masked_)?bias"], {OUTPUT: EMBEDDING} if tied else {})


def canonical(header: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors by the names of the table."""
    if EMBEDDING in header:
        return dict(header)
    return {name if name == OUTPUT else BODY + name: stored for name, stored in header.items()}


def defaults(target: Tokenizer) -> Tensors:
    """Tensors that a folder need not hold."""
    return {}


def read(folder: HFFolder, header: Mapping[str, Stored]) -> Imported:
    folder.insist(
        add_cross_attention=False,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        layer_norm_epsilon=1e-5,
    )
    vocabulary, width = rows(folder, "vocab_size", 50257, header, EMBEDDING), count(folder, "n_embd", 768)
    end = token(folder, "eos_token_id", 50256, vocabulary)
    if end is None:
        raise UserError(f"{folder.path / 'config.json'}: eos_token_id is missing, or outside the vocabulary")
    begin, fill = token(folder, "bos_token_id", 50256, vocabulary), token(folder, "pad_token_id", None, vocabulary)
    begin = end if begin is None else begin
    tokenizer = read_bytes_bpe(folder, vocabulary, (None if fill in (begin, end) else fill, begin, end, None))
    settings = {
        "family": "gpt",
        "size": "gpt2",
        "width": width,
        "heads": count(folder, "n_head", 12),
        "layers": layers(folder, "n_layer", 12),
        "ffn_width": 4 * width if folder.setting("n_inner") is None else count(folder, "n_inner"),
        "dropout": fraction(folder, "resid_pdrop", 0.1),
        "activation": activation(folder, "activation_function", "gelu_new"),
        "max_positions": rows(folder, "n_positions", 1024, header, "transformer.wpe.weight"),
        "tie_embeddings": folder.config.flag("tie_word_embeddings", True),
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


def lacks(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[str]:
    """What of a run has no counterpart in GPT-2."""
    settings = cast(GPTSettings, recipe.model)
    wanted = {"norm": "layer", "positions": "learned", "mask": "causal", "scale_embeddings": False}
    found = obstacles(settings, "GPT-2", **wanted, unused=_unused(ids_of(target)))
    if not recipe.text.shared:
        found.append("text.shared = false has no counterpart in GPT-2, which has one vocabulary")
    if not isinstance(target, BytePairTokenizer):
        found.append(f'text.unit = "{target.unit}" has no counterpart in GPT-2\'s files (only bpe has)')
    return found


def config(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
    settings, ids = cast(GPTSettings, recipe.model), ids_of(target)
    return {
        "architectures": [CLASS],
        "model_type": "gpt2",
        "vocab_size": max(ids) + 1,
        "n_embd": settings.width,
        "n_head": settings.heads,
        "n_layer": settings.layers,
        "n_inner": settings.ffn_width,
        "n_positions": settings.max_positions,
        "activation_function": spelt_activation(settings.activation),
        "embd_pdrop": settings.dropout,
        "resid_pdrop": settings.dropout,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": settings.tie_embeddings,
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD] if ids[PAD] >= 0 else None,
        "dtype": "float32",
    }


def files(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
    """Tokenizer and, for a model of our own, generation settings: what is not text is never written."""
    stream = recipe.data.documents == "stream"
    written = write_bytes_bpe(cast(BytePairTokenizer, target), begins=not stream)
    if target.foreign is not None:
        return written
    silent = [PAD, BOS, UNK, *range(len(SPECIAL_TOKENS), target.first), *([EOS] if stream else [])]
    roles = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return written | {"generation_config.json": as_json({**roles, "suppress_tokens": sorted(silent)})}
