"""The Vision Transformer (Dosovitskiy et al. 2021): an encoder over the patches of an image, to classify it.

N images, P tokens each, N P = T tokens of a packed batch, D width, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from regard import taps, tensor_io
from regard.attention import attention_layout
from regard.models.base import SequenceModel
from regard.nn import flops, losses
from regard.nn.augment import Augmentation
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import BlockStack, EncoderBlock
from regard.nn.image_tokens import DEVIATION, MEAN, ImageConfig, ImageTokens
from regard.packed import Batch
from regard.recipes.schema import Activation, ScoreName, SizedSettings, TokenNorm
from regard.registry import MODELS

Channels = Annotated[tuple[float, ...], Field(min_length=1, max_length=3)]


@dataclass(frozen=True)
class ImageBatch(Batch):
    """Images [N, side, side, channels], uint8 or numbers from 0 to 1, and their class ids [N].

    A batch to train on may also say how its images are augmented, by random numbers `draws` [N, K].
    """

    images: Tensor
    labels: Tensor
    draws: Tensor | None = None
    augmentation: Augmentation | None = None

    @property
    def target_mask(self) -> Tensor:
        return torch.ones_like(self.labels, dtype=torch.bool)

    @property
    def num_targets(self) -> int:
        return len(self.labels)


class ViTSettings(SizedSettings):
    """An encoder over the patches of an image, that names its class."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": dict(width=64, heads=4, layers=3, ffn_width=128, dropout=0.0),
        "small": dict(width=128, heads=4, layers=4, ffn_width=512, dropout=0.1),
        "medium": dict(width=256, heads=4, layers=7, ffn_width=768, dropout=0.1),
        "large": dict(width=384, heads=6, layers=8, ffn_width=1536, dropout=0.1),
        "base": dict(width=768, heads=12, layers=12, ffn_width=3072, dropout=0.1),
    }
    DEFAULT_SIZE: ClassVar[str] = "tiny"
    TASKS: ClassVar[tuple[str, ...]] = ("image-classification",)

    family: Literal["vit"] = Field("vit", description="model family")
    size: Literal["tiny", "small", "medium", "large", "base"] = Field(
        "tiny", description="preset for the sizes below; each can be set separately"
    )
    image: int = Field(24, ge=1, le=4096, description="height and width of an image in pixels; others are resized")
    channels: Literal[1, 3] = Field(3, description="1: grey, 3: red, green and blue")
    patch: int = Field(4, ge=1, description="height and width of a patch in pixels; must divide image")
    resize: Literal["crop", "stretch"] = Field(
        "crop", description="other images are scaled and cropped to their centre, or stretched to a square, as in ViT"
    )
    resample: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = Field(
        "bicubic", description="Pillow's filter by which other images are scaled"
    )
    pixel_mean: Channels = Field(
        (MEAN,), description="subtracted from pixels, which are from 0 to 1: one number, or one for each channel"
    )
    pixel_std: Channels = Field((DEVIATION,), description="what pixels are then divided by")
    stem: Literal["patches", "convolutions"] = Field(
        "patches",
        description="what turns patches into tokens: a linear layer, or convolutions with pooling, as in CCT, which "
        "learn more from few images",
    )
    positions: Literal["learned", "sinusoidal"] = Field(
        "learned", description="position vectors of patches; sinusoidal: of row and column"
    )
    pooling: Literal["mean", "class-token"] = Field(
        "mean", description="what the class is read from: the mean over the patches, or a token of its own"
    )
    class_position: bool = Field(
        False, description="the class token has a learned position vector of its own, as in ViT"
    )
    width: int = Field(..., ge=2, description="embedding and hidden size")
    heads: int = Field(..., ge=1, description="attention heads; each has width / heads features")
    layers: int = Field(..., ge=1, description="number of layers")
    ffn_width: int = Field(..., ge=1, description="hidden size of the feed-forward layers")
    dropout: float = Field(
        ..., ge=0, lt=1, description="dropout probability, on patch embeddings and on the output of each sub-layer"
    )
    activation: Activation = Field("gelu", description="activation of the feed-forward layers")
    norm: TokenNorm = Field("layer", description="normalisation layer, before each sub-layer")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of the normalisation layers")
    qkv_bias: bool = Field(True, description="biases of queries, keys and values")
    score: ScoreName = Field("scaled-dot", description="attention score of queries and keys")

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        return self.layers, 0

    def forward_flops(self, batch: ImageBatch, target_size: int) -> int:
        images, config = len(batch.images), ImageConfig.from_settings(self)
        encoder = self.layers * flops.encoder_block(BlockConfig.from_settings(self), [config.tokens] * images)
        return images * config.flops + encoder + 2 * images * self.width * target_size

    def summary(self) -> str:
        return "ViT"

    @model_validator(mode="after")
    def _whole_patches(self) -> ViTSettings:
        if self.image % self.patch:
            raise ValueError(f"patch {self.patch} does not divide the {self.image} pixels of an image's side")
        if self.stem == "convolutions" and self.patch & (self.patch - 1):
            raise ValueError(f'stem = "convolutions" halves an image repeatedly: patch {self.patch} is no power of 2')
        return self

    @model_validator(mode="after")
    def _check_pixels(self) -> ViTSettings:
        for name in ("pixel_mean", "pixel_std"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise ValueError(f"{name} needs one number, or one for each of {self.channels} channels")
        if min(self.pixel_std) <= 0:
            raise ValueError("pixel_std must be above 0")
        if self.class_position and (self.pooling, self.positions) != ("class-token", "learned"):
            raise ValueError('class_position needs pooling = "class-token" and positions = "learned"')
        return self


@MODELS.register("vit")
class ViT(SequenceModel):
    """W · pool(encoder(tokens of the image))."""

    Settings = ViTSettings
    static_shapes = True

    def __init__(self, settings: ViTSettings, source_size: int, target_size: int, shared: bool = False) -> None:
        super().__init__()
        self.settings = settings
        self.tokens = ImageTokens(ImageConfig.from_settings(settings))
        self.encoder = BlockStack.of(BlockConfig.from_settings(settings), EncoderBlock, settings.layers)
        self.classifier = nn.Linear(settings.width, target_size)

    def encode(self, images: Tensor) -> Tensor:
        """images [N, side, side, channels] -> [N P, D]."""
        x, layout = self.tokens(images)
        return self.encoder(x, attention_layout(layout, layout), is_token=layout.is_token)

    def logits(self, batch: ImageBatch) -> Tensor:
        """[N, C]."""
        hidden = self.encode(batch.images).unflatten(0, (len(batch.images), -1))
        pooled = hidden.mean(1) if self.settings.pooling == "mean" else hidden[:, 0]
        return taps.tap(self, "logits", self.classifier(pooled))

    def init_from(self, tensors: Mapping[str, Tensor], origin: object) -> None:
        """Load another run's weights; those of a model with other classes, or a `body`, leave the classifier new."""
        own, theirs = tensor_io.model_tensors(self), tensors.get("classifier.bias")
        if theirs is None or theirs.shape != own["classifier.bias"].shape:
            tensors = self.body(tensors) | {name: own[name] for name in own.keys() - self.body(own).keys()}
        super().init_from(tensors, origin)

    @staticmethod
    def body(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights but the classifier's."""
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("classifier.")}

    def forward(self, batch: ImageBatch, smoothing: float = 0.0, r_drop: float = 0.0) -> Tensor:
        """The training loss. The labels of mixed images are mixed too: each has two, with their shares."""
        if batch.augmentation is None or batch.draws is None:
            return super().forward(batch, smoothing, r_drop)
        images, share = batch.augmentation(batch.images, batch.draws)
        augmented = ImageBatch(images, batch.labels)
        if not batch.augmentation.mixes:
            return super().forward(augmented, smoothing, r_drop)
        logits = self.logits(augmented)
        one_hot = (batch.labels[:, None] == torch.arange(logits.shape[-1], device=logits.device)).float()
        mixed = one_hot.roll(1, 0).lerp(one_hot, share[:, None])
        return losses.cross_entropy(logits, mixed, batch.target_mask, smoothing)
