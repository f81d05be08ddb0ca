"""Import decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, SmolLM3, OLMo 1 to 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import UserError
from regard.interop.common import Imported, activation, context, count, fraction, layers, rows
from regard.interop.fast_tokenizers import FILE, read_fast_tokenizer, reads_bos, roles, vocabulary_of
from regard.interop.generation import sampling
from regard.interop.gpt2 import unused_ids
from regard.interop.hf_folder import HFFolder, TensorInfo, short_repr
from regard.interop.name_map import Entry, IgnoredTensors, TensorMap, VocabularyRows, inverse
from regard.interop.rope import number, rotary, windows
from regard.interop.vocabularies import ids_of, read_bpe
from regard.models.gpt_settings import GPTSettings
from regard.recipes.schema import Recipe
from regard.tensor_io import Tensors
from regard.text import Tokenizer

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class StackedRows:
    """Concatenates matrices with these numbers of rows; the first is multiplied by `scale`."""

    sizes: tuple[int, ...]
    scale: float = 1.0

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        first = _scaled(parts[0], self.scale)
        return torch.cat([first, *(part.to(first.dtype) for part in parts[1:])])

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        first, *others = whole.split(self.sizes)
        return [first / self.scale, *others]


@dataclass(frozen=True)
class Affine:
    """scale · (w + offset): Gemma stores the weights of norms without their 1."""

    offset: float = 0.0
    scale: float = 1.0

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return _scaled(parts[0].float() + self.offset if self.offset else parts[0], self.scale)

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        return [whole / self.scale - self.offset]


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    """A tensor times a number; 16-bit tensors stay so if the product is exact, for a power of two."""
    if scale == 1:
        return tensor
    return tensor * scale if math.frexp(scale)[0] == 0.5 else tensor.float() * scale


@dataclass(frozen=True)
class DecoderImporter:
    """A model type: what its settings mean, beyond those of Llama."""

    theta: float = 10000.0  # default base of the rotary positions
    local_theta: float | None = None  # default base in layers with a window, where that is another one
    settings: Mapping[str, Any] = field(default_factory=dict)  # constant settings of our model
    biases: bool | None = False  # default of attention_bias; None: queries, keys and values have biases
    is_local: Callable[[HFFolder, int], object] | None = None  # whether a layer has a window; None: no layer has
    norm_offset: float = 0.0  # what the stored weights of norms lack
    query_scalar: bool = False  # whether scores are divided by the root of query_pre_attn_scalar, not of the head width
    activation: tuple[str, str] = ("hidden_act", "silu")
    head_width: int | None = None  # default of head_dim
    tied: bool = False  # default of tie_word_embeddings
    eos: int | None = None
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")  # of attention, of feed-forward
    output_norms: tuple[str, str] | None = None
    refused: Mapping[str, Any] = field(default_factory=dict)  # settings with only one supported value

    # -- settings ------------------------------------------------------------------------------------------------------

    def read(self, folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
        folder.require(quantization_config=None, use_bidirectional_attention=False, **self.refused)
        if folder.setting("quantization_config") is not None:
            raise folder.config.error("quantization_config", "has no counterpart here: only unquantized weights have")
        vocabulary = rows(folder, "vocab_size", None, header, EMBEDDING)
        settings = self.settings_of(folder)
        tokenizer, stop_ids, adds_bos = self._tokenizer(folder, vocabulary)
        recipe = {
            "data": {"imported": "text", "documents": "paragraph" if adds_bos else "stream"},
            "text": {"unit": tokenizer.unit, "vocabulary": max(260, len(tokenizer))},
            "model": {"family": "gpt", "size": "gpt2", **settings, "unused": unused_ids(tokenizer)},
            "decoding": {**sampling(folder), "stop_ids": stop_ids},
        }
        model = cast(GPTSettings, (checked := Recipe.model_validate(recipe)).model)
        table = self.entries(model, tokenizer, self._query_scale(model, folder))
        # old files contain the frequencies
        dropped = [r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.\w*inv_freq"]
        ignored = IgnoredTensors(dropped, {OUTPUT: EMBEDDING} if model.tie_embeddings else {})
        return Imported(checked, tokenizer, tokenizer, tensors=TensorMap(table, ignored, extra=self._extra(settings)))

    def settings_of(self, folder: HFFolder) -> dict[str, Any]:
        """Our settings of the model, by config.json."""
        config, depth = folder.config, layers(folder, "num_hidden_layers")
        width, heads = count(folder, "hidden_size"), count(folder, "num_attention_heads")
        if not heads:
            raise config.error("num_attention_heads", "= 0 is not a number of heads")
        groups = heads if folder.setting("num_key_value_heads") is None else count(folder, "num_key_value_heads")
        features = self.head_width if folder.setting("head_dim") is None else count(folder, "head_dim")
        biases = self.biases is None or bool(config.boolean("attention_bias", self.biases))
        positions = context(folder, "max_position_embeddings", 2048)
        return {
            "width": width,
            "heads": heads,
            "kv_heads": groups,
            "head_width": 0 if features is None or features * heads == width else features,
            "layers": depth,
            "ffn_width": count(folder, "intermediate_size"),
            "dropout": 0.0,
            "activation": self._activation(folder),
            "norm": "rms",
            "norm_eps": fraction(folder, "rms_norm_eps", 1e-6),
            "qkv_bias": biases,
            "out_bias": biases and self.biases is not None,
            "ffn_bias": bool(config.boolean("mlp_bias", False)),
            "max_positions": positions,
            "tie_embeddings": config.boolean("tie_word_embeddings", self.tied),
            **rotary(folder, self.theta, self.local_theta),
            **self._windows(folder, depth),
            **{name: number(config, key) for name, key in SOFTCAPS if folder.setting(key) is not None},
            **_layers_without_rope(folder, depth),
            **self.settings,
        }

    def _windows(self, folder: HFFolder, depth: int) -> dict[str, Any]:
        if (is_local := self.is_local) is None:  # transformers ignores such settings then
            return {}
        return windows(folder, depth, lambda layer: is_local(folder, layer), keep=self.local_theta is not None)

    def _activation(self, folder: HFFolder) -> str:
        """The gated activation that a setting names; a few Gemmas have an old name for it."""
        name, default = self.activation
        ours = activation(folder, name, default)
        if f"gated-{ours}" not in GATED and ours != "silu":
            raise folder.config.error(name, f"= {short_repr(folder.setting(name))} has no gated counterpart here")
        return "gated" if ours == "silu" else f"gated-{ours}"

    def _tokenizer(self, folder: HFFolder, size: int) -> tuple[Tokenizer, list[int], bool]:
        """The tokenizer, our ids of further tokens that end a text, and whether texts begin with BOS."""
        if not folder.has(FILE):
            if not folder.has("merges.txt"):
                raise UserError(f"{folder.path} has no tokenizer: {FILE} is missing")
            kind = folder.json("tokenizer_config.json").text("tokenizer_class") or ""
            if not kind.startswith("GPT2"):
                raise UserError(
                    f"{folder.path}: the tokenizer {short_repr(kind)} is read from {FILE}, which is missing"
                )
            found = roles(folder, {}, size, self.eos, None)
            tokenizer: Tokenizer = read_bpe(folder, size, found.specials)
            return tokenizer, [], False
        found = roles(folder, vocabulary_of(folder, size), size, self.eos, None)
        tokenizer = read_fast_tokenizer(folder, size, found.specials)
        ours = inverse(ids_of(tokenizer))
        return tokenizer, [ours[end] for end in found.others], reads_bos(folder, found.bos, tokenizer)

    def _extra(self, settings: Mapping[str, Any]) -> Tensors:
        """Weights of norms that have none in the files: ones."""
        if settings["norm"] != "layer":
            return {}
        names = [f"decoder.{i}.{part}_residual.norm.weight" for i in range(settings["layers"]) for part in PARTS]
        return {name: torch.ones(settings["width"]) for name in [*names, "decoder.norm.weight"]}

    # -- tensors -------------------------------------------------------------------------------------------------------

    def entries(self, settings: GPTSettings, tokenizer: Tokenizer, query_scale: float = 1.0) -> list[Entry]:
        """The table of tensor names."""
        vectors = VocabularyRows(ids_of(tokenizer))
        table = [Entry(EMBEDDING, "embedding.table", vectors)]
        for layer in range(settings.layers):
            table += self._layer(settings, f"model.layers.{layer}", f"decoder.{layer}", query_scale)
        if settings.norm == "rms":
            table.append(Entry("model.norm.weight", "decoder.norm.weight", Affine(self.norm_offset)))
        return table if settings.tie_embeddings else [*table, Entry(OUTPUT, "output", vectors)]

    def _layer(self, settings: GPTSettings, theirs: str, ours: str, scale: float) -> list[Entry]:
        features = settings.head_width or settings.width // settings.heads
        groups = (settings.kv_heads or settings.heads) * features
        queries, keys = settings.heads * features, groups
        stack = StackedRows((queries, keys, keys), 1.0 if settings.qk_norm else scale)
        attn, gates = f"{ours}.self_attn", StackedRows((settings.ffn_width, settings.ffn_width))
        table = []
        for kind in ("weight", "bias"):
            biased = (kind == "weight" or settings.qkv_bias, kind == "weight" or settings.out_bias)
            if biased[0]:
                table.append(Entry(f"{theirs}.self_attn.{{q,k,v}}_proj.{kind}", f"{attn}.qkv_proj.{kind}", stack))
            if biased[1]:
                table.append(Entry(f"{theirs}.self_attn.o_proj.{kind}", f"{attn}.out_proj.{kind}"))
            if kind == "weight" or settings.ffn_bias:
                table.append(Entry(f"{theirs}.mlp.{{gate,up}}_proj.{kind}", f"{ours}.feed_forward.w_in.{kind}", gates))
                table.append(Entry(f"{theirs}.mlp.down_proj.{kind}", f"{ours}.feed_forward.w_out.{kind}"))
        if settings.qk_norm:
            for name, factor in (("q_norm", scale), ("k_norm", 1.0)):
                entry = Entry(f"{theirs}.self_attn.{name}.weight", f"{attn}.{name}.weight")
                table.append(Entry(entry.theirs, entry.ours, Affine(self.norm_offset, factor)))
        if settings.norm == "rms":
            for part, name in zip(PARTS, self.norms, strict=True):
                norm = f"{ours}.{part}_residual.norm.weight"
                table.append(Entry(f"{theirs}.{name}.weight", norm, Affine(self.norm_offset)))
            for part, name in zip(PARTS, self.output_norms or (), strict=False):
                norm = f"{ours}.{part}_residual.output_norm.weight"
                table.append(Entry(f"{theirs}.{name}.weight", norm, Affine(self.norm_offset)))
        return table

    def _query_scale(self, settings: GPTSettings, folder: HFFolder) -> float:
        """The factor of queries that turns our scale, one over the root of the head width, into theirs."""
        if not self.query_scalar:
            return 1.0
        features = settings.head_width or settings.width // settings.heads
        return math.sqrt(features / number(folder.config, "query_pre_attn_scalar", 256))

    def canonical(self, header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors by the names in the table; a saved body has no prefix."""
        if EMBEDDING in header:
            return dict(header)
        return {name if name == OUTPUT else f"model.{name}": info for name, info in header.items()}


