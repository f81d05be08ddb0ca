"""Convert between GPT-NeoX in Hugging Face's layout and our GPT with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from regard.interop import gpt2
from regard.interop.common import Imported, activation, context, count, fraction, hf_activation, layers, rows
from regard.interop.gpt2 import constants, defaults, files
from regard.interop.hf_folder import HFFolder, TensorInfo
from regard.interop.name_map import Entry, IgnoredTensors, VocabularyRows, layered
from regard.interop.vocabularies import ids_of
from regard.models.gpt import GPTSettings
from regard.recipes.schema import Recipe
from regard.text import BOS, EOS, PAD, Tokenizer

__all__ = ["canonical", "config", "constants", "defaults", "entries", "files", "ignored", "read", "unsupported"]

CLASS = "GPTNeoXForCausalLM"
EMBEDDING = "gpt_neox.embed_in.weight"
OUTPUT = "embed_out.weight"


@dataclass(frozen=True)
class HeadsFirst:
    """Reorders the rows of a fused projection from [heads, 3, head_dim] to [3, heads, head_dim]."""

    heads: int

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        return [whole.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)]


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    settings, vocabulary = cast(GPTSettings, recipe.model), VocabularyRows(ids_of(target))
    layer, block = "gpt_neox.layers.{i}", "decoder.{i}"
    table = [
        Entry(f"{layer}.input_layernorm.{{p}}", f"{block}.self_attn_residual.norm.{{p}}"),
        Entry(
            f"{layer}.attention.query_key_value.{{p}}", f"{block}.self_attn.qkv_proj.{{p}}", HeadsFirst(settings.heads)
        ),
        Entry(f"{layer}.attention.dense.{{p}}", f"{block}.self_attn.out_proj.{{p}}"),
        Entry(f"{layer}.post_attention_layernorm.{{p}}", f"{block}.feed_forward_residual.norm.{{p}}"),
        Entry(f"{layer}.mlp.dense_h_to_4h.{{p}}", f"{block}.feed_forward.w_in.{{p}}"),
        Entry(f"{layer}.mlp.dense_4h_to_h.{{p}}", f"{block}.feed_forward.w_out.{{p}}"),
        Entry("gpt_neox.final_layer_norm.{p}", "decoder.norm.{p}"),
    ]
    output = [] if settings.tie_embeddings else [Entry(OUTPUT, "output", vocabulary)]
    return [Entry(EMBEDDING, "embedding.table", vocabulary), *layered(table, settings.layers), *output]


def ignored(recipe: Recipe) -> IgnoredTensors:
    """Tensors of a file that are not converted: old files contain masks and frequencies."""
    dropped = [r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"]
    return IgnoredTensors(dropped, {OUTPUT: EMBEDDING} if cast(GPTSettings, recipe.model).tie_embeddings else {})


def canonical(header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by the names in the table; transformers 5 may call the output lm_head."""
    return {OUTPUT if name == "lm_head.weight" else name: info for name, info in header.items()}


def read(folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
    rope = folder.config.object("rope_parameters")
    theta, factor = rope.content.get("rope_theta"), rope.content.get("partial_rotary_factor")
    folder.require(layer_norm_eps=1e-5, attention_bias=True, rope_scaling=None)
    if folder.config.boolean("use_parallel_residual", True):
        raise folder.config.error("use_parallel_residual", "= True has no counterpart here (only False)")
    if (folder.setting("rotary_pct", 0.25) if factor is None else factor) != 1 or rope.content.get(
        "rope_type", "default"
    ) != "default":
        raise folder.config.error("rotary_pct", "must be 1 and the RoPE type default to have a counterpart here")
    settings = {
        "width": count(folder, "hidden_size", 6144),
        "heads": count(folder, "num_attention_heads", 64),
        "layers": layers(folder, "num_hidden_layers", 44),
        "ffn_width": count(folder, "intermediate_size", 24576),
        "dropout": fraction(folder, "hidden_dropout", 0.0),
        "activation": activation(folder, "hidden_act", "gelu"),
        "max_positions": context(folder, "max_position_embeddings", 2048),
        "positions": "rotary",
        "position_base": folder.setting("rotary_emb_base", 10000) if theta is None else theta,
        "tie_embeddings": folder.config.boolean("tie_word_embeddings", False),
    }
    return gpt2.imported(folder, settings, rows(folder, "vocab_size", 50432, header, EMBEDDING), end_of_text_id=0)


def unsupported(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[str]:
    """The settings of a run that GPT-NeoX cannot express."""
    return gpt2.unsupported_decoder(recipe, target, "GPT-NeoX", positions="rotary")


def config(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
    settings, ids = cast(GPTSettings, recipe.model), ids_of(target)
    base = settings.position_base
    return {
        "architectures": [CLASS],
        "model_type": "gpt_neox",
        "vocab_size": max(ids) + 1,
        "hidden_size": settings.width,
        "num_attention_heads": settings.heads,
        "num_hidden_layers": settings.layers,
        "intermediate_size": settings.ffn_width,
        "max_position_embeddings": settings.max_positions,
        "hidden_act": hf_activation(settings.activation),
        "hidden_dropout": settings.dropout,
        "attention_dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": False,
        "rotary_pct": 1.0,  # transformers 4; version 5 reads rope_parameters
        "rotary_emb_base": base,
        "rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 1.0},
        "tie_word_embeddings": settings.tie_embeddings,
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD] if ids[PAD] >= 0 else None,
        "dtype": "float32",
    }
