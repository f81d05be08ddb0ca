"""Convert between Pegasus in Hugging Face's layout and our Transformer with norms before each sub-layer.

Names and settings are those of Marian, with a norm at the end of both stacks. Positions are stored as tables, so that
any sinusoids can be exported. Padding and the decoder's first token are the same token, as CTranslate2 expects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from regard.interop import marian
from regard.interop.common import Imported
from regard.interop.hf_folder import Files, HFFolder, TensorInfo
from regard.interop.marian import canonical, defaults
from regard.interop.name_map import Entry, IgnoredTensors, layered
from regard.interop.vocabularies import write_fast
from regard.models.transformer_settings import TransformerSettings
from regard.nn.positions import Sinusoidal, SinusoidalSplit
from regard.recipes.schema import Recipe
from regard.special_tokens import BOS, SPECIAL_TOKENS
from regard.tensor_io import Tensors
from regard.text import Tokenizer

__all__ = ["canonical", "config", "constants", "defaults", "entries", "files", "ignored", "read", "unsupported"]

CLASS = "PegasusForConditionalGeneration"
FINAL_NORMS = [
    Entry("model.encoder.layer_norm.{p}", "encoder.norm.{p}"),
    Entry("model.decoder.layer_norm.{p}", "decoder.norm.{p}"),
]
POSITIONS = {"sinusoidal": Sinusoidal, "sinusoidal-split": SinusoidalSplit}


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    return [*marian.entries(recipe, source, target), *layered(FINAL_NORMS)]


def ignored(recipe: Recipe) -> IgnoredTensors:
    return marian.ignored(recipe)


def constants(recipe: Recipe) -> Tensors:
    """The position tables, which our model computes."""
    settings = cast(TransformerSettings, recipe.model)
    positions = torch.arange(settings.max_positions)
    with torch.device("cpu"):
        table = POSITIONS[settings.positions](settings.width, settings.position_base)(positions, positions)
    return {f"model.{side}.embed_positions.weight": table.clone() for side in ("encoder", "decoder")}


def read(folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
    """Config.json of an exported run also names the kind and the base of its sinusoids."""
    folder.require(normalize_before=True, normalize_embedding=False, share_encoder_decoder_embeddings=True)
    kind = folder.setting("positions", "sinusoidal-split")
    if kind not in POSITIONS:
        raise folder.config.error("positions", f"must be one of {', '.join(POSITIONS)}")
    base = folder.setting("position_base", 10000.0)
    return marian.imported(folder, header, norm_first=True, positions=kind, position_base=base)


def unsupported(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[str]:
    """The settings of a run that Pegasus cannot express."""
    kind = cast(TransformerSettings, recipe.model).positions
    wanted = {"norm_first": True} | ({} if kind in POSITIONS else {"positions": "sinusoidal"})
    return marian.unsupported_translator(recipe, source, "Pegasus", **wanted)


def config(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
    settings = cast(TransformerSettings, recipe.model)
    config = marian.config(recipe, source, target)
    del config["decoder_vocab_size"], config["share_encoder_decoder_embeddings"]
    return config | {
        "architectures": [CLASS],
        "model_type": "pegasus",
        "pad_token_id": config["decoder_start_token_id"],
        "normalize_before": True,  # this and the next are read by CTranslate2 only
        "normalize_embedding": False,
        "positions": settings.positions,
        "position_base": settings.position_base,
    }


def files(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
    """The tokenizer's files, and generation settings that suppress special tokens."""
    written = marian.generation_settings(config(recipe, source, target), recipe, target)
    return written | write_fast(source, "$A </s>", pad_token=SPECIAL_TOKENS[BOS])
