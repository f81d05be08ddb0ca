"""Conversion of images to the tokens that an encoder reads: patches or convolutions, positions, a class token.

N images of S x S pixels with C channels, P tokens each, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.dropout import dropout
from regard.nn.augment import to_unit
from regard.nn.positions import Sinusoidal
from regard.packed import PackedLayout

INIT_STD = 0.02  # for learned position vectors and the class token
MEAN, DEVIATION = 0.5, 0.25  # pixels are standardised by these by default: they are typical of photographs


class PatchStem(nn.Module):
    """W x for each patch x of `patch` x `patch` pixels, channels first."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(channels * patch**2, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, S, S, C] -> [N, S / patch, S / patch, D]."""
        grid = x.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)  # [N, rows, columns, C, p, p]
        return self.project(grid.flatten(3))

    @staticmethod
    def flops(channels: int, patch: int, width: int, side: int) -> int:
        """FLOPs for an image."""
        return 2 * channels * side**2 * width


class ConvStem(nn.Module):
    """Convolutions of 3 x 3 pixels, each but the first followed by max pooling, which halves the image.

    As in the Compact Convolutional Transformer (Hassani et al. 2021), with one more convolution before the first
    pooling. `patch`, the number of pixels that become one token, is a power of 2. Channels double up to the width.
    """

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        sizes = [channels, *self.sizes(patch, width)]
        self.convolutions = nn.ModuleList(nn.Conv2d(given, made, 3, padding=1) for given, made in pairwise(sizes))
        _init_convolutions(self.convolutions)

    @staticmethod
    def sizes(patch: int, width: int) -> list[int]:
        """The channels after each convolution.

        >>> ConvStem.sizes(4, 384)
        [96, 192, 384]
        """
        halvings = patch.bit_length() - 1
        return [max(width >> (halvings - layer), 1) for layer in range(halvings + 1)]

    def forward(self, x: Tensor) -> Tensor:
        """x [N, S, S, C] -> [N, S / patch, S / patch, D]."""
        x = x.movedim(-1, 1)
        for layer, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(x))
            x = F.max_pool2d(x, 3, 2, padding=1) if layer else x
        return x.movedim(1, -1)

    @staticmethod
    def flops(channels: int, patch: int, width: int, side: int) -> int:
        """FLOPs for an image."""
        sizes, total = [channels, *ConvStem.sizes(patch, width)], 0
        for layer, (given, made) in enumerate(pairwise(sizes)):
            total += 2 * 9 * given * made * (side >> max(layer - 1, 0)) ** 2
        return total


def _init_convolutions(convolutions: nn.ModuleList) -> None:
    """Initialise convolutions such that features stay as large as pixels, beside which positions are not too large."""
    for module in convolutions:
        assert isinstance(module, nn.Conv2d) and module.bias is not None
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)