PARTS = ("self_attn", "feed_forward")
GATED = ("gated-gelu", "gated-gelu-tanh", "gated-relu")
SOFTCAPS = (("softcap", "attn_logit_softcapping"), ("logit_softcap", "final_logit_softcapping"))


def _layers_without_rope(folder: HFFolder, depth: int) -> dict[str, Any]:
    """SmolLM3's layers without positions: `no_rope_layers` has a 0 for them."""
    if folder.setting("model_type") != "smollm3":
        return {}
    given, every = folder.config.items("no_rope_layers"), folder.config.integer("no_rope_layer_interval") or 4
    if given and (len(given) != depth or any(flag not in (0, 1) for flag in given)):
        raise folder.config.error("no_rope_layers", f"must have a 0 or a 1 for each of {depth} layers")
    flags = given or [int((i + 1) % every != 0) for i in range(depth)]
    return {"unrotated_layers": [i for i, flag in enumerate(flags) if not flag]}


def _has_late_window(folder: HFFolder, layer: int) -> bool:
    """Qwen: the layers from max_window_layers on, if windows are switched on."""
    first = folder.config.integer("max_window_layers")
    return bool(folder.config.boolean("use_sliding_window", False)) and layer >= (28 if first is None else first)


def _pattern(default: int) -> Callable[[HFFolder, int], bool]:
    """All layers but every n-th, where `sliding_window_pattern` is n."""
    return lambda folder, layer: (layer + 1) % (folder.config.integer("sliding_window_pattern") or default) != 0


