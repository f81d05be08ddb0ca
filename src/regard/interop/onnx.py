"""Export to ONNX: the Transformer as encoder and decoder step, GPT as a step with cache, BERT as one pass.

The modules here compute what the models do, for padded batches and with the cache as inputs and outputs, so that they
can be traced. N sentences, S source tokens, B beams, T tokens in the cache, Q tokens of a step, L layers, H heads,
E features of a head, D width, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.corpora import corpora
from regard.errors import UserError
from regard.interop import onnx_translate
from regard.interop.hf_folder import Files, as_json
from regard.interop.portable import (
    NEG_LOGIT,
    never_generated,
    new_folder,
    position_table,
    require,
    text_template,
    tokenizer_files,
    unsupported,
    write_files,
)
from regard.models.bert import Bert
from regard.models.gpt import GPT
from regard.models.transformer import Transformer
from regard.nn import lora
from regard.registry import EXPORTERS
from regard.run_dir import RunDir
from regard.text import BOS, EOS, PAD

TABLES = ("sinusoidal", "sinusoidal-split", "learned")
POSITIONS = {"transformer": TABLES, "gpt": (*TABLES, "rotary"), "bert": TABLES}
ACTIVATIONS = ("relu", "gelu", "gelu-tanh", "silu", "gated")


@EXPORTERS.register("onnx")
def export_onnx(run: RunDir, path: Path) -> Path:
    """Write ONNX files, tokenizer.json, and for translation a script that runs them without regard or torch."""
    family = run.recipe.model.family
    if family not in POSITIONS:
        raise UserError(f"the {family} family cannot be exported to ONNX ({', '.join(POSITIONS)} can)")
    choices = {"positions": POSITIONS[family], "activation": ACTIVATIONS, "norm": ("layer", "rms")}
    problems = unsupported(run, "ONNX", **choices)
    if any(tokenizer.foreign is not None for tokenizer in run.tokenizers):
        problems.append("a run that was imported can be exported to huggingface and ctranslate2, not to ONNX")
    if family == "gpt" and run.recipe.data.kind == "pairs":
        problems.append("a GPT that was trained on pairs cannot be exported to ONNX")
    if problems:
        raise UserError("; ".join(problems))
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "onnx")
    model = run.model("cpu")
    lora.merge(model)
    with new_folder(path) as folder, torch.no_grad():
        write = {"transformer": _write_transformer, "gpt": _write_gpt, "bert": _write_bert}[family]
        write_files(folder, write(run, model, folder))
    return path


# -- modules -----------------------------------------------------------------------------------------------------------


class PaddedEmbedding(nn.Module):
    """Token vectors plus position vectors: ids [N, T] and positions [T] -> [N, T, D]."""

    positions: Tensor | None

    def __init__(self, module: Any, max_positions: int) -> None:
        super().__init__()
        self.table, self.scale = module.table, float(module.scale)
        positions = position_table(module.positions, max_positions)
        self.register_buffer("positions", None if positions is None else torch.from_numpy(positions))

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        x = F.embedding(ids, self.table) * self.scale
        return x if self.positions is None else x + F.embedding(position, self.positions)


class TracedRotary(nn.Module):
    """Rotation of the two halves of each head's features by angles that grow with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, base: float, max_positions: int) -> None:
        super().__init__()
        frequency = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(max_positions)[:, None] * frequency
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """x [B, H, Q, E] at positions [Q]."""
        cos, sin = F.embedding(position, self.cos), F.embedding(position, self.sin)
        one, other = x.chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[N, T, D] -> [N, H, T, E]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """[N, H, Q, E] to keys [N, H, K, E] -> [N, Q, D]; `bias` is added to the scores."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


def mask_bias(mask: Tensor) -> Tensor:
    """[N, K] with one for tokens -> [N, 1, 1, K] to add to scores."""
    return (1.0 - mask.float())[:, None, None, :] * NEG_LOGIT


class PaddedStack(nn.Module):
    """The blocks of a model and its last norm, with or without cross-attention and cache."""

    def __init__(self, stack: Any, heads: int, norm_first: bool) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(stack), stack.norm
        self.heads, self.norm_first = heads, norm_first

    def residual(self, norm: nn.Module, x: Tensor, f: Any) -> Tensor:
        return x + f(norm(x)) if self.norm_first else norm(x + f(x))

    def qkv(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (heads_of(part, self.heads) for part in block.self_attn.qkv_proj(x).chunk(3, dim=-1))
        return query, key, value

    def cross_kv(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the source in all layers, [L, N, H, S, E] each."""
        both = [block.cross_attn.kv_proj(source).chunk(2, dim=-1) for block in self.blocks]  # type: ignore[operator, union-attr]
        keys, values = ([heads_of(layer[part], self.heads) for layer in both] for part in (0, 1))
        return torch.stack(keys), torch.stack(values)

    def encode(self, x: Tensor, bias: Tensor) -> Tensor:
        """[N, S, D] -> [N, S, D]."""
        for block in self.blocks:
            x = self.residual(
                block.self_attn_residual.norm,  # type: ignore[arg-type]
                x,
                lambda h, b=block: b.self_attn.out_proj(attend(*self.qkv(b, h), bias)),
            )
            x = self.residual(block.feed_forward_residual.norm, x, block.feed_forward)  # type: ignore[arg-type]
        return x if self.norm is None else self.norm(x)

    def step(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        cross: tuple[Tensor, Tensor, Tensor] | None = None,
        rotate: Any = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, Q, D] and caches [L, B, H, T, E] -> [B, Q, D] and caches [L, B, H, T + Q, E]."""
        new_keys, new_values = [], []
        for layer, block in enumerate(self.blocks):

            def self_attn(h: Tensor, layer: int = layer, block: Any = block) -> Tensor:
                query, key, value = self.qkv(block, h)
                if rotate is not None:
                    query, key = rotate(query), rotate(key)
                new_keys.append(torch.cat([keys[layer], key], dim=2))
                new_values.append(torch.cat([values[layer], value], dim=2))
                out: Tensor = block.self_attn.out_proj(attend(query, new_keys[-1], new_values[-1], bias))
                return out

            def cross_attn(h: Tensor, layer: int = layer, block: Any = block) -> Tensor:
                assert cross is not None
                query = heads_of(block.cross_attn.q_proj(h), self.heads)
                out: Tensor = block.cross_attn.out_proj(attend(query, cross[0][layer], cross[1][layer], cross[2]))
                return out

            x = self.residual(block.self_attn_residual.norm, x, self_attn)  # type: ignore[arg-type]
            if cross is not None:
                x = self.residual(block.cross_attn_residual.norm, x, cross_attn)  # type: ignore[arg-type]
            x = self.residual(block.feed_forward_residual.norm, x, block.feed_forward)  # type: ignore[arg-type]
        x = x if self.norm is None else self.norm(x)
        return x, torch.stack(new_keys), torch.stack(new_values)


class Projection(nn.Module):
    """Logits [..., V], with those of tokens that are never generated far below the others."""

    def __init__(self, table: Tensor, bias: Tensor | None, banned: list[int]) -> None:
        super().__init__()
        self.table = table
        bias = torch.zeros(len(table)) if bias is None else bias.detach().clone()
        bias[banned] = NEG_LOGIT
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table, self.bias)  # type: ignore[arg-type]


class SourceEncoder(nn.Module):
    """input_ids and attention_mask [N, S] -> cross_keys and cross_values [L, N, H, S, E]."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        settings = model.settings
        self.embedding = PaddedEmbedding(model.source_embedding, settings.max_positions)
        self.encoder = PaddedStack(model.encoder, settings.heads, settings.norm_first)
        self.decoder = PaddedStack(model.decoder, settings.heads, settings.norm_first)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(input_ids.shape[1])
        encoded = self.encoder.encode(self.embedding(input_ids, position), mask_bias(attention_mask))
        return self.decoder.cross_kv(encoded)


