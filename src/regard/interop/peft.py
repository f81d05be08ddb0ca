"""Low-rank adapters in the format of the library peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from regard import tensor_io
from regard.errors import UserError
from regard.files import errno_text
from regard.interop.hf_folder import Fields, HFFolder, as_json, short_repr, write_files
from regard.models.gpt_settings import GPTSettings
from regard.models.transformer_settings import TransformerSettings
from regard.nn import lora
from regard.recipes.schema import Recipe
from regard.registry import EXPORTERS
from regard.run_dir import RunDir
from regard.tensor_io import Tensors
from regard.text import chat

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LLAMA = {
    "self_attn.qkv_proj.query": "self_attn.q_proj",
    "self_attn.qkv_proj.key": "self_attn.k_proj",
    "self_attn.qkv_proj.value": "self_attn.v_proj",
    "self_attn.out_proj.out": "self_attn.o_proj",
    "feed_forward.w_in.gate": "mlp.gate_proj",
    "feed_forward.w_in.up": "mlp.up_proj",
    "feed_forward.w_out.down": "mlp.down_proj",
}
MARIAN = {
    **{name: theirs for name, theirs in LLAMA.items() if "qkv" in name},
    "self_attn.out_proj.out": "self_attn.out_proj",
    "cross_attn.q_proj.query": "encoder_attn.q_proj",
    "cross_attn.kv_proj.key": "encoder_attn.k_proj",
    "cross_attn.kv_proj.value": "encoder_attn.v_proj",
    "cross_attn.out_proj.out": "encoder_attn.out_proj",
    "feed_forward.w_in.up": "fc1",
    "feed_forward.w_out.down": "fc2",
}


def _names(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Their name of each adapter and ours: layer and block of rows."""
    settings = recipe.model
    if isinstance(settings, GPTSettings) and settings.activation.startswith("gated") and not settings.softcap:
        stacks, table = {"decoder": ("model.layers", settings.layers)}, LLAMA
    elif isinstance(settings, TransformerSettings) and not settings.activation.startswith("gated"):
        depths = {"encoder": settings.encoder_layers, "decoder": settings.decoder_layers}
        stacks, table = {side: (f"model.{side}.layers", depth) for side, depth in depths.items()}, MARIAN
    else:
        raise UserError("peft's names are known for relatives of Llama and Marian only, not for this run")
    for ours, (theirs, depth) in stacks.items():
        for i in range(depth):
            for name, other in table.items():
                if ours == "decoder" or not name.startswith("cross_attn"):
                    layer, _, block = name.rpartition(".")
                    yield f"{theirs}.{i}.{other}", f"{ours}.{i}.{layer}", block


@EXPORTERS.register("peft")
def export_adapter(run: RunDir, path: str | Path) -> Path:
    """Write the low-rank adapters of a run for peft, without the weights that they adapt."""
    recipe, out, settings = run.recipe, Path(path), run.recipe.training
    if settings.adapter != "lora":
        raise UserError(f'{run.path} has no adapters: it was not trained with training.adapter = "lora"')
    stored = tensor_io.load(run.best)[0]
    tensors: Tensors = {}
    for theirs, layer, block in _names(recipe):
        for kind in "ab":
            if (name := f"{layer}.lora_{kind}.{block}") in stored:
                tensors[f"{PREFIX}{theirs}.lora_{kind.upper()}.weight"] = stored[name].float()
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if isinstance(recipe.model, GPTSettings) else "SEQ_2_SEQ_LM",
        "base_model_name_or_path": None,
        "r": settings.adapter_rank,
        "lora_alpha": settings.adapter_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
    try:
        write_files(out, WEIGHTS, tensors, {CONFIG: as_json(config)})
    except OSError as error:
        raise UserError(f"{out} could not be written: {errno_text(error)}") from error
    return out


