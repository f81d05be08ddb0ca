"""Convert between GPT-2 in Hugging Face's layout and our GPT with learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

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
from regard.interop.hf_folder import Files, HFFolder, TensorInfo, as_json
from regard.interop.name_map import TRANSPOSED, Entry, IgnoredTensors, VocabularyRows, inverse, layered
from regard.interop.vocabularies import adds_bos, ids_of, read_bpe, write_bpe
from regard.models.gpt import GPTSettings
from regard.recipes.schema import Recipe
from regard.special_tokens import SPECIAL_TOKENS, UNK
from regard.tensor_io import Tensors
from regard.text import BOS, EOS, PAD, Tokenizer
from regard.text.tokenizers import BytePairTokenizer

CLASS = "GPT2LMHeadModel"
BODY = "transformer."  # prefix of every name except the output's, unless only the body was saved

DECODER = [
    Entry("transformer.wpe.weight", "embedding.positions.table"),
    Entry("transformer.h.{i}.ln_1.{p}", "decoder.{i}.self_attn_residual.norm.{p}"),
    Entry("transformer.h.{i}.attn.c_attn.{p}", "decoder.{i}.self_attn.qkv_proj.{p}", TRANSPOSED),
    Entry("transformer.h.{i}.attn.c_proj.{p}", "decoder.{i}.self_attn.out_proj.{p}", TRANSPOSED),
    Entry("transformer.h.{i}.ln_2.{p}", "decoder.{i}.feed_forward_residual.norm.{p}"),
    Entry("transformer.h.{i}.mlp.c_fc.{p}", "decoder.{i}.feed_forward.w_in.{p}", TRANSPOSED),
    Entry("transformer.h.{i}.mlp.c_proj.{p}", "decoder.{i}.feed_forward.w_out.{p}", TRANSPOSED),
    Entry("transformer.ln_f.{p}", "decoder.norm.{p}"),
]
EMBEDDING = "transformer.wte.weight"
OUTPUT = "lm_head.weight"


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    settings, vectors = cast(GPTSettings, recipe.model), VocabularyRows(ids_of(target))
    table = [Entry(EMBEDDING, "embedding.table", vectors), *layered(DECODER, settings.layers)]
    return table if settings.tie_embeddings else [*table, Entry(OUTPUT, "output", vectors)]


def ignored(recipe: Recipe) -> IgnoredTensors:
    """Tensors of a file that are not converted: old files contain each layer's causal mask."""
    tied = cast(GPTSettings, recipe.model).tie_embeddings
    return IgnoredTensors([r"transformer\.h\.\d+\.attn\.(masked_)?bias"], {OUTPUT: EMBEDDING} if tied else {})


def canonical(header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by the names in the table."""
    if EMBEDDING in header:
        return dict(header)
    return {name if name == OUTPUT else BODY + name: stored for name, stored in header.items()}


def defaults(target: Tokenizer) -> Tensors:
    return {}


def constants(recipe: Recipe) -> Tensors:
    return {}


def read(folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
    folder.require(
        add_cross_attention=False,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        layer_norm_epsilon=1e-5,
    )
    width = count(folder, "n_embd", 768)
    settings = {
        "width": width,
        "heads": count(folder, "n_head", 12),
        "layers": layers(folder, "n_layer", 12),
        "ffn_width": 4 * width if folder.setting("n_inner") is None else count(folder, "n_inner"),
        "dropout": fraction(folder, "resid_pdrop", 0.1),
        "activation": activation(folder, "activation_function", "gelu_new"),
        "max_positions": rows(folder, "n_positions", 1024, header, "transformer.wpe.weight"),
        "tie_embeddings": folder.config.boolean("tie_word_embeddings", True),
    }
    return imported(folder, settings, rows(folder, "vocab_size", 50257, header, EMBEDDING), end_of_text_id=50256)


def imported(folder: HFFolder, settings: dict[str, Any], vocabulary: int, end_of_text_id: int) -> Imported:
    """The recipe and tokenizer of a decoder with byte-level BPE, given the settings of our GPT."""
    eos = end_of_text(folder, end_of_text_id, vocabulary)
    bos, pad = (
        token(folder, "bos_token_id", end_of_text_id, vocabulary),
        token(folder, "pad_token_id", None, vocabulary),
    )
    bos = eos if bos is None else bos
    tokenizer = read_bpe(folder, vocabulary, (None if pad in (bos, eos) else pad, bos, eos, None))
    recipe = {
        # most published models were trained on text without special tokens
        "data": {"imported": "text", "documents": "paragraph" if adds_bos(folder) else "stream"},
        "text": {"unit": "bpe", "vocabulary": max(260, len(tokenizer))},
        "model": {"family": "gpt", "size": "gpt2", **settings, "unused": unused_ids(tokenizer)},
    }
    return Imported(Recipe.model_validate(recipe), tokenizer, tokenizer)


def unused_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids without a token of theirs, and BOS if it is the same token as EOS: it would be predicted twice."""
    ids = ids_of(tokenizer)
    return sorted(set(range(len(ids))) - set(inverse(ids)))


def unsupported(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[str]:
    """The settings of a run that GPT-2 cannot express."""
    return unsupported_decoder(recipe, target, "GPT-2", positions="learned")


def unsupported_decoder(recipe: Recipe, target: Tokenizer, whose: str, **wanted: Any) -> list[str]:
    wanted |= {"norm": "layer", "mask": "causal", "scale_embeddings": False, "unused": unused_ids(target)}
    problems = unsupported_settings(cast(GPTSettings, recipe.model), whose, **wanted)
    if not recipe.text.shared:
        problems.append(f"text.shared = false has no counterpart in {whose}, which has one vocabulary")
    if not isinstance(target, BytePairTokenizer):
        problems.append(f'text.unit = "{target.unit}" has no counterpart in {whose}\'s files (only bpe has)')
    return problems


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
        "activation_function": hf_activation(settings.activation),
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
    """The tokenizer's files and, unless it was imported, generation settings that suppress special tokens."""
    stream = recipe.data.documents == "stream"
    written = write_bpe(cast(BytePairTokenizer, target), add_bos=not stream)
    if target.foreign is not None:
        return written
    suppressed = [PAD, BOS, UNK, *range(len(SPECIAL_TOKENS), target.first), *([EOS] if stream else [])]
    roles = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return written | {"generation_config.json": as_json({**roles, "suppress_tokens": sorted(suppressed)})}