class DecoderStep(nn.Module):
    """One step: token [B], position [1], caches, cross keys and values, source_mask [B, S] -> logits [B, V], caches."""

    def __init__(self, model: Transformer, banned: list[int]) -> None:
        super().__init__()
        settings = model.settings
        self.embedding = PaddedEmbedding(model.target_embedding, settings.max_positions)
        self.decoder = PaddedStack(model.decoder, settings.heads, settings.norm_first)
        self.project = Projection(*model.lm_head(), banned)

    def forward(
        self,
        token: Tensor,
        position: Tensor,
        keys: Tensor,
        values: Tensor,
        cross_keys: Tensor,
        cross_values: Tensor,
        source_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cross = cross_keys, cross_values, mask_bias(source_mask)
        x, keys, values = self.decoder.step(self.embedding(token[:, None], position), keys, values, cross)
        return self.project(x[:, 0]), keys, values


class CausalStep(nn.Module):
    """GPT: input_ids [B, Q], their positions [Q] and caches -> logits [B, V] after the last token, and caches."""

    def __init__(self, model: GPT, banned: list[int]) -> None:
        super().__init__()
        settings = model.settings
        self.embedding = PaddedEmbedding(model.embedding, settings.max_positions)
        self.decoder = PaddedStack(model.decoder, settings.heads, True)
        self.project = Projection(model.embedding.table if settings.tie_embeddings else model.output, None, banned)
        width = settings.width // settings.heads
        is_rotary = settings.positions == "rotary"
        self.rotary = TracedRotary(width, settings.position_base, settings.max_positions) if is_rotary else None

    def forward(
        self, input_ids: Tensor, position: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotate = None if self.rotary is None else lambda x: self.rotary(x, position)  # type: ignore[misc]
        past = torch.arange(keys.shape[3] + input_ids.shape[1])
        bias = (past > position[:, None]).float() * NEG_LOGIT  # [Q, T + Q]
        x, keys, values = self.decoder.step(self.embedding(input_ids, position), keys, values, rotate=rotate, bias=bias)
        return self.project(x[:, -1]), keys, values


class TextEncoder(nn.Module):
    """BERT: input_ids and attention_mask [N, S] -> logits [N, S, V] of the tokens, or [N, C] of the classes."""

    def __init__(self, model: Bert) -> None:
        super().__init__()
        settings = model.settings
        self.embedding, self.norm = PaddedEmbedding(model.embedding, settings.max_positions), model.embedding.norm
        self.token_type = model.embedding.token_types[0].detach()
        self.encoder = PaddedStack(model.encoder, settings.heads, settings.norm_first)
        self.model, self.fills, self.mean = model, settings.task == "fill", settings.pooling == "mean"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        position = torch.arange(input_ids.shape[1])
        x = self.norm(self.embedding(input_ids, position) + self.token_type)
        x = self.encoder.encode(x, mask_bias(attention_mask))
        if self.fills:
            return F.linear(self.model.mlm_head(x), self.model.embedding.table, self.model.mlm_head.bias)
        weight = attention_mask.float()[..., None]
        text = (x * weight).sum(1) / weight.sum(1) if self.mean else x[:, 0]
        logits: Tensor = self.model.classifier(text)
        return logits


# -- files -------------------------------------------------------------------------------------------------------------


def _write_transformer(run: RunDir, model: Any, folder: Path) -> Files:
    settings = model.settings
    ids, mask = torch.full((2, 5), EOS), torch.ones(2, 5, dtype=torch.long)
    _export(folder / "encoder.onnx", SourceEncoder(model), {"input_ids": (ids, "ns"), "attention_mask": (mask, "ns")},
            {"cross_keys": "", "cross_values": ""})  # fmt: skip
    shape = settings.decoder_layers, settings.heads, settings.width // settings.heads
    cross = torch.zeros(shape[0], 3, shape[1], 5, shape[2])
    cache = torch.zeros(shape[0], 3, shape[1], 4, shape[2])
    inputs = {
        "token": (torch.full((3,), BOS), "b"),
        "position": (torch.tensor([4]), ""),
        "keys": (cache, " b t"),
        "values": (cache.clone(), " b t"),
        "cross_keys": (cross, " b s"),
        "cross_values": (cross.clone(), " b s"),
        "source_mask": (torch.ones(3, 5, dtype=torch.long), "bs"),
    }
    outputs = {"logits": "", "new_keys": "", "new_values": ""}
    _export(folder / "decoder.onnx", DecoderStep(model, never_generated(run)), inputs, outputs)
    decoding, data, (source, target) = run.recipe.decoding, corpora(run.recipe.data)[0], run.tokenizers
    config = _config(run) | {
        "cache_shape": shape,
        "max_ratio": decoding.max_ratio,
        "max_extra": decoding.max_extra,
        "length_penalty": decoding.length_penalty,
        "source_tags": [source.tag(tag) for tag in (data.source_tag,) if tag],
        "target_tags": [target.tag(tag) for tag in (data.target_tag,) if tag],
    }
    script = Path(onnx_translate.__file__).read_bytes()
    return tokenizer_files(run, "$A </s>") | {"config.json": as_json(config), "translate.py": script}


def _write_gpt(run: RunDir, model: Any, folder: Path) -> Files:
    settings = model.settings
    shape = settings.layers, settings.heads, settings.width // settings.heads
    cache = torch.zeros(shape[0], 2, shape[1], 4, shape[2])
    inputs = {
        "input_ids": (torch.full((2, 3), BOS), "bq"),
        "position": (torch.arange(4, 7), "q"),
        "keys": (cache, " b t"),
        "values": (cache.clone(), " b t"),
    }
    step = CausalStep(model, never_generated(run))
    _export(folder / "decoder.onnx", step, inputs, {"logits": "", "new_keys": "", "new_values": ""})
    return tokenizer_files(run, text_template(run)) | {"config.json": as_json(_config(run) | {"cache_shape": shape})}


def _write_bert(run: RunDir, model: Any, folder: Path) -> Files:
    ids, mask = torch.full((2, 5), EOS), torch.ones(2, 5, dtype=torch.long)
    encoder = TextEncoder(model)
    inputs = {"input_ids": (ids, "ns"), "attention_mask": (mask, "ns")}
    _export(folder / "model.onnx", encoder, inputs, {"logits": ""})
    names = tokenizer_files(run, "<s> $A </s>")
    names.pop("target_tokenizer.json", None)  # the classes
    return names | {"config.json": as_json(_config(run) | {"classes": run.classes})}


def _config(run: RunDir) -> dict[str, Any]:
    limits = {"max_positions": run.recipe.model.max_positions, "lowercase": run.recipe.data.lowercase}
    return {"pad": PAD, "bos": BOS, "eos": EOS, **limits, "forbidden": never_generated(run)}


def _export(path: Path, module: nn.Module, inputs: dict[str, tuple[Tensor, str]], outputs: dict[str, str]) -> None:
    """Trace a module. A letter for each axis of an input names a size that may differ; a space, one that may not."""
    shapes = {
        name: {axis: torch.export.Dim.DYNAMIC for axis, letter in enumerate(letters) if letter != " "}
        for name, (_, letters) in inputs.items()
    }
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(example for example, _ in inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=tuple(shapes.values()),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
