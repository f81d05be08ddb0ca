"""RISE on images: the masks, the estimate, its bounded memory, and how it compares with other saliency maps."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.data.shapes import Clutter, Shapes
from regard.errors import UserError
from regard.interpret.explain import Sampling, curves, explain_image
from regard.interpret.explain.image_masks import GridMasks, blurred, image_box
from regard.interpret.explain.image_runs import attention_rollout, gradient_saliency
from regard.interpret.explain.models import explain_request
from regard.interpret.explain.request import MaskingMode
from regard.models.vit import ImageBatch
from regard.recipes import load
from regard.run_dir import RunDir
from regard.runs import LoadedRun
from regard.training.setup import train

SMALL = ["model.width=16", "model.heads=2", "model.layers=2", "model.ffn_width=16", "data.count=48"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    steps = ["training.steps=4", "training.validate_every=4", "training.save_every=4", "model.pooling=class-token"]
    return train(load("shapes", [*SMALL, *steps]), tmp_path_factory.mktemp("shapes") / "run", device="cpu", quiet=True)


@pytest.mark.parametrize("antithetic", [True, False])
def test_masks_have_the_mean_and_the_variance_of_interpolated_cells(antithetic: bool) -> None:
    source, sampling = GridMasks(12, 20, cells=5), Sampling(keep=0.3, antithetic=antithetic)
    masks = source.draw(range(6000), sampling)
    assert masks.shape == (6000, 240) and masks.min() >= 0 and masks.max() <= 1
    np.testing.assert_allclose(masks.mean(0), 0.3, atol=0.03)
    # A cell has 4 pixels: between two cells, the squared weights of both are (1 - k / 4)^2 + (k / 4)^2 on either axis.
    along = np.mean([1.0, 0.75**2 + 0.25**2, 0.5, 0.25**2 + 0.75**2])
    assert source.variance(0.3) == pytest.approx(0.3 * 0.7 * along**2)
    np.testing.assert_allclose(masks.var(0), source.variance(0.3), rtol=0.12)


def test_a_mask_is_a_function_of_seed_and_number_and_pairs_are_complements() -> None:
    source, sampling = GridMasks(10, 10, cells=3), Sampling(seed=4)
    together = source.draw(range(8), sampling)
    np.testing.assert_array_equal(together, np.concatenate([source.draw([n], sampling) for n in range(8)]))
    np.testing.assert_allclose(together[0::2] + together[1::2], 1, atol=1e-6)
    assert abs(together - source.draw(range(8), Sampling(seed=5))).max() > 0.5


def test_masks_are_smooth_and_shifted() -> None:
    """Neighbouring pixels differ by at most one part in a cell; over all masks, every pixel is at the edge of one."""
    masks = GridMasks(16, 16, cells=4).draw(range(200), Sampling()).reshape(-1, 16, 16)
    steps = abs(np.diff(masks, axis=2))
    assert steps.max() <= 1 / 4 + 1e-6
    assert (abs(np.diff(masks, 2, axis=2)).max((0, 1)) > 0.2).all()


def test_the_importance_for_a_linear_function_is_the_covariance_of_its_masks() -> None:
    """f = mean of a region: importance_i = sum_j a_j Cov(m_i, m_j) / Var(m_i), which a formula for the cells gives."""
    side, cells, region = 8, 2, (slice(0, 2), slice(0, 2))

    def brightness(images: list[Any]) -> list[float]:
        return [float(image[region].mean()) for image in images]

    found = explain_image(brightness, np.ones((side, side, 1)), fill="black", cells=cells, masks=8000)
    cell = side // cells

    def along(distance: int) -> float:
        """Cov along one axis, relative to p (1 - p), averaged over the shifts of a cell."""

        def weights(place: float) -> dict[int, float]:
            low = int(place)
            return {low: 1 - (place - low), low + 1: place - low}

        total = 0.0
        for shift in range(cell):
            one, other = weights(shift / cell), weights((shift + distance) / cell)
            total += sum(one[k] * other.get(k, 0.0) for k in one)
        return total / cell

    expected = np.array(
        [
            [
                np.mean([along(abs(i - y)) * along(abs(j - x)) for y in range(2) for x in range(2)]) / along(0) ** 2
                for j in range(side)
            ]
            for i in range(side)
        ]
    )
    errors = found.overall_error.reshape(side, side)
    assert found.map().shape == (side, side) and errors.max() < 0.02
    assert (abs(found.map() - expected) < 5 * errors + 1e-3).all()
    assert found.whole == pytest.approx(1) and found.nothing == pytest.approx(0)


def test_several_outputs_have_a_map_each() -> None:
    def halves(images: list[Any]) -> Any:
        return np.array([[x[:, :4].mean(), x[:, 4:].mean()] for x in images])

    found = explain_image(halves, np.ones((8, 8, 3)), outputs=("left", "right"), masks=600, cells=4)
    left, right = found.map("left"), found.map("right")
    assert left[:, :3].min() > abs(left[:, 6:]).max() and right[:, 5:].min() > abs(right[:, :2]).max()
    np.testing.assert_allclose(found.map(), left + right)
    assert len(json.dumps(found.to_json())) > 0


def test_memory_does_not_grow_with_the_number_of_masks() -> None:
    image = np.zeros((64, 64, 3), np.float32)

    def peak(masks: int) -> int:
        tracemalloc.start()
        explain_image(lambda images: [0.0] * len(images), image, masks=masks, batch=16)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    few, many = peak(128), peak(1024)
    assert many < 1.2 * few  # all masks would be 8 times as much: 1,024 x 64 x 64 x 4 bytes = 17 MB


def test_a_blurred_image_keeps_its_mean_and_loses_its_detail() -> None:
    image = np.random.default_rng(0).random((32, 32, 3), np.float32)
    smooth = blurred(image, 3.0)
    assert smooth.mean() == pytest.approx(image.mean(), abs=0.02) and smooth.std() < 0.2 * image.std()
    np.testing.assert_allclose(blurred(np.full((9, 5, 1), 0.3, np.float32), 2.0), 0.3, rtol=1e-5)


def test_curves_of_an_image_begin_and_end_at_the_whole_and_at_nothing() -> None:
    """The score is the share of a corner that is shown: by its own order, it is gone after a sixteenth of the image."""
    corner = np.zeros((16, 16), bool)
    corner[:4, :4] = True

    def seen(images: list[Any]) -> list[float]:
        return [float(image[corner].mean()) for image in images]

    box = image_box(seen, np.ones((16, 16, 1)), fill="black")
    good, bad, random = curves(box, {"good": corner.ravel(), "bad": ~corner.ravel()}, steps=32, shuffles=4)
    assert len(good.deletion) == 33 and good.deletion[0] == 1 and good.deletion[-1] == 0
    assert good.insertion[0] == 0 and good.insertion[-1] == 1
    assert good.deletion[2] == 0 and good.insertion[2] == 1  # 16 of 256 pixels
    assert good.deletion_area < 0.04 < 0.3 < random.deletion_area < 0.7 < bad.deletion_area


def test_insertion_may_start_from_another_image() -> None:
    image = np.ones((4, 4, 1), np.float32)
    black, grey = (
        image_box(lambda images: [x.mean() for x in images], image, fill=f, cells=2) for f in ("black", "grey")
    )
    (curve,) = curves(black, {"any": np.arange(16)}, insertion=grey, shuffles=0)
    assert curve.deletion[-1] == 0 and curve.insertion[0] == 0.5


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"cells": 0}, "cells = 0"), ({"cells": 25}, "cells = 25"), ({"fill": "pink"}, "choose from grey, black, blur")],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        explain_image(lambda images: [0.0] * len(images), np.zeros((24, 24, 3)), **settings)
    with pytest.raises(UserError, match=r"\[height, width, channels\]"):
        explain_image(lambda images: [0.0] * len(images), np.zeros((24, 24)))


def test_the_rollout_of_two_layers_is_a_product_of_their_weights(run: RunDir) -> None:
    from regard.interpret.recorder import Recorder

    loaded = LoadedRun.load(run.path, device="cpu")
    image = next(iter(Shapes.images("test", 1)))[0] / np.float32(255)
    with torch.inference_mode(), Recorder(loaded.module) as seen:
        loaded.module.logits(ImageBatch(torch.from_numpy(image)[None], torch.zeros(1, dtype=torch.long)))
        first, second = (a.sentence(0).mean(0).double().numpy() for a in seen.attention.values())
    same = np.eye(len(first))
    expected = (((second + same) / 2) @ ((first + same) / 2))[0, 1:]  # from the class token to the patches
    found = attention_rollout(loaded, image)
    assert found is not None
    np.testing.assert_allclose(found.reshape(24, 24)[::6, ::6].ravel(), expected, rtol=1e-5)


def test_the_gradient_is_that_of_finite_differences(run: RunDir) -> None:
    loaded = LoadedRun.load(run.path, device="cpu")
    loaded.module.double()
    image = next(iter(Shapes.images("test", 1)))[0] / 255
    with torch.no_grad():

        def probability(pixels: Any) -> float:
            batch = ImageBatch(torch.from_numpy(pixels)[None], torch.zeros(1, dtype=torch.long))
            return float(loaded.module.logits(batch).softmax(-1)[0, 2])

        slopes = []
        for channel in range(3):
            moved = [image.copy(), image.copy()]
            moved[0][5, 7, channel] += 1e-3
            moved[1][5, 7, channel] -= 1e-3
            slopes.append((probability(moved[0]) - probability(moved[1])) / 2e-3)
    found = gradient_saliency(loaded, image, 2).reshape(24, 24)
    assert found[5, 7] == pytest.approx(float(np.linalg.norm(slopes)), rel=1e-3)


def test_a_run_is_explained_from_python_and_the_command_line(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    pixels = next(iter(Shapes.images("test", 1)))[0]
    pillow.fromarray(pixels).save(tmp_path / "shape.png")
    model = regard.load(run.path, device="cpu")
    found = model.explain(tmp_path / "shape.png", masks=64, cells=4)
    same = model.explain(pixels, masks=64, cells=4)
    np.testing.assert_array_equal(found.importance, same.importance)
    top = model.predict(pixels)
    assert found.outputs[0] == top.label and found.whole == pytest.approx(top.probability, abs=1e-5)
    chosen = model.explain(pixels, target="red circle", masks=8)
    assert chosen.whole == pytest.approx(top.probabilities["red circle"], abs=1e-5)
    for out in ("why.svg", "why.png"):
        words = ["explain", run.path, tmp_path / "shape.png", "--masks", 32, "--curves", "--out", tmp_path / out]
        call(capsys, *words, "--device", "cpu")
    assert pillow.open(tmp_path / "why.png").size[0] > 500
    assert "probability" in (tmp_path / "why.svg").read_text()
    words = ["explain", run.path, tmp_path / "shape.png", "--masks", 32, "--device", "cpu"]
    assert "by each pixel" in call(capsys, *words)
    assert json.loads(call(capsys, *words, "--json", "--curves"))["curves"][2]["order"] == "gradient"
    assert "is not a class of this model" in call(capsys, *words, "--target", "pink circle", status=2)


def call(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> str:
    from regard.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    assert (left.value.code or 0) == status, printed.err
    return printed.out if status == 0 else printed.err


def test_cluttered_images_have_one_coloured_shape_where_the_region_says() -> None:
    for image, label, region in Clutter.examples("test", 24):
        colour = image.astype(float).max(-1) - image.astype(float).min(-1)
        assert colour[region].mean() > 2 * colour[~region].mean(), label
        assert 20 < region.sum() < 260 and image.shape == (48, 48, 3)


@pytest.mark.slow
def test_rise_points_at_the_shape_that_was_classified(tmp_path: Path) -> None:
    """The pointing game on images with distractors: chance is the share of pixels, about 5 %."""
    loaded = LoadedRun.load(train(load("clutter"), tmp_path / "run", device="cpu", quiet=True).path, device="cpu")
    hits, chance = [], []
    for image, label, region in Clutter.examples("test", 24):
        request = explain_request(loaded, image, target=label, masking=MaskingMode())
        found = request.explain(masks=1500)
        hits.append(region.ravel()[found.overall.argmax()])
        chance.append(region.mean())
    assert np.mean(hits) >= 0.8 and np.mean(chance) < 0.1
