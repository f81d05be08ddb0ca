"""Convert between the Vision Transformer in Hugging Face's layout and ours: image classifiers, and bodies without one.

preprocessor_config.json says how images become pixels: as ViTImageProcessor computes with Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from regard.errors import UserError
from regard.interop.bert import class_names
from regard.interop.common import (
    Imported,
    activation,
    architecture,
    count,
    fraction,
    hf_activation,
    layers,
    unsupported_settings,
)
from regard.interop.hf_folder import Fields, Files, HFFolder, TensorInfo, as_json, short_repr
from regard.interop.name_map import STACKED, Entry, IgnoredTensors, layered
from regard.models.vit import ViTSettings
from regard.recipes.schema import Recipe
from regard.tensor_io import Tensors

CLASS, BODY_CLASS = "ViTForImageClassification", "ViTModel"
BODY = "vit."  # prefix of the body's names, unless only the body was saved
CLASS_TOKEN, POSITIONS = "vit.embeddings.cls_token", "vit.embeddings.position_embeddings"
PATCHES = "vit.embeddings.patch_embeddings.projection"
ATTENTION = "vit.encoder.layer.{i}.attention.attention.{query,key,value}"
ENCODER = [
    Entry(f"{ATTENTION}.weight", "encoder.{i}.self_attn.qkv_proj.weight", STACKED),
    Entry("vit.encoder.layer.{i}.attention.output.dense.{p}", "encoder.{i}.self_attn.out_proj.{p}"),
    Entry("vit.encoder.layer.{i}.layernorm_before.{p}", "encoder.{i}.self_attn_residual.norm.{p}"),
    Entry("vit.encoder.layer.{i}.intermediate.dense.{p}", "encoder.{i}.feed_forward.w_in.{p}"),
    Entry("vit.encoder.layer.{i}.output.dense.{p}", "encoder.{i}.feed_forward.w_out.{p}"),
    Entry("vit.encoder.layer.{i}.layernorm_after.{p}", "encoder.{i}.feed_forward_residual.norm.{p}"),
]
QKV_BIAS = Entry(f"{ATTENTION}.bias", "encoder.{i}.self_attn.qkv_proj.bias", STACKED)
ENDS = [Entry("vit.layernorm.{p}", "encoder.norm.{p}"), Entry("classifier.{p}", "classifier.{p}")]

PROCESSOR = "preprocessor_config.json"
PROCESSORS = ("ViTImageProcessor", "ViTImageProcessorFast", "ViTImageProcessorPil", "ViTFeatureExtractor")
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's number
BILINEAR, IMAGE, HALF, BYTES = 2, 224, 0.5, 255  # defaults of ViTImageProcessor, and the largest value of a pixel
# For --from: what suits a published model better than the defaults, which are for text.
TRAINING = {"batch_tokens": 64, "learning_rate": 1e-4, "warmup": 100, "optimizer": "adamw", "label_smoothing": 0.0}


@dataclass(frozen=True)
class Reshaped:
    """The same numbers in other shapes."""

    our_shape: tuple[int, ...]
    their_shape: tuple[int, ...]

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].reshape(self.our_shape)

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        return [whole.reshape(self.their_shape)]


def entries(recipe: Recipe, source: Any, target: Any) -> list[Entry]:
    settings = cast(ViTSettings, recipe.model)
    width, patch = settings.width, settings.patch
    patches = Reshaped((width, -1), (width, settings.channels, patch, patch))
    table = [
        Entry(CLASS_TOKEN, "tokens.class_token", Reshaped((-1,), (1, 1, -1))),
        Entry(POSITIONS, "tokens.positions", Reshaped((-1, width), (1, -1, width))),
        Entry(f"{PATCHES}.weight", "tokens.stem.project.weight", patches),
        Entry(f"{PATCHES}.bias", "tokens.stem.project.bias"),
    ]
    blocks = [*ENCODER, QKV_BIAS] if settings.qkv_bias else ENCODER
    return table + layered(blocks, settings.layers) + layered(ENDS)


def ignored(recipe: Recipe) -> IgnoredTensors:
    """Tensors of a file that are not converted: classifiers use neither the pooler nor the token of masked patches."""
    return IgnoredTensors([r"vit\.pooler\.dense\.(weight|bias)", r"vit\.embeddings\.mask_token"])


def canonical(header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by the names in the table; a saved body has no prefix."""
    return dict(header) if CLASS_TOKEN in header else {BODY + name: info for name, info in header.items()}


def defaults(target: Any) -> Tensors:
    return {}


def constants(recipe: Recipe) -> Tensors:
    return {}


# -- import ------------------------------------------------------------------------------------------------------------


