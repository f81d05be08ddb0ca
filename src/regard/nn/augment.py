"""Augmentation of images, for a whole batch at once on its device: crops, flips, RandAugment, erasing, mixing.

All random numbers are drawn beforehand, K for each image (`Augmentation.draw`), so that an augmented batch is a
function of its images and these numbers alone, on any device. The operations are those of RandAugment (Cubuk et al.
2020), each applied to all images of a batch with a strength per image that leaves the others unchanged: no image is
copied out of the batch, and shapes are constant, as CUDA graphs require. Their definitions are Pillow's.

N images of S x S pixels with C channels (1 or 3), from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

SHEAR, TRANSLATE, ROTATE, BLEND, POSTERIZE = 0.3, 0.45, math.pi / 6, 0.9, 4.0  # at full strength, as in RandAugment
GREY = 0.5  # value of pixels from outside the image, and of erased ones
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in Pillow's grey
ERASED_AREA, ERASED_ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)  # share of the image; height over width
OPERATIONS = (
    *("identity", "shear-x", "shear-y", "translate-x", "translate-y", "rotate"),
    *("brightness", "colour", "contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
CODE = {name: code for code, name in enumerate(OPERATIONS)}
CROP_DRAWS, ERASE_DRAWS, MIX_DRAWS, OPERATION_DRAWS = 3, 5, 4, 3  # random numbers per image


@dataclass(frozen=True)
class Augmentation:
    """The random changes of training images. Zeros switch a part off."""

    shift: int = 0  # random crops of the image, with this many black pixels around it
    flip: bool = False  # left-right, of every other image
    operations: int = 0  # operations of RandAugment, one after the other
    magnitude: float = 1.0  # maximum strength of an operation; each is drawn between 0 and this
    erase: float = 0.0  # probability that a rectangle is erased (Zhong et al. 2020)
    mixup: float = 0.0  # alpha of the share of an image in a mean of two (Zhang et al. 2018)
    cutmix: float = 0.0  # alpha of its share of the area (Yun et al. 2019); with `mixup`, one of both for each image

    @property
    def varies(self) -> bool:
        """Whether there is anything to do."""
        return self != Augmentation(magnitude=self.magnitude)

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def draw(self, count: int, random: np.random.Generator) -> npt.NDArray[np.float32]:
        """The random numbers of `count` images, [N, K], from 0 to 1."""
        columns = CROP_DRAWS + ERASE_DRAWS + MIX_DRAWS + OPERATION_DRAWS * self.operations
        numbers = random.random((count, columns), np.float32)
        cut = numbers[:, 0] < 0.5 if self.mixup and self.cutmix else np.full(count, self.cutmix > 0)
        shares = [random.beta(alpha, alpha, count) if alpha else np.ones(count) for alpha in (self.mixup, self.cutmix)]
        numbers[:, 0], numbers[:, 1] = cut, np.where(cut, shares[1], shares[0])
        return numbers

    def __call__(self, images: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Images [N, S, S, C], uint8 or from 0 to 1, and draws [N, K] -> images from 0 to 1, and own shares [N].

        An image that has a share below 1 is mixed with the image before it (the first with the last).
        """
        sizes = [MIX_DRAWS, CROP_DRAWS, ERASE_DRAWS, *[OPERATION_DRAWS] * self.operations]
        mix, crop, erase, *rest = draws.split(sizes, 1)
        if self.shift or self.flip:
            images = crop_and_flip(images, crop, self.shift, self.flip)
        x = to_unit(images).movedim(-1, 1)  # [N, C, S, S]
        for operation in rest:
            code = (operation[:, 0] * len(OPERATIONS)).long().clamp(max=len(OPERATIONS) - 1)
            sign = torch.where(operation[:, 2] < 0.5, -1.0, 1.0)
            x = operate(x, code, self.magnitude * operation[:, 1] * sign)
        if self.erase:
            x = torch.where(self._erased(erase, x.shape[-1])[:, None], GREY, x)
        share = torch.ones(len(x), device=x.device)
        if self.mixes:
            x, share = mix_neighbours(x, mix[:, 0] > 0.5, mix[:, 1], mix[:, 2:])
        return x.movedim(1, -1), share

    def _erased(self, draws: Tensor, side: int) -> Tensor:
        """[N, S, S] True in a random rectangle of some images."""
        low, high = ERASED_AREA
        area = (low + (high - low) * draws[:, 1]) * side**2
        low, high = (math.log(bound) for bound in ERASED_ASPECT)
        aspect = torch.exp(low + (high - low) * draws[:, 2])
        erased = rectangle(draws[:, 3:], (area * aspect).sqrt(), (area / aspect).sqrt(), side)
        return erased & (draws[:, 0] < self.erase)[:, None, None]