class StridedStem(nn.Module):
    """Convolutions of 3 x 3 pixels with stride 2, each of which halves the image: less work than `ConvStem`.

    `patch`, the number of pixels that become one token, is a power of 2 above 1. Channels double up to the width. A
    last convolution, with a residual connection, adds what the neighbours of a patch show: shapes lie across patches.
    """

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        sizes = [channels, *self.sizes(patch, width)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(given, made, 3, stride=2, padding=1) for given, made in pairwise(sizes)
        )
        _init_convolutions(self.convolutions)
        self.neighbours = nn.Conv2d(width, width, 3, padding=1)

    @staticmethod
    def sizes(patch: int, width: int) -> list[int]:
        """The channels after each strided convolution.

        >>> StridedStem.sizes(8, 96)
        [24, 48, 96]
        """
        halvings = patch.bit_length() - 1
        return [max(width >> (halvings - layer), 1) for layer in range(1, halvings + 1)]

    def forward(self, x: Tensor) -> Tensor:
        """x [N, S, S, C] -> [N, S / patch, S / patch, D]."""
        x = x.movedim(-1, 1)
        for layer, convolution in enumerate(self.convolutions):
            x = convolution(F.relu(x) if layer else x)
        return (x + self.neighbours(F.relu(x))).movedim(1, -1)

    @staticmethod
    def flops(channels: int, patch: int, width: int, side: int) -> int:
        """FLOPs for an image."""
        sizes = [channels, *StridedStem.sizes(patch, width)]
        strided = sum(2 * 9 * a * b * (side >> (layer + 1)) ** 2 for layer, (a, b) in enumerate(pairwise(sizes)))
        return strided + 2 * 9 * width**2 * (side // patch) ** 2


STEMS: dict[str, type[PatchStem] | type[ConvStem]] = {"patches": PatchStem, "convolutions": ConvStem}


def sinusoids_2d(rows: int, columns: int, width: int) -> Tensor:
    """[rows * columns, width]: sinusoids of the row in the first half of the features, of the column in the second."""
    half = (width + 1) // 2
    down = _sinusoids(rows, half)[:, None].expand(rows, columns, half)
    across = _sinusoids(columns, width - half)[None].expand(rows, columns, width - half)
    return torch.cat([down, across], -1).flatten(0, 1)


def _sinusoids(count: int, width: int) -> Tensor:
    position = torch.arange(count)
    waves: Tensor = Sinusoidal(width)(position, position)
    return waves


@dataclass(frozen=True)
class ImageConfig:
    """The hyperparameters of `ImageTokens`: side and channels of an image, side of a patch, and what is added."""

    image: int
    channels: int
    patch: int
    width: int
    stem: str = "patches"
    positions: str = "learned"
    pooling: str = "mean"
    class_position: bool = False  # whether the class token has a learned position vector, before those of the patches
    pixel_mean: Sequence[float] = (MEAN,)  # one number for all channels, or one for each
    pixel_std: Sequence[float] = (DEVIATION,)
    dropout: float = 0.0

    @classmethod
    def from_settings(cls, settings: object) -> ImageConfig:
        """Take the fields that a family's settings have; the others keep their defaults."""
        return cls(**{f.name: getattr(settings, f.name) for f in fields(cls) if hasattr(settings, f.name)})

    @property
    def tokens(self) -> int:
        """Tokens of an image: its patches and, if it is what the model reads its answer from, a class token."""
        return (self.image // self.patch) ** 2 + (self.pooling == "class-token")

    @property
    def flops(self) -> int:
        """FLOPs of the stem for an image."""
        return STEMS[self.stem].flops(self.channels, self.patch, self.width, self.image)


class ImageTokens(nn.Module):
    """The tokens of images: a stem, position vectors and, before the patches, a class token if there is one."""

    positions: Tensor
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.register_buffer("pixel_mean", torch.tensor(config.pixel_mean), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(config.pixel_std), persistent=False)
        self.config, grid, width = config, config.image // config.patch, config.width
        self.stem: PatchStem | ConvStem = STEMS[config.stem](config.channels, config.patch, width)
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.randn(grid**2 + config.class_position, width) * INIT_STD)
        else:
            self.register_buffer("positions", sinusoids_2d(grid, grid, width), persistent=False)
        has_class_token = config.pooling == "class-token"
        self.class_token = nn.Parameter(torch.randn(width) * INIT_STD) if has_class_token else None

    def forward(self, images: Tensor) -> tuple[Tensor, PackedLayout]:
        """images [N, S, S, C], uint8 or from 0 to 1 -> [N P, D] and their layout."""
        x = self.stem((to_unit(images) - self.pixel_mean) / self.pixel_std).flatten(1, 2)  # [N, P, D]
        x = taps.tap(self, "tokens", x.flatten(0, 1)).unflatten(0, (len(images), -1))
        x = x + self.positions[int(self.config.class_position) :]
        if self.class_token is not None:
            first = self.class_token + self.positions[0] if self.config.class_position else self.class_token
            x = torch.cat([first.to(x.dtype).expand(len(x), 1, -1), x], 1)
        layout = PackedLayout([self.config.tokens] * len(images), device=images.device)
        return dropout(x.flatten(0, 1), self.config.dropout, self.training), layout