def read(folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
    folder.require(quantization_config=None)
    kind = architecture(folder) or BODY_CLASS
    if kind not in (CLASS, BODY_CLASS):
        raise UserError(f"{folder.path}: {short_repr(kind)} has no counterpart here ({CLASS}, {BODY_CLASS} have)")
    width, heads = count(folder, "hidden_size", 768), count(folder, "num_attention_heads", 12)
    if folder.config.integer("head_dim") not in (None, width // max(heads, 1)):
        raise folder.config.error("head_dim", "must be hidden_size / num_attention_heads to have a counterpart here")
    image, patch = _side(folder, "image_size", IMAGE), _side(folder, "patch_size", 16)
    channels = count(folder, "num_channels", 3)
    if image % patch:
        raise folder.config.error("patch_size", f"= {patch} does not divide image_size = {image}")
    if channels not in (1, 3):
        raise folder.config.error("num_channels", f"= {channels} has no counterpart here (1 and 3 have)")
    recipe = {
        "data": {"imported": "images"},
        "model": {
            "family": "vit",
            "image": image,
            "channels": channels,
            "patch": patch,
            "pooling": "class-token",
            "class_position": True,
            "width": width,
            "heads": heads,
            "layers": layers(folder, "num_hidden_layers", 12),
            "ffn_width": count(folder, "intermediate_size", 3072),
            "dropout": fraction(folder, "hidden_dropout_prob", 0.0),
            "activation": activation(folder, "hidden_act", "gelu"),
            "norm_eps": fraction(folder, "layer_norm_eps", 1e-12),
            "qkv_bias": folder.config.boolean("qkv_bias", True),
            **_pixels(folder, image, channels),
        },
        "training": TRAINING,
    }
    classes = class_names(folder, header, number_duplicates=True)
    return Imported(Recipe.model_validate(recipe), None, None, headless=kind == BODY_CLASS, classes=classes)


def _side(folder: HFFolder, name: str, default: int) -> int:
    """A number of pixels in config.json, or a list of two equal ones."""
    value = folder.setting(name, default)
    sides = value if isinstance(value, list) and len(value) == 2 else [value]
    if not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        raise folder.config.error(name, f"must be a positive whole number, not {short_repr(value)}")
    if sides[0] != sides[-1]:
        raise folder.config.error(name, f"= {sides[0]} x {sides[1]} has no counterpart here: only squares have")
    return int(sides[0])


def _pixels(folder: HFFolder, image: int, channels: int) -> dict[str, Any]:
    """The settings of preprocessor_config.json: how images are scaled, and how their pixels are standardised."""
    if not folder.has(PROCESSOR):
        raise UserError(f"{folder.path} has no {PROCESSOR}, which says how images are scaled")
    given = folder.json(PROCESSOR)
    for name in ("image_processor_type", "feature_extractor_type"):
        if (kind := given.text(name)) is not None and kind not in PROCESSORS:
            raise given.error(name, f"= {short_repr(kind)} has no counterpart here (only {PROCESSORS[0]} has)")
    for name in ("do_center_crop", "do_pad"):
        if given.boolean(name):
            raise given.error(name, "= true has no counterpart here")
    size = given.content.get("size", IMAGE)
    if given.boolean("do_resize", True) and size not in (image, {"height": image, "width": image}):
        raise given.error("size", f"must be that of config.json: image_size = {image}")
    number = given.integer("resample")
    number = BILINEAR if number is None else number
    if not 0 <= number < len(FILTERS):
        raise given.error("resample", f"= {number} is no filter of Pillow")
    scale = BYTES * _number(given, "rescale_factor", 1 / BYTES) if given.boolean("do_rescale", True) else float(BYTES)
    mean, std = (0.0,) * channels, (1.0,) * channels
    if given.boolean("do_normalize", True):
        mean, std = _numbers(given, "image_mean", channels), _numbers(given, "image_std", channels)
    if min(std) <= 0 or scale <= 0:
        raise given.error("rescale_factor" if scale <= 0 else "image_std", "must be above 0")
    return {
        "resize": "stretch",
        "resample": FILTERS[number],
        "pixel_mean": [each / scale for each in mean],
        "pixel_std": [each / scale for each in std],
    }


def _number(given: Fields, name: str, default: float) -> float:
    return _checked(given, name, given.content.get(name, default))


def _numbers(given: Fields, name: str, channels: int) -> tuple[float, ...]:
    """One number for each channel."""
    value = given.content.get(name, [HALF] * channels)
    if not isinstance(value, list) or len(value) != channels:
        raise given.error(name, f"must have a number for each of {channels} channels")
    return tuple(_checked(given, name, each) for each in value)


def _checked(given: Fields, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > 1e6:
        raise given.error(name, f"must have numbers of at most a million, not {short_repr(value)}")
    return float(value)


# -- export ------------------------------------------------------------------------------------------------------------


def unsupported(recipe: Recipe, source: Any, target: Any) -> list[str]:
    """The settings of a run that ViT cannot express."""
    wanted: dict[str, Any] = {"norm": "layer", "stem": "patches", "positions": "learned", "pooling": "class-token"}
    wanted |= {"class_position": True, "resize": "stretch"}
    return unsupported_settings(recipe.model, "ViT", **wanted)


def config(recipe: Recipe, source: Any, target: Any) -> dict[str, Any]:
    settings = cast(ViTSettings, recipe.model)
    return {
        "architectures": [CLASS],
        "model_type": "vit",
        "hidden_size": settings.width,
        "num_attention_heads": settings.heads,
        "num_hidden_layers": settings.layers,
        "intermediate_size": settings.ffn_width,
        "hidden_act": hf_activation(settings.activation),
        "hidden_dropout_prob": settings.dropout,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": settings.norm_eps,
        "image_size": settings.image,
        "patch_size": settings.patch,
        "num_channels": settings.channels,
        "qkv_bias": settings.qkv_bias,
        "dtype": "float32",
    }


def files(recipe: Recipe, source: Any, target: Any) -> Files:
    settings = cast(ViTSettings, recipe.model)
    mean, std = (list(each) * (settings.channels // len(each)) for each in (settings.pixel_mean, settings.pixel_std))
    content = {
        "image_processor_type": PROCESSORS[0],
        "do_resize": True,
        "size": {"height": settings.image, "width": settings.image},
        "resample": FILTERS.index(settings.resample),
        "do_rescale": True,
        "rescale_factor": 1 / BYTES,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
    return {PROCESSOR: as_json(content)}
