"""The Vision Transformer (Dosovitskiy et al. 2021): an encoder over the patches of an image, to classify it.

N images, P patches each, N P = T tokens of a packed batch, D width, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from regard import taps
from regard.attention import pack
from regard.dropout import dropout
from regard.models.base import SequenceModel
from regard.nn import flops
from regard.nn.blocks import BlockConfig, BlockStack, EncoderBlock
from regard.packed import Batch, PackedLayout
from regard.recipes.schema import Activation, ScoreName, SizedSettings, TokenNorm
from regard.registry import MODELS

INIT_STD = 0.02  # of the position vectors


@dataclass(frozen=True)
class ImageBatch(Batch):
    """Images [N, side, side, 3], from 0 to 1, and their class ids [N]."""

    images: Tensor
    labels: Tensor

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
    }
    DEFAULT_SIZE: ClassVar[str] = "tiny"
    TASKS: ClassVar[tuple[str, ...]] = ("image-classification",)

    family: Literal["vit"] = Field("vit", description="model family")
    size: Literal["tiny", "small"] = Field("tiny", description="preset for the sizes below; each can be set separately")
    image: int = Field(24, ge=1, description="height and width of an image in pixels")
    patch: int = Field(4, ge=1, description="height and width of a patch in pixels; must divide image")
    width: int = Field(..., ge=2, description="embedding and hidden size")
    heads: int = Field(..., ge=1, description="attention heads; each has width / heads features")
    layers: int = Field(..., ge=1, description="number of layers")
    ffn_width: int = Field(..., ge=1, description="hidden size of the feed-forward layers")
    dropout: float = Field(
        ..., ge=0, lt=1, description="dropout probability, on patch embeddings and on the output of each sub-layer"
    )
    activation: Activation = Field("gelu", description="activation of the feed-forward layers")
    norm: TokenNorm = Field("layer", description="normalisation layer, before each sub-layer")
    score: ScoreName = Field("scaled-dot", description="attention score of queries and keys")

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        return self.layers, 0

    def forward_flops(self, batch: ImageBatch, target_size: int) -> int:
        images, patches = len(batch.images), (self.image // self.patch) ** 2
        embedding = 2 * images * patches * 3 * self.patch**2 * self.width
        encoder = self.layers * flops.encoder_block(BlockConfig.from_settings(self), [patches] * images)
        return embedding + encoder + 2 * images * self.width * target_size

    def summary(self) -> str:
        return "ViT"

    @model_validator(mode="after")
    def _whole_patches(self) -> ViTSettings:
        if self.image % self.patch:
            raise ValueError(f"patch {self.patch} does not divide the {self.image} pixels of an image's side")
        return self


@MODELS.register("vit")
class ViT(SequenceModel):
    """W · mean over the patches of encoder(patch vectors + position vectors)."""

    Settings = ViTSettings

    def __init__(self, settings: ViTSettings, source_size: int, target_size: int, shared: bool = False) -> None:
        super().__init__()
        self.settings = settings
        side, width = settings.patch, settings.width
        self.patches = (settings.image // side) ** 2
        self.project_patch = nn.Linear(3 * side**2, width)
        self.positions = nn.Parameter(torch.randn(self.patches, width) * INIT_STD)
        self.encoder = BlockStack.of(BlockConfig.from_settings(settings), EncoderBlock, settings.layers)
        self.classifier = nn.Linear(width, target_size)

    def encode(self, images: Tensor) -> Tensor:
        """images [N, side, side, 3] -> [N P, D]."""
        side, count = self.settings.patch, len(images)
        grid = images.unfold(1, side, side).unfold(2, side, side)  # [N, rows, columns, 3, side, side]
        tokens = taps.tap(self, "tokens", self.project_patch(grid.reshape(count * self.patches, -1) - 0.5))
        x = dropout(tokens + self.positions.repeat(count, 1), self.settings.dropout, self.training)
        layout = PackedLayout([self.patches] * count, device=images.device)
        return self.encoder(x, pack(layout, layout), is_token=layout.is_token)

    def logits(self, batch: ImageBatch) -> Tensor:
        """[N, C]."""
        pooled = self.encode(batch.images).unflatten(0, (-1, self.patches)).mean(1)
        return taps.tap(self, "logits", self.classifier(pooled))
