"""Augmentation of images: its operations are Pillow's, and an image's depends on its own random numbers alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.models.vit import ImageBatch, ViT, ViTSettings
from regard.nn.augment import BLEND, CODE, OPERATIONS, Augmentation, blur, crop_and_flip, equalize, operate
from regard.nn.image_tokens import ImageConfig, ImageTokens, sinusoids_2d

ALL = Augmentation(shift=3, flip=True, operations=2, erase=0.5, mixup=0.4, cutmix=1.0)


def pixels(count: int = 4, side: int = 16, channels: int = 3, seed: int = 0) -> Tensor:
    """Smooth random images, so that interpolation makes little difference."""
    random = torch.Generator().manual_seed(seed)
    small = torch.rand(count, channels, 4, 4, generator=random)
    large = torch.nn.functional.interpolate(small, (side, side), mode="bicubic").clamp(0, 1)
    return (255 * large).round().to(torch.uint8).movedim(1, -1)


def one(name: str, strength: float, image: Tensor) -> Any:
    """The result of one operation on one image [S, S, C] of bytes, as bytes."""
    x = image.movedim(-1, 0)[None].float() / 255
    found = operate(x, torch.tensor([CODE[name]]), torch.tensor([strength]))
    return (255 * found[0].movedim(0, -1)).round().numpy()


@pytest.mark.parametrize("strength", [-1.0, -0.4, 0.5, 1.0])
@pytest.mark.parametrize("name", ["brightness", "colour", "contrast", "sharpness"])
def test_blends_are_pillow_s(name: str, strength: float) -> None:
    enhance, pil = pytest.importorskip("PIL.ImageEnhance"), pytest.importorskip("PIL.Image")
    kind = {"brightness": "Brightness", "colour": "Color", "contrast": "Contrast", "sharpness": "Sharpness"}[name]
    image = pixels(1)[0]
    expected = np.asarray(getattr(enhance, kind)(pil.fromarray(image.numpy())).enhance(1 + BLEND * strength))
    assert abs(one(name, strength, image) - expected.astype(float)).max() <= 2.5  # Pillow rounds in between


def test_posterize_solarize_autocontrast_and_equalize_are_pillow_s() -> None:
    ops, pil = pytest.importorskip("PIL.ImageOps"), pytest.importorskip("PIL.Image")
    image = pixels(1, side=32, seed=3)[0]  # with 256 pixels or fewer, equalizing changes nothing
    given = pil.fromarray(image.numpy())
    np.testing.assert_array_equal(one("posterize", 0.75, image), np.asarray(ops.posterize(given, 8 - 3)))
    # The threshold is 1 - 0.5 of the range: 127.5.
    np.testing.assert_array_equal(one("solarize", 0.5, image), np.asarray(ops.solarize(given, 128)))
    assert abs(one("autocontrast", 0.1, image) - np.asarray(ops.autocontrast(given)).astype(float)).max() <= 1
    np.testing.assert_array_equal(one("equalize", 0.9, image), np.asarray(ops.equalize(given)))


@pytest.mark.parametrize("strength", [-1.0, 0.6])
@pytest.mark.parametrize("name", ["shear-x", "shear-y", "translate-x", "translate-y", "rotate"])
def test_warps_are_pillow_s(name: str, strength: float) -> None:
    pil = pytest.importorskip("PIL.Image")
    image = pixels(1, side=32)[0]
    c = 16.0  # of the centre; Pillow maps a pixel of the result to x = a x + b y + c of the image
    a, b, d, e = 1.0, 0.0, 0.0, 1.0
    shift = [0.0, 0.0]
    if name == "rotate":
        angle = np.pi / 6 * strength
        a, b, d, e = np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)
    elif name.startswith("shear"):
        b, d = (0.3 * strength, 0.0) if name == "shear-x" else (0.0, 0.3 * strength)
    else:
        shift["xy".index(name[-1])] = 0.45 * 32 * strength
    matrix = (a, b, c - a * c - b * c + shift[0], d, e, c - d * c - e * c + shift[1])
    given = pil.fromarray(image.numpy())
    expected = np.asarray(given.transform((32, 32), pil.Transform.AFFINE, matrix, pil.Resampling.BILINEAR))
    found, inside = one(name, strength, image), np.asarray(expected).sum(-1) > 0  # Pillow fills with black
    inside[[0, -1]] = inside[:, [0, -1]] = False
    difference = abs(found - expected.astype(float)).max(-1)
    assert inside.mean() > 0.25 and np.quantile(difference[inside], 0.9) <= 2


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_leaves_other_images_and_the_input_alone(name: str) -> None:
    x = pixels(3, side=32).movedim(-1, 1).float() / 255
    before = x.clone()
    found = operate(x, torch.tensor([CODE["identity"], CODE[name], CODE["identity"]]), torch.full((3,), 0.8))
    assert torch.equal(x, before)
    torch.testing.assert_close(found[[0, 2]], x[[0, 2]], atol=1e-5, rtol=0)
    if name != "identity":
        assert (found[1] - x[1]).abs().max() > 0.01  # a thousand times what the others may change
    assert found.min() >= 0 and found.max() <= 1


def test_a_shift_and_a_flip_move_pixels_and_bring_in_black() -> None:
    image = torch.arange(16, dtype=torch.uint8).view(1, 4, 4, 1) + 1
    # The first draws say how far down and across, -1 to 1; the last whether to flip.
    right = crop_and_flip(image, torch.tensor([[0.5, 0.0, 0.9]]), 1, True)[0, ..., 0]
    assert right.tolist() == [[0, 1, 2, 3], [0, 5, 6, 7], [0, 9, 10, 11], [0, 13, 14, 15]]
    down_flipped = crop_and_flip(image, torch.tensor([[0.0, 0.5, 0.1]]), 1, True)[0, ..., 0]
    assert down_flipped.tolist() == [[0, 0, 0, 0], [4, 3, 2, 1], [8, 7, 6, 5], [12, 11, 10, 9]]
    assert right.dtype == torch.uint8


def test_an_image_is_augmented_the_same_alone_and_in_a_batch() -> None:
    images, alone = pixels(5), Augmentation(shift=3, flip=True, operations=2, erase=0.5)
    draws = torch.from_numpy(alone.draw(5, np.random.default_rng(1)))
    together, _ = alone(images, draws)
    for n in range(5):
        torch.testing.assert_close(alone(images[n : n + 1], draws[n : n + 1])[0][0], together[n], atol=1e-5, rtol=0)
    again, _ = alone(images, torch.from_numpy(alone.draw(5, np.random.default_rng(1))))
    assert torch.equal(together, again)
    other, _ = alone(images, torch.from_numpy(alone.draw(5, np.random.default_rng(2))))
    assert not torch.equal(together, other)


def test_a_mixed_image_has_its_share_of_itself_and_of_the_one_before_it() -> None:
    """Image n is n everywhere, so that the mean of a mixed image is share * n + (1 - share) * (n - 1)."""
    images = torch.arange(6.0)[:, None, None, None].expand(6, 10, 10, 1) / 10
    for augmentation in (Augmentation(mixup=0.8), Augmentation(cutmix=1.0), Augmentation(mixup=0.8, cutmix=1.0)):
        found, share = augmentation(images, torch.from_numpy(augmentation.draw(6, np.random.default_rng(0))))
        own, other = images.mean((1, 2, 3)), images.roll(1, 0).mean((1, 2, 3))
        torch.testing.assert_close(found.mean((1, 2, 3)), share * own + (1 - share) * other)
        assert 0 <= share.min() < 0.95 and share.max() <= 1


def test_erased_rectangles_have_the_probability_and_the_area_that_they_should() -> None:
    augmentation = Augmentation(erase=0.4)
    draws = torch.from_numpy(augmentation.draw(2000, np.random.default_rng(0)))
    found, _ = augmentation(torch.ones(2000, 32, 32, 1), draws)
    erased = (found == 0.5).float().mean((1, 2, 3))
    assert (erased > 0).float().mean().item() == pytest.approx(0.4, abs=0.04)
    assert erased.max() < 0.36  # a third of the area, and rounding to pixels


def test_beta_shares_have_the_variance_of_the_distribution() -> None:
    """The variance of Beta(a, a) is 1 / (4 (2 a + 1))."""
    share = Augmentation(mixup=0.3).draw(20000, np.random.default_rng(0))[:, 1]
    assert share.var() == pytest.approx(1 / (4 * 1.6), rel=0.05) and share.mean() == pytest.approx(0.5, abs=0.01)


def test_the_loss_of_mixed_images_is_the_mean_of_the_losses_of_both_labels() -> None:
    torch.manual_seed(0)
    model = ViT(ViTSettings(image=16, width=8, heads=2, layers=1, ffn_width=8, dropout=0.0), 0, 5).eval()
    labels, draws = torch.tensor([0, 1, 4, 2]), torch.from_numpy(ALL.draw(4, np.random.default_rng(0)))
    batch = ImageBatch(pixels(), labels, draws, ALL)
    images, share = ALL(batch.images, draws)
    logits = model.logits(ImageBatch(images, labels))

    def losses(wanted: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="none", label_smoothing=0.1)

    expected = (share * losses(labels) + (1 - share) * losses(labels.roll(1))).sum()
    torch.testing.assert_close(model(batch, smoothing=0.1), expected)


def test_blur_and_equalize_of_a_constant_image_change_nothing() -> None:
    flat = torch.full((1, 3, 6, 6), 0.4)
    torch.testing.assert_close(blur(flat), flat)
    torch.testing.assert_close(equalize(flat), flat)


def test_sinusoids_of_a_grid_are_those_of_row_and_column() -> None:
    table = sinusoids_2d(3, 4, 8).view(3, 4, 8)
    for row in range(3):
        for column in range(4):
            for half, place in ((table[row, column, :4], row), (table[row, column, 4:], column)):
                angles = [place, place / 100]  # 10000^(2i / 4) for i = 0, 1
                expected = [np.sin(angles[0]), np.cos(angles[0]), np.sin(angles[1]), np.cos(angles[1])]
                np.testing.assert_allclose(half, expected, atol=1e-6)


@pytest.mark.parametrize("stem", ["patches", "convolutions"])
def test_a_class_token_comes_before_the_patches_and_a_token_sees_its_own_place(stem: str) -> None:
    torch.manual_seed(0)
    tokens = ImageTokens(ImageConfig(16, 3, 4, 8, stem=stem, pooling="class-token")).eval()
    x, layout = tokens(pixels(2))
    assert layout.lengths == (17, 17) and torch.equal(x[0], x[17]) and tokens.class_token is not None
    assert torch.equal(x[0], tokens.class_token)
    changed = pixels(2)
    changed[0, 15, 15] = 255 - changed[0, 15, 15]  # the last patch of the first image
    moved = (tokens(changed)[0] - x).abs().amax(-1) > 1e-6
    assert moved[16] and not moved[:11].any() and not moved[17:].any()
