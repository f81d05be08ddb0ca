"""Import T5, T5 v1.1, Flan-T5, mT5 and UMT5.

They have no biases, RMS norms before each sub-layer, and positions as a bias of the scores, which the first layer has
for all of them (in UMT5 every layer has its own); ours have one each. Their scores are not divided by the root of the
head width, so queries are multiplied by it here. The first T5 and UMT5 divide the decoder's output by the root of its
width, if embeddings are tied: that becomes part of the last norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from regard.errors import UserError
from regard.interop.common import (
    ACTIVATIONS,
    Imported,
    architecture,
    context,
    count,
    end_of_text,
    fraction,
    layers,
    rows,
)
from regard.interop.common import token as token_id
from regard.interop.decoders import Affine, StackedRows
from regard.interop.fast_tokenizers import FILE, read_fast_tokenizer, spelled, surrounding, vocabulary_of
from regard.interop.generation import beams, length_penalty
from regard.interop.hf_folder import HFFolder, TensorInfo, short_repr
from regard.interop.name_map import COPIED, SAME, STACKED, Entry, IgnoredTensors, TensorMap, VocabularyRows
from regard.interop.vocabularies import ids_of
from regard.models.transformer_settings import TransformerSettings
from regard.recipes.schema import Recipe
from regard.text import Tokenizer

SHARED, OUTPUT = "shared.weight", "lm_head.weight"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
CLASSES = ("ForConditionalGeneration", "Model")


@dataclass(frozen=True)
class T5Importer:
    """A model type of T5's kind."""

    feed_forward: str = "relu"  # default of feed_forward_proj
    scales: bool = True  # whether models with tied embeddings divide the decoder's output by the root of its width
    own_positions: bool = False  # whether every layer has its own table of relative positions

    def canonical(self, header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        return dict(header)

    def read(self, folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
        folder.require(is_encoder_decoder=True, quantization_config=None)
        name = architecture(folder)
        if name is not None and not name.endswith(CLASSES):
            raise folder.config.error("architectures", f"= {short_repr(name)} has no counterpart here")
        size = rows(folder, "vocab_size", 32128, header, SHARED)
        tokenizer = _tokenizer(folder, size)
        tied = bool(folder.config.boolean("tie_word_embeddings", True))
        scaled = self.scales and bool(folder.config.boolean("scale_decoder_outputs", tied))
        settings = self._settings(folder) | {"tie_embeddings": scaled or OUTPUT not in header}
        recipe = Recipe.model_validate(
            {
                "data": {"imported": "pairs"},
                "text": {"unit": tokenizer.unit, "vocabulary": max(260, len(tokenizer))},
                "model": settings,
                "decoding": {"beam": beams(folder, 1), "length_penalty": length_penalty(folder)},
            }
        )
        model = cast(TransformerSettings, recipe.model)
        tensors = self._tensors(model, tokenizer, scaled)
        return Imported(recipe, tokenizer, tokenizer.target_side(), tensors=tensors)

    def _settings(self, folder: HFFolder) -> dict[str, Any]:
        depth, width, heads = (
            layers(folder, "num_layers", 6),
            count(folder, "d_model", 512),
            count(folder, "num_heads", 8),
        )
        features = count(folder, "d_kv", 64)
        decoder = None if folder.setting("num_decoder_layers") is None else layers(folder, "num_decoder_layers")
        return {
            "family": "transformer",
            "width": width,
            "heads": heads,
            "head_width": 0 if features * heads == width else features,
            "encoder_layers": depth,
            "decoder_layers": depth if decoder is None else decoder,
            "ffn_width": count(folder, "d_ff", 2048),
            "dropout": fraction(folder, "dropout_rate", 0.1),
            "activation": self._activation(folder),
            "norm": "rms",
            "norm_eps": fraction(folder, "layer_norm_epsilon", 1e-6),
            "norm_first": True,
            "biases": False,
            "positions": "bucketed",
            "position_buckets": count(folder, "relative_attention_num_buckets", 32),
            "position_distance": _distance(folder),
            "max_positions": context(folder, "n_positions", 512),
            "scale_embeddings": False,
        }

    def _activation(self, folder: HFFolder) -> str:
        name = folder.config.text("feed_forward_proj") or self.feed_forward
        gate, _, theirs = name.rpartition("-")
        ours = ACTIVATIONS.get("gelu_new" if name == "gated-gelu" else theirs)
        if ours is None or gate not in ("", "gated"):
            raise folder.config.error("feed_forward_proj", f"= {short_repr(name)} has no counterpart here")
        if not gate:
            return ours
        return "gated" if ours == "silu" else f"gated-{ours}"

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _tensors(self, settings: TransformerSettings, tokenizer: Tokenizer, scaled: bool) -> TensorMap:
        vocabulary = VocabularyRows(ids_of(tokenizer))
        table = [Entry(SHARED, "source_embedding.table", vocabulary)]
        table += self._stack(settings, "encoder", settings.encoder_layers, 1.0)
        table += self._stack(settings, "decoder", settings.decoder_layers, settings.width**-0.5 if scaled else 1.0)
        copies = dict.fromkeys(COPIES, SHARED)
        if settings.tie_embeddings:
            copies[OUTPUT] = SHARED
        else:
            table.append(Entry(OUTPUT, "output", vocabulary))
        # files of older versions of transformers
        dropped = [r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"]
        return TensorMap(table, IgnoredTensors(dropped, copies))

    def _stack(self, settings: TransformerSettings, side: str, depth: int, output_scale: float) -> list[Entry]:
        parts = ["self_attn", "feed_forward"] if side == "encoder" else ["self_attn", "cross_attn", "feed_forward"]
        table = [Entry(f"{side}.final_layer_norm.weight", f"{side}.norm.weight", Affine(scale=output_scale))]
        for layer in range(depth):
            for index, part in enumerate(parts):
                theirs, ours = f"{side}.block.{layer}.layer.{index}", f"{side}.{layer}.{part}"
                table.append(Entry(f"{theirs}.layer_norm.weight", f"{ours}_residual.norm.weight"))
                if part == "feed_forward":
                    table += _feed_forward(settings, f"{theirs}.DenseReluDense", ours)
                else:
                    table += _attention(settings, theirs, ours)
            owner, transform = (layer, SAME) if self.own_positions else (0, COPIED)
            bias = f"{side}.block.{owner}.layer.0.SelfAttention.relative_attention_bias.weight"
            table.append(Entry(bias, f"{side}.{layer}.self_attn.score.bias", transform))
        return table


def _attention(settings: TransformerSettings, theirs: str, ours: str) -> list[Entry]:
    features = settings.head_width or settings.width // settings.heads
    size, scale = settings.heads * features, math.sqrt(features)
    if ours.endswith("self_attn"):
        theirs = f"{theirs}.SelfAttention"
        stack = StackedRows((size, size, size), scale)
        table = [Entry(f"{theirs}.{{q,k,v}}.weight", f"{ours}.qkv_proj.weight", stack)]
    else:
        theirs = f"{theirs}.EncDecAttention"
        table = [Entry(f"{theirs}.q.weight", f"{ours}.q_proj.weight", Affine(scale=scale))]
        table.append(Entry(f"{theirs}.{{k,v}}.weight", f"{ours}.kv_proj.weight", STACKED))
    return [*table, Entry(f"{theirs}.o.weight", f"{ours}.out_proj.weight")]


def _feed_forward(settings: TransformerSettings, theirs: str, ours: str) -> list[Entry]:
    name = "{wi_0,wi_1}" if settings.activation.startswith("gated") else "wi"
    inner = Entry(f"{theirs}.{name}.weight", f"{ours}.w_in.weight", STACKED if "," in name else SAME)
    return [inner, Entry(f"{theirs}.wo.weight", f"{ours}.w_out.weight")]


def _distance(folder: HFFolder) -> int:
    value = folder.config.integer("relative_attention_max_distance")
    value = 128 if value is None else value
    if not 2 <= value <= 1 << 20:
        raise folder.config.error(
            "relative_attention_max_distance", f"= {short_repr(value)} is not a possible distance"
        )
    return value


def _tokenizer(folder: HFFolder, size: int) -> Tokenizer:
    if not folder.has(FILE):
        raise UserError(f"{folder.path} has no {FILE}: T5's tokenizer is not read from a bare SentencePiece file")
    eos, pad = end_of_text(folder, 1, size), token_id(folder, "pad_token_id", 0, size)
    start = token_id(folder, "decoder_start_token_id", pad, size)
    if start is None:
        raise folder.config.error("decoder_start_token_id", "is missing, or outside the vocabulary")
    before, after = surrounding(folder)
    if before or after != [eos]:
        raise UserError(f"{folder.path / FILE}: post_processor must add EOS alone, to have a counterpart here")
    unk = spelled(folder, "unk_token", vocabulary_of(folder, size))
    return read_fast_tokenizer(folder, size, (None if pad in (start, eos) else pad, start, eos, unk))


T5 = {  # by model_type
    "t5": T5Importer(),
    "mt5": T5Importer("gated-gelu", scales=False),
    "umt5": T5Importer("gated-gelu", own_positions=True),
}