GEMMA = DecoderImporter(
    settings={"scale_embeddings": True},
    norm_offset=1.0,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    head_width=256,
    tied=True,
    eos=1,
)
GEMMA_NORMS: dict[str, Any] = dict(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    norm_offset=1.0,
    query_scalar=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    head_width=256,
    tied=True,
    eos=1,
)
OLMO2: dict[str, Any] = dict(
    settings={"norm_place": "output", "qk_norm": True, "qk_norm_all": True},
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    eos=50279,
)
DECODERS = {  # by model_type
    "llama": DecoderImporter(eos=2),
    "mistral": DecoderImporter(eos=2, is_local=lambda folder, layer: True, refused={"layer_types": None}),
    "qwen2": DecoderImporter(biases=None, is_local=_has_late_window),
    "qwen3": DecoderImporter(settings={"qk_norm": True}, head_width=128, is_local=_has_late_window),
    "gemma": GEMMA,
    "gemma2": DecoderImporter(
        settings={"scale_embeddings": True, "norm_place": "both"},
        is_local=lambda folder, layer: layer % 2 == 0,
        **GEMMA_NORMS,
    ),
    "gemma3_text": DecoderImporter(
        settings={"scale_embeddings": True, "norm_place": "both", "qk_norm": True},
        theta=1e6,
        local_theta=1e4,
        is_local=_pattern(6),
        **GEMMA_NORMS,
    ),
    "smollm3": DecoderImporter(theta=2e6, tied=True, eos=128001, refused={"use_sliding_window": False}),
    "olmo": DecoderImporter(
        settings={"norm": "layer", "norm_eps": 1e-5, "norm_bias": False}, eos=50279, refused={"clip_qkv": None}
    ),
    "olmo2": DecoderImporter(**OLMO2),
    "olmo3": DecoderImporter(theta=5e5, local_theta=5e5, is_local=_pattern(4), **OLMO2),
}
