"""Export of Transformers and GPTs to CTranslate2, through its specification classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard.attention import BucketedBias
from regard.errors import UserError
from regard.interop.portable import (
    NEG_LOGIT,
    never_generated,
    new_folder,
    position_table,
    require,
    text_template,
    tokenizer_files,
    tokens_of,
    unsupported,
    write_files,
)
from regard.models import SequenceModel
from regard.models.gpt import GPT
from regard.models.transformer import Transformer
from regard.nn import lora
from regard.nn.blocks import GATED
from regard.nn.norms import LayerNorm
from regard.registry import EXPORTERS
from regard.run_dir import RunDir
from regard.tasks.aligner import guided_view
from regard.text import BOS, EOS, UNK

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu-tanh": "GELUTanh", "silu": "SWISH", "gated": "SWISH"}
ACTIVATIONS |= {"gated-gelu": "GELU", "gated-gelu-tanh": "GELUTanh", "gated-relu": "RELU"}
TABLES = ("sinusoidal", "sinusoidal-split", "sinusoidal-fairseq", "learned")
POSITIONS = {"transformer": (*TABLES, "bucketed"), "gpt": (*TABLES, "rotary")}
SUPPORTED = {  # settings, by family, beside those of `portable.SUPPORTED`
    "transformer": {"head_width", "biases", "embedding_norm", "position_buckets", "position_distance"},
    "gpt": {"kv_heads", "head_width", "qkv_bias", "out_bias", "ffn_bias", "norm_bias", "qk_norm", "unused"}
    | {"rope_scaling", "rope_factor", "rope_original", "rope_turns"},
}


@EXPORTERS.register("ctranslate2")
def export_ctranslate2(run: RunDir, path: Path) -> Path:
    """Write a model directory for CTranslate2, with tokenizer.json."""
    family = run.recipe.model.family
    if family not in POSITIONS:
        raise UserError(f"the {family} family has no counterpart in CTranslate2 ({' and '.join(POSITIONS)} have)")
    problems = unsupported(
        run,
        "CTranslate2",
        SUPPORTED[family],
        positions=POSITIONS[family],
        activation=tuple(ACTIVATIONS),
        norm=("layer", "rms"),
        rope_scaling=("none", "linear"),
    )
    if family == "gpt" and run.recipe.data.kind == "pairs":
        problems.append("a GPT that was trained on pairs has no counterpart in CTranslate2")
    if problems:
        raise UserError("; ".join(problems))
    require("ctranslate2", "ctranslate2")
    model = run.model("cpu")
    lora.merge(model)
    spec = (_translator if family == "transformer" else _decoder)(run, model)
    template = "$A </s>" if family == "transformer" else text_template(run)
    settings: Any = run.recipe.model
    spec.config.layer_norm_epsilon = settings.norm_eps
    words = tokens_of(run.tokenizers[1])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = words[BOS], words[EOS], words[UNK]
    with new_folder(path) as folder:
        spec.validate()
        spec.optimize()
        spec.save(str(folder))
        write_files(folder, tokenizer_files(run, template))
    return path


def _common(run: RunDir) -> dict[str, Any]:
    from ctranslate2.specs import Activation

    settings: Any = run.recipe.model
    return {
        "pre_norm": getattr(settings, "norm_first", True),
        "activation": getattr(Activation, ACTIVATIONS[settings.activation]),
        "ffn_glu": settings.activation.startswith(GATED),
        "rms_norm": settings.norm == "rms",
        "head_dim": settings.head_width or None,
    }


def _translator(run: RunDir, model: SequenceModel) -> Any:
    from ctranslate2.specs import TransformerDecoderSpec, TransformerEncoderSpec, TransformerSpec

    assert isinstance(model, Transformer)
    settings = model.settings
    guided = guided_view(run.recipe)
    aligned = {} if guided is None else {"alignment_layer": guided.layer, "alignment_heads": 1}
    both = {"layernorm_embedding": settings.embedding_norm, **_common(run)}
    both["relative_attention_bias"] = settings.positions == "bucketed"
    spec = TransformerSpec(
        TransformerEncoderSpec(settings.encoder_layers, settings.heads, **both),
        TransformerDecoderSpec(settings.decoder_layers, settings.heads, **both, **aligned),
    )
    for side, stack, embedding in (
        (spec.encoder, model.encoder, model.source_embedding),
        (spec.decoder, model.decoder, model.target_embedding),
    ):
        first = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        _set_embedding(side, first, embedding, settings.max_positions)
        _set_stack(side, stack)
    _set_projection(run, spec.decoder.projection, *model.lm_head())
    spec.register_source_vocabulary(tokens_of(run.tokenizers[0]))
    spec.register_target_vocabulary(tokens_of(run.tokenizers[1]))
    spec.config.decoder_start_token = tokens_of(run.tokenizers[1])[BOS]
    return spec


def _decoder(run: RunDir, model: SequenceModel) -> Any:
    from ctranslate2.specs import TransformerDecoderModelSpec
    from ctranslate2.specs.attention_spec import RotaryScalingType

    assert isinstance(model, GPT)
    settings = model.settings
    more: dict[str, Any] = {"num_heads_kv": settings.kv_heads or None, "qk_norm": settings.qk_norm}
    if settings.positions == "rotary":
        more |= {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": settings.position_base}
    if settings.rope_scaling == "linear":
        more |= {"rotary_scaling_type": RotaryScalingType.Linear, "rotary_scaling_factor": settings.rope_factor}
    spec = TransformerDecoderModelSpec.from_config(settings.layers, settings.heads, **_common(run), **more)
    _set_embedding(spec.decoder, spec.decoder.embeddings, model.embedding, settings.max_positions)
    _set_stack(spec.decoder, model.decoder)
    table = model.embedding.table if settings.tie_embeddings else model.output
    _set_projection(run, spec.decoder.projection, table, None)
    spec.register_vocabulary(tokens_of(run.tokenizers[1]))
    return spec


def _set_embedding(spec: Any, embeddings: Any, module: Any, max_positions: int) -> None:
    """Token vectors, their factor, and position vectors."""
    embeddings.weight = _array(module.table)
    spec.scale_embeddings = float(module.scale) if module.scale != 1 else False
    table = position_table(module.positions, max_positions)
    if table is not None:
        spec.position_encodings.encodings = table
    if module.norm is not None:
        _set_norm(spec.layernorm_embedding, module.norm)


def _set_stack(spec: Any, stack: Any) -> None:
    for layer, block in zip(spec.layer, stack, strict=True):
        attention = layer.self_attention
        _set_norm(attention.layer_norm, block.self_attn_residual.norm)
        _set_linear(attention.linear[0], block.self_attn.qkv_proj)
        _set_linear(attention.linear[1], block.self_attn.out_proj)
        if block.self_attn.qk_norm:
            _set_norm(attention.q_norm, block.self_attn.q_norm)
            _set_norm(attention.k_norm, block.self_attn.k_norm)
        if isinstance(score := block.self_attn.score, BucketedBias):
            attention.relative_attention_bias = _array(score.bias)
            attention.relative_attention_max_distance = np.dtype("int32").type(score.distance)
        if hasattr(block, "cross_attn"):
            _set_norm(layer.attention.layer_norm, block.cross_attn_residual.norm)
            parts = (block.cross_attn.q_proj, block.cross_attn.kv_proj, block.cross_attn.out_proj)
            for linear, part in zip(layer.attention.linear, parts, strict=True):
                _set_linear(linear, part)
        _set_norm(layer.ffn.layer_norm, block.feed_forward_residual.norm)
        _set_feed_forward(layer.ffn, block.feed_forward)
    if stack.norm is not None:
        _set_norm(spec.layer_norm, stack.norm)


def _set_feed_forward(spec: Any, module: Any) -> None:
    if module.gated:  # the gate, then the hidden features
        half = len(module.w_in.weight) // 2
        _set_linear(spec.linear_0, module.w_in, slice(half))
        _set_linear(spec.linear_0_noact, module.w_in, slice(half, None))
    else:
        _set_linear(spec.linear_0, module.w_in)
    _set_linear(spec.linear_1, module.w_out)


def _set_projection(run: RunDir, spec: Any, table: Tensor, bias: Tensor | None) -> None:
    """The output projection; its bias keeps tokens that are not text from being generated."""
    spec.weight = _array(table)
    spec.bias = np.zeros(len(table), np.float32) if bias is None else _array(bias)
    spec.bias[[*never_generated(run), *getattr(run.recipe.model, "unused", ())]] = NEG_LOGIT


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma = _array(norm.weight)
    if isinstance(norm, LayerNorm):
        spec.beta = np.zeros_like(spec.gamma) if norm.bias is None else _array(norm.bias)


def _set_linear(spec: Any, linear: Any, rows: slice = slice(None)) -> None:
    spec.weight = _array(linear.weight[rows])
    if linear.bias is not None:
        spec.bias = _array(linear.bias[rows])


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().float().numpy().copy()
    return array