def is_adapter_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def import_adapter(path: str | Path, base: RunDir, out: str | Path) -> RunDir:
    """Make a run of a base run and adapters that peft wrote."""
    if base.recipe.training.adapter != "none":
        raise UserError(f"{base.path} has adapters already, which the new ones would replace: name a run without")
    folder = HFFolder(path, CONFIG)
    config = folder.json(CONFIG)
    _refuse(config)
    rank, alpha = _scaling(config, base.recipe)
    if not folder.has(WEIGHTS):
        raise UserError(f"{folder.path} has no {WEIGHTS}")
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another --out")
    known = {theirs: (layer, block) for theirs, layer, block in _names(base.recipe)}
    adapters = _adapters(folder, known, rank)
    blocks = {name.rpartition(".")[2] for name in adapters}
    targets = [t for t in lora.TARGETS if t in {TARGET_OF.get(block, block) for block in blocks}]
    training = base.recipe.training.model_copy(
        update={"adapter": "lora", "adapter_rank": rank, "adapter_alpha": alpha, "adapter_targets": targets}
    )
    recipe = base.recipe.model_copy(update={"training": training, "about": f"{base.recipe.about}; with adapters"})
    with torch.device("meta"):
        model = base.fresh_model()
        lora.add_adapters(model, rank, alpha, targets)
    shapes = tensor_io.model_tensors(model)
    absent = {n: torch.zeros(t.shape) for n, t in shapes.items() if lora.is_adapter(n) and n not in adapters}
    tensors = {**tensor_io.load(base.best)[0], **absent, **adapters}
    tensor_io.check_names(shapes, tensors, folder.path)
    run = RunDir.create(out, recipe)
    run.save_tokenizers(*base.tokenizers)
    chat.copy(base.path, run.path)
    tensor_io.save(run.best, tensors, {"step": 0, "weights": "imported"})
    return run


UNSUPPORTED = (
    *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "layers_pattern"),
    *("alora_invocation_tokens", "layer_replication", "trainable_token_indices"),
    *("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
)
INITIALISATIONS = ("gaussian", "eva", "orthogonal")  # the others change the weights of the base model
MAX_ALPHA = 1e6
TARGET_OF = {"gate": "ffn_in", "up": "ffn_in", "down": "ffn_out"}


def _refuse(config: Fields) -> None:
    """Refuse kinds of adapters that have no counterpart here."""
    if config.content.get("peft_type") != "LORA":
        raise config.error("peft_type", f"= {short_repr(config.content.get('peft_type'))}: only LORA is supported")
    for name in UNSUPPORTED:
        if config.content.get(name):
            raise config.error(name, f"= {short_repr(config.content[name])} has no counterpart here")
    if config.content.get("bias", "none") != "none":
        raise config.error("bias", "must be none to have a counterpart here")
    initial = config.content.get("init_lora_weights")
    if initial is not None and not isinstance(initial, bool) and initial not in INITIALISATIONS:
        raise config.error(
            "init_lora_weights", f"= {short_repr(initial)} may have changed the weights of the base model"
        )


def _scaling(config: Fields, recipe: Recipe) -> tuple[int, float]:
    """The rank of the adapters, and alpha such that what they add is multiplied by alpha / rank."""
    rank, alpha, width = config.integer("r") or 0, config.content.get("lora_alpha"), recipe.model.width
    if not 1 <= rank <= width:
        raise config.error("r", f"must be between 1 and the width of the base run, {width}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= MAX_ALPHA:
        raise config.error("lora_alpha", f"must be a positive number up to {MAX_ALPHA:,.0f}")
    return rank, alpha * math.sqrt(rank) if config.boolean("use_rslora", False) else alpha


def _adapters(folder: HFFolder, known: dict[str, tuple[str, str]], rank: int) -> Tensors:
    """The tensors of a peft file by our names."""
    tensors: Tensors = {}
    for info in folder.tensors_of(WEIGHTS):
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])(?:\.default)?\.weight", info.name)
        if match is None or match[1] not in known:
            raise UserError(f"{info.file}: {short_repr(info.name)} has no counterpart in the base run")
        # A is [rank, in], B is [out, rank]
        if len(info.shape) != 2 or info.shape["AB".index(match[2])] != rank:
            shape = "×".join(map(str, info.shape))
            raise UserError(f"{info.file}: {short_repr(info.name)} of shape {shape} does not have rank r = {rank}")
        layer, block = known[match[1]]
        with safe_open(str(info.file), framework="pt") as file:
            tensors[f"{layer}.lora_{match[2].lower()}.{block}"] = file.get_tensor(info.name).float()
    if not tensors:
        raise UserError(f"{folder.path / WEIGHTS} has no adapters")
    return tensors
