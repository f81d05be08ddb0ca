"""An encoder of image patches with the Transformer's decoder, to describe images.

Shapes: S patches of a packed batch, F numbers of a patch, D width.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from regard import taps
from regard.dropout import dropout
from regard.models.transformer import EncoderDecoder
from regard.models.transformer_settings import TransformerSettings
from regard.nn.image_tokens import DEVIATION, INIT_STD, MEAN, StridedStem, sinusoids_2d
from regard.packed import PackedFeatures, PackedLayout
from regard.registry import MODELS

CHANNELS = 3


class CaptionerSettings(TransformerSettings):
    """An encoder of the patches of an image, and a decoder that writes a text."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": dict(width=96, heads=4, encoder_layers=2, decoder_layers=2, ffn_width=192, dropout=0.0),
        "small": dict(width=192, heads=6, encoder_layers=6, decoder_layers=3, ffn_width=768, dropout=0.1),
    }
    DEFAULT_SIZE: ClassVar[str] = "tiny"
    TASKS: ClassVar[tuple[str, ...]] = ("captioning",)

    family: Literal["captioner"] = Field("captioner", description="model family")  # type: ignore[assignment]
    size: Literal["tiny", "small"] = Field("tiny", description="preset for the sizes below; each can be set separately")
    image: int = Field(48, ge=1, description="height and width of an image in pixels; other images are resized")
    patch: int = Field(8, ge=1, description="height and width of a patch in pixels; must divide image")
    stem: Literal["convolutions", "patches"] = Field(
        "convolutions",
        description="from patches to vectors: convolutions with stride 2, which learn faster; or a linear layer",
    )
    patch_positions: Literal["learned", "sinusoidal"] = Field(
        "sinusoidal", description="position vectors of patches: learned, or sinusoids of row and column"
    )
    max_positions: int = Field(256, ge=2, description="maximum tokens of a text")

    @property
    def grid(self) -> int:
        """Patches in a row of an image."""
        return self.image // self.patch

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.patch**2

    def forward_flops(self, batch: Any, target_size: int) -> int:
        patches = sum(batch.source.layout.lengths)
        linear = 2 * patches * self.patch_features * self.width
        images = patches // self.grid**2
        strided = images * StridedStem.flops(CHANNELS, self.patch, self.width, self.image)
        return super().forward_flops(batch, target_size) + (strided if self.stem == "convolutions" else linear)

    @property
    def guided_head(self) -> None:
        return None

    def summary(self) -> str:
        return "captioner"

    @model_validator(mode="after")
    def _whole_patches(self) -> CaptionerSettings:
        if self.image % self.patch:
            raise ValueError(f"patch {self.patch} does not divide the {self.image} pixels of an image's side")
        if self.stem == "convolutions" and (self.patch < 2 or self.patch & (self.patch - 1)):
            raise ValueError(f'stem = "convolutions" halves images: patch must be 2, 4, 8, ..., not {self.patch}')
        return self


class PatchEmbedding(nn.Module):
    """dropout(stem(patches) + position vectors); an image has `grid`² patches, in reading order."""

    positions: Tensor

    def __init__(self, settings: CaptionerSettings) -> None:
        super().__init__()
        self.settings = settings
        strided = settings.stem == "convolutions"
        self.stem = StridedStem(CHANNELS, settings.patch, settings.width) if strided else None
        self.project = None if strided else nn.Linear(settings.patch_features, settings.width)
        grid, width = settings.grid, settings.width
        if settings.patch_positions == "learned":
            self.positions = nn.Parameter(torch.randn(grid**2, width) * INIT_STD)
        else:
            self.register_buffer("positions", sinusoids_2d(grid, grid, width), persistent=False)

    def forward(self, patches: Tensor, layout: PackedLayout) -> Tensor:
        """Pixels [S, F], from 0 to 1 -> [S, D]."""
        pixels = (patches - MEAN) / DEVIATION
        vectors = self._convolve(pixels, layout.max_len) if self.project is None else self.project(pixels)
        tokens = taps.tap(self, "tokens", vectors)
        positions = taps.tap(self, "positions", self.positions[layout.position])
        return taps.tap(self, "stream", dropout(tokens + positions, self.settings.dropout, self.training))

    def _convolve(self, pixels: Tensor, stride: int) -> Tensor:
        """[S, F] -> [S, D], where an image begins every `stride` rows, which may be more than its patches."""
        assert self.stem is not None
        grid, side = self.settings.grid, self.settings.patch
        count = len(pixels) // stride
        rows = pixels[: count * stride].unflatten(0, (count, stride))[:, : grid**2]
        squares = rows.unflatten(2, (side, side, CHANNELS)).unflatten(1, (grid, grid))  # [N, g, g, p, p, C]
        images = squares.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # [N, g p, g p, C]
        vectors = F.pad(self.stem(images).flatten(1, 2), (0, 0, 0, stride - grid**2)).flatten(0, 1)
        return F.pad(vectors, (0, 0, 0, len(pixels) - len(vectors)))


@MODELS.register("captioner")
class Captioner(EncoderDecoder):
    """An encoder-decoder whose source is an image."""

    Settings = CaptionerSettings

    def __init__(self, settings: CaptionerSettings, source_size: int, target_size: int, shared: bool = True) -> None:
        super().__init__(settings, PatchEmbedding(settings), target_size)

    def embed_source(self, source: PackedFeatures) -> tuple[Tensor, PackedLayout]:
        return self.source_embedding(source.values, source.layout), source.layout
