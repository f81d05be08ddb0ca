"""Export GPTs as decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3, Gemma, OLMo 2.

A configuration is written for a model type, and read as `regard import` reads it. Settings that are not the same then
have no counterpart in that type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from regard.errors import UserError
from regard.interop import gpt2
from regard.interop.common import Imported, hf_activation
from regard.interop.decoders import DECODERS, EMBEDDING, OUTPUT, DecoderImporter
from regard.interop.generation import generation_settings
from regard.interop.gpt2 import unused_ids
from regard.interop.hf_folder import Fields, Files, HFFolder, TensorInfo, as_json
from regard.interop.name_map import Entry, IgnoredTensors
from regard.interop.rope import FULL, SLIDING
from regard.interop.vocabularies import ids_of
from regard.models.gpt_settings import GPTSettings
from regard.recipes.schema import Recipe
from regard.tensor_io import Tensors, model_tensors
from regard.text import BOS, EOS, PAD, Tokenizer
from regard.text.fast_tokenizer import FastTokenizer
from regard.text.tokenizers import BytePairTokenizer

NOT_COMPARED = {"size", "dropout", "unused"}  # what training needs, and what the tokenizer implies


class WrittenFolder(HFFolder):
    """A folder that is about to be written: its config.json, and the shapes of a model's tensors."""

    def __init__(self, config: Mapping[str, Any], shapes: Tensors) -> None:
        self.path = Path(str(config["model_type"]))
        self.config = Fields(self.path / "config.json", config)
        self.header = {name: TensorInfo(self.path, name, "F32", tuple(t.shape)) for name, t in shapes.items()}


@dataclass(frozen=True)
class DecoderConverter:
    """Reads and writes a model type; `architecture` is its class in transformers."""

    kind: str
    architecture: str
    importer: DecoderImporter

    def read(self, folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
        return self.importer.read(folder, header)

    def canonical(self, header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        return self.importer.canonical(header)

    def entries(self, recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
        return self.importer.entries(cast(GPTSettings, recipe.model), target)

    def ignored(self, recipe: Recipe) -> IgnoredTensors:
        return IgnoredTensors([], {OUTPUT: EMBEDDING} if cast(GPTSettings, recipe.model).tie_embeddings else {})

    def defaults(self, target: Tokenizer) -> Tensors:
        return {}

    def constants(self, recipe: Recipe) -> Tensors:
        return {}

    def unsupported(self, recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[str]:
        """The settings that a folder of this type would not give back."""
        problems = []
        if recipe.data.kind == "pairs" or not recipe.text.shared:
            problems.append(f"a GPT that was trained on pairs has no counterpart in {self.architecture}")
        if not isinstance(target, BytePairTokenizer | FastTokenizer):
            problems.append(f'text.unit = "{target.unit}" has no counterpart in {self.architecture}\'s files')
        settings = cast(GPTSettings, recipe.model)
        with torch.device("meta"):
            shapes = model_tensors(Imported(recipe, target, target).build())
        try:
            found = self.importer.settings_of(WrittenFolder(self.config(recipe, source, target), shapes))
        except UserError as error:
            return [*problems, str(error)]
        read = GPTSettings.model_validate({"family": "gpt", "size": "gpt2", **found})
        problems += [
            f"model.{name} = {value!r} has no counterpart in {self.architecture}"
            for name, value in _normal(settings).items()
            if value != _normal(read)[name]
        ]
        if settings.unused != unused_ids(target):
            problems.append(f"model.unused has no counterpart in {self.architecture}")
        return problems

    def config(self, recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
        settings, ids = cast(GPTSettings, recipe.model), ids_of(target)
        ours = settings.activation.removeprefix("gated-")
        return {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "vocab_size": max(ids) + 1,
            "hidden_size": settings.width,
            "intermediate_size": settings.ffn_width,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": settings.heads,
            "num_key_value_heads": settings.kv_heads or settings.heads,
            "head_dim": settings.head_width or settings.width // settings.heads,
            "hidden_act": "silu" if settings.activation == "gated" else hf_activation(ours),
            "attention_bias": settings.qkv_bias,
            "attention_dropout": 0.0,
            "mlp_bias": settings.ffn_bias,
            "rms_norm_eps": settings.norm_eps,
            "max_position_embeddings": settings.max_positions,
            **_rope(settings),
            **self._windows(settings),
            "tie_word_embeddings": settings.tie_embeddings,
            "bos_token_id": ids[BOS],
            "eos_token_id": ids[EOS],
            "pad_token_id": ids[PAD] if ids[PAD] >= 0 else None,
            "dtype": "float32",
        }

    def _windows(self, settings: GPTSettings) -> dict[str, Any]:
        if settings.mask != "window" or self.importer.is_local is None:
            return {"sliding_window": None}
        size = {"sliding_window": settings.mask_size, "use_sliding_window": True, "max_window_layers": 0}
        kinds = [FULL if layer in settings.global_layers else SLIDING for layer in range(settings.layers)]
        return size | ({} if self.kind == "mistral" and FULL not in kinds else {"layer_types": kinds})

    def files(self, recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
        """The tokenizer's files, and generation_config.json."""
        if target.foreign is None:
            return gpt2.files(recipe, source, target)
        if not isinstance(target, FastTokenizer):
            written = gpt2.files(recipe, source, target)
        else:
            names = ["input_ids", "attention_mask"]  # without it, transformers 4 adds token types
            kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
            settings = {**kind, "clean_up_tokenization_spaces": False, **target.foreign.roles}
            written = {"tokenizer.json": target.model.encode(), "tokenizer_config.json": as_json(settings)}
        ids = ids_of(target)
        ends = [ids[token] for token in (EOS, *recipe.decoding.stop_ids)]
        return written | {"generation_config.json": as_json(generation_settings(recipe.decoding, ids[BOS], ends))}


def _normal(settings: GPTSettings) -> dict[str, Any]:
    """Settings by name, the same for models that are the same."""
    features, groups = settings.head_width or settings.width // settings.heads, settings.kv_heads or settings.heads
    found = settings.model_dump() | {"head_width": features, "kv_heads": groups}
    return {name: value for name, value in found.items() if name not in NOT_COMPARED}


def _rope(settings: GPTSettings) -> dict[str, Any]:
    """Rotary positions in the layouts of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters)."""
    base, (low, high) = settings.position_base, settings.rope_turns
    if settings.rope_scaling == "none":
        return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    scaling: dict[str, Any] = {"rope_type": settings.rope_scaling, "factor": settings.rope_factor}
    if settings.rope_scaling != "linear":
        scaling["original_max_position_embeddings"] = settings.rope_original
    if settings.rope_scaling == "llama3":
        scaling |= {"low_freq_factor": low, "high_freq_factor": high}
    if settings.rope_scaling == "yarn":
        scaling |= {"beta_slow": low, "beta_fast": high, "attention_factor": settings.rope_attention}
    return {"rope_theta": base, "rope_scaling": scaling, "rope_parameters": {**scaling, "rope_theta": base}}


CONVERTERS = [
    DecoderConverter(kind, architecture, DECODERS[kind])
    for kind, architecture in (
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("gemma", "GemmaForCausalLM"),
        ("olmo2", "Olmo2ForCausalLM"),
    )
]