def to_unit(images: Tensor) -> Tensor:
    """Pixels as numbers from 0 to 1: uint8 divided by 255, others as they are."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def crop_and_flip(images: Tensor, draws: Tensor, shift: int, flip: bool) -> Tensor:
    """Move images [N, S, S, C] by up to `shift` pixels, and mirror some, by draws [N, 3]; what is outside is black."""
    side = images.shape[1]
    place = torch.arange(side, device=images.device)
    moved = (draws[:, :2] * (2 * shift + 1)).long().clamp(max=2 * shift) - shift  # [N, 2]
    rows, columns = (place + moved[:, i, None] for i in (0, 1))  # [N, S]
    if flip:
        columns = torch.where(draws[:, 2, None] < 0.5, side - 1 - columns, columns)
    inside = _within(rows, side)[:, :, None] & _within(columns, side)[:, None]
    numbers = torch.arange(len(images), device=images.device)[:, None, None]
    pixels = images[numbers, rows.clamp(0, side - 1)[:, :, None], columns.clamp(0, side - 1)[:, None]]
    return pixels * inside[..., None]


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def operate(x: Tensor, code: Tensor, strength: Tensor) -> Tensor:
    """Apply operation `code` [N] with `strength` [N], from -1 to 1, to each image of x [N, C, S, S]."""

    def of(name: str) -> Tensor:
        return code == CODE[name]

    x = _warp(x, of, strength)
    x = _blend(x, of, strength)
    size = strength.abs()
    step = torch.where(of("posterize"), (POSTERIZE * size).round(), 0.0).exp2()[:, None, None, None]
    posterized = (x * 255).round().div(step).floor() * step / 255
    x = torch.where(_images(of("posterize")), posterized, x)
    x = torch.where(_images(of("solarize")) & (x >= 1 - _images(size)), 1 - x, x)
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    stretched = torch.where(high > low, (x - low) / (high - low).clamp(min=1 / 255), x)
    x = torch.where(_images(of("autocontrast")), stretched, x)
    return torch.where(_images(of("equalize")), equalize(x), x)


def _images(values: Tensor) -> Tensor:
    """[N] -> [N, 1, 1, 1]."""
    return values[:, None, None, None]


def _warp(x: Tensor, of: Callable[[str], Tensor], strength: Tensor) -> Tensor:
    """Shear, translate or rotate, with bilinear interpolation; grey comes in from outside."""

    def amount(name: str, most: float) -> Tensor:
        return torch.where(of(name), most * strength, 0.0)

    angle = amount("rotate", ROTATE)
    cos, sin = angle.cos(), angle.sin()
    # Positions run from -1 to 1, so that a translation by a share of the width is twice that share.
    across = torch.stack([cos, amount("shear-x", SHEAR) - sin, amount("translate-x", 2 * TRANSLATE)], -1)
    down = torch.stack([amount("shear-y", SHEAR) + sin, cos, amount("translate-y", 2 * TRANSLATE)], -1)
    grid = F.affine_grid(torch.stack([across, down], 1), list(x.shape), align_corners=False)
    return F.grid_sample(x - GREY, grid, align_corners=False) + GREY


def _blend(x: Tensor, of: Callable[[str], Tensor], strength: Tensor) -> Tensor:
    """Brightness, colour, contrast and sharpness: a mean of the image and a degenerate one, black, grey or blurred."""
    grey = x if x.shape[1] == 1 else sum(weight * x[:, c, None] for c, weight in enumerate(LUMA))
    assert isinstance(grey, Tensor)
    mean = grey.mean((2, 3), keepdim=True)
    names = {"brightness": x.new_zeros(1), "colour": grey, "contrast": mean, "sharpness": blur(x)}
    degenerate, factor = x, torch.ones_like(strength)
    for name, image in names.items():
        degenerate = torch.where(_images(of(name)), image, degenerate)
        factor = torch.where(of(name), 1 + BLEND * strength, factor)
    return (degenerate + _images(factor) * (x - degenerate)).clamp(0, 1)


def blur(x: Tensor) -> Tensor:
    """Pillow's SMOOTH: the mean of a pixel, weighted 5, and its 8 neighbours; the border stays."""
    inner = (F.avg_pool2d(x, 3, 1) * 9 + 4 * x[:, :, 1:-1, 1:-1]) / 13
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = inner
    return smooth


def equalize(x: Tensor) -> Tensor:
    """Spread the values of each channel evenly from 0 to 1, by their cumulative histogram in 256 steps."""
    values = (x * 255).round().long().flatten(2)  # [N, C, P]
    counts = torch.zeros(*values.shape[:2], 256, device=x.device).scatter_add_(2, values, torch.ones_like(x).flatten(2))
    last = counts.gather(2, values.amax(2, keepdim=True))  # count of the brightest value
    step = ((values.shape[2] - last) / 255).floor()
    before = counts.cumsum(2) - counts
    table = ((before + (step / 2).floor()) / step.clamp(min=1)).floor().clamp(max=255)
    equal = table.gather(2, values).view_as(x) / 255
    return torch.where(step[..., None] > 0, equal, x)


def rectangle(centre: Tensor, height: Tensor, width: Tensor, side: int) -> Tensor:
    """[N, S, S] True within rectangles of this size [N] around centres [N, 2] (row, column from 0 to 1), cut off."""
    place = torch.arange(side, device=centre.device) + 0.5
    rows, columns = (
        ((place - centre[:, i, None] * side).abs() <= size[:, None] / 2) for i, size in enumerate((height, width))
    )
    return rows[:, :, None] & columns[:, None]


def mix_neighbours(x: Tensor, cut: Tensor, share: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Mix each image of x [N, C, S, S] with the one before it; return the shares that are its own, [N].

    A mean weighted by `share` [N]; or, where `cut` [N] is True, a rectangle around `centre` [N, 2] from the other.
    """
    other, side = x.roll(1, 0), x.shape[-1]
    size = (1 - share).sqrt() * side
    pasted = rectangle(centre, size, size, side) & cut[:, None, None]
    share = torch.where(cut, 1 - pasted.float().mean((1, 2)), share)
    weight = torch.where(_images(cut), (~pasted[:, None]).float(), _images(share))
    return other + weight * (x - other), share
