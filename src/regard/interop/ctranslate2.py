"""Export of Transformers and GPTs to CTranslate2, through its specification classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard.errors import UserError
from regard.interop.portable import (
    NEG_LOGIT,
    never_generated,
    new_folder,
    position_table,
    require,
    tokenizer_files,
    tokens_of,
    unsupported,
    write_files,
)
from regard.models import SequenceModel
from regard.models.gpt import GPT
from regard.models.transformer import Transformer
from regard.registry import EXPORTERS
from regard.run_dir import RunDir
from regard.tasks.aligner import guided_view

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu-tanh": "GELUTanh", "silu": "SWISH", "gated": "SWISH"}
TABLES = ("sinusoidal", "sinusoidal-split", "learned")
POSITIONS = {"transformer": TABLES, "gpt": (*TABLES, "rotary")}
NORM_EPS = 1e-5


@EXPORTERS.register("ctranslate2")
def export_ctranslate2(run: RunDir, path: Path) -> Path:
    """Write a model directory for CTranslate2, with tokenizer.json."""
    family = run.recipe.model.family
    if family not in POSITIONS:
        raise UserError(f"the {family} family has no counterpart in CTranslate2 ({' and '.join(POSITIONS)} have)")
    problems = unsupported(
        run,
        "CTranslate2",
        positions=POSITIONS[family],
        activation=tuple(ACTIVATIONS),
        norm=("layer", "rms"),
    )
    if family == "gpt" and run.recipe.data.kind == "pairs":
        problems.append("a GPT that was trained on pairs has no counterpart in CTranslate2")
    if problems:
        raise UserError("; ".join(problems))
    require("ctranslate2", "ctranslate2")
    model = run.model("cpu")
    spec, template = (
        (_translator(run, model), "$A </s>") if family == "transformer" else (_decoder(run, model), "<s> $A")
    )
    spec.config.layer_norm_epsilon = NORM_EPS
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
        "ffn_glu": settings.activation == "gated",
        "rms_norm": settings.norm == "rms",
    }


def _translator(run: RunDir, model: SequenceModel) -> Any:
    from ctranslate2.specs import TransformerSpec

    assert isinstance(model, Transformer)
    settings = model.settings
    guided = guided_view(run.recipe)
    aligned = {} if guided is None else {"alignment_layer": guided.layer, "alignment_heads": 1}
    spec = TransformerSpec.from_config(
        (settings.encoder_layers, settings.decoder_layers), settings.heads, **_common(run), **aligned
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
    spec.config.decoder_start_token, spec.config.eos_token = "<s>", "</s>"
    return spec


def _decoder(run: RunDir, model: SequenceModel) -> Any:
    from ctranslate2.specs import TransformerDecoderModelSpec

    assert isinstance(model, GPT)
    settings = model.settings
    rotary: dict[str, Any] = {}
    if settings.positions == "rotary":
        rotary = {"rotary_dim": settings.width // settings.heads, "rotary_interleave": False}
        rotary["rotary_base"] = settings.position_base
    spec = TransformerDecoderModelSpec.from_config(settings.layers, settings.heads, **_common(run), **rotary)
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


def _set_stack(spec: Any, stack: Any) -> None:
    for layer, block in zip(spec.layer, stack, strict=True):
        attention = layer.self_attention
        _set_norm(attention.layer_norm, block.self_attn_residual.norm)
        _set_linear(attention.linear[0], block.self_attn.qkv_proj)
        _set_linear(attention.linear[1], block.self_attn.out_proj)
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
    weight, bias = _array(module.w_in.weight), _array(module.w_in.bias)
    if module.gated:  # the gate, then the hidden features
        half = len(weight) // 2
        spec.linear_0.weight, spec.linear_0.bias = weight[:half], bias[:half]
        spec.linear_0_noact.weight, spec.linear_0_noact.bias = weight[half:], bias[half:]
    else:
        spec.linear_0.weight, spec.linear_0.bias = weight, bias
    _set_linear(spec.linear_1, module.w_out)


def _set_projection(run: RunDir, spec: Any, table: Tensor, bias: Tensor | None) -> None:
    """The output projection; its bias keeps tokens that are not text from being generated."""
    spec.weight = _array(table)
    spec.bias = np.zeros(len(table), np.float32) if bias is None else _array(bias)
    spec.bias[never_generated(run)] = NEG_LOGIT


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma = _array(norm.weight)
    if getattr(norm, "bias", None) is not None:
        spec.beta = _array(norm.bias)


def _set_linear(spec: Any, linear: Any) -> None:
    spec.weight = _array(linear.weight)
    if linear.bias is not None:
        spec.bias = _array(linear.bias)


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().float().numpy().copy()
    return array
