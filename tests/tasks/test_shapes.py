"""An image classifier from built-in images: drawing, training, evaluation, prediction from files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard import tasks
from regard.attention import Additive, MultiHeadAttention
from regard.data.image_files import ImageShape
from regard.data.shapes import CLASSES, COLOURS, SIZE, Shapes, generator
from regard.data.stream import StreamPosition
from regard.errors import UserError
from regard.models.vit import ImageBatch, ViT
from regard.recipes import load
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.runs import LoadedRun
from regard.training.setup import train

CPU = torch.device("cpu")
SHAPE = ImageShape(SIZE, 3)
QUICK = ["training.steps=6", "training.validate_every=3", "training.save_every=3", "data.count=96", "training.seed=3"]
SMALL = ["model.width=16", "model.heads=2", "model.layers=1", "model.ffn_width=16", "model.dropout=0.1"]


def quick(*changes: str) -> Recipe:
    return load("shapes", [*QUICK, *SMALL, *changes])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(quick(), tmp_path_factory.mktemp("shapes") / "run", device="cpu", quiet=True)


def model(seed: int = 0) -> ViT:
    torch.manual_seed(seed)
    return ViT(quick().model, 0, len(CLASSES)).eval()  # type: ignore[arg-type]


def batch(numbers: list[int]) -> ImageBatch:
    examples = list(Shapes.images("test", 12))
    images = torch.from_numpy(np.stack([examples[i][0] for i in numbers]))
    return ImageBatch(images, torch.tensor([CLASSES.index(examples[i][1]) for i in numbers]))


def test_images_are_the_same_every_time_and_differ_between_splits() -> None:
    one, again, other = (list(Shapes.images(split, 24)) for split in ("train", "train", "valid"))
    assert all(np.array_equal(a, b) and x == y for (a, x), (b, y) in zip(one, again, strict=True))
    assert not any(np.array_equal(a, b) for a, _ in one for b, _ in other)
    assert {label for _, label in one} == set(CLASSES)
    with pytest.raises(UserError, match="no split 'dev'"):
        next(Shapes.images("dev"))


@pytest.mark.parametrize("label", CLASSES)
def test_an_image_has_the_colour_of_its_class_in_the_middle(label: str) -> None:
    middle = np.mean([Shapes.draw(label, generator(9, n))[0][SIZE // 2, SIZE // 2] for n in range(40)], 0)
    assert middle.argmax() == list(COLOURS).index(label.split()[0])


def test_the_areas_of_the_shapes_are_those_of_geometry() -> None:
    """Of the square [-1, 1]^2: circle pi / 4, square 0.85^2, triangle half of base x height / 4, cross by inclusion."""
    expected = {"circle": math.pi / 4, "square": 0.85**2, "triangle": 1.9 * 1.9 / 2 / 4, "cross": 0.6 - 0.09}
    for shape, share in expected.items():
        found = []
        for n in range(30):
            random = generator(4, n)
            radius = generator(4, n).uniform(6, 9)
            image = Shapes.draw(f"red {shape}", random)[0] / 255
            inside = (image[..., 0] - image[..., 2]) > 0.25  # red, not grey
            found.append(inside.sum() / (2 * radius) ** 2)
        assert np.mean(found) == pytest.approx(share, rel=0.1), shape


def test_patches_are_the_pixels_in_reading_order() -> None:
    vit, images = model(), batch([3, 7]).images
    side, seen = vit.settings.patch, []
    vit.tokens.stem.project.register_forward_pre_hook(lambda module, given: seen.append(given[0].flatten(0, 2)))
    vit.encode(images)
    across = SIZE // side
    for number in (0, 1, across, across**2 + 2 * across + 3):
        image, place = divmod(number, across**2)
        row, column = (side * i for i in divmod(place, across))
        patch = images[image, row : row + side, column : column + side] / 255  # [side, side, 3]
        assert torch.equal(seen[0][number], ((patch - 0.5) / 0.25).permute(2, 0, 1).flatten())


def test_the_score_is_that_of_every_attention() -> None:
    vit = ViT(quick("model.score=additive").model, 0, len(CLASSES))  # type: ignore[arg-type]
    scores = [module.score for module in vit.modules() if isinstance(module, MultiHeadAttention)]
    assert scores and all(isinstance(score, Additive) for score in scores)
    assert vit.logits(batch([0, 1])).isfinite().all()


def test_the_loss_is_the_cross_entropy_of_the_class() -> None:
    vit, given = model(), batch([0, 1, 2])
    expected = torch.nn.functional.cross_entropy(vit.logits(given), given.labels, reduction="sum", label_smoothing=0.1)
    assert vit(given, smoothing=0.1).item() == pytest.approx(expected.item(), rel=1e-5)


def test_every_epoch_visits_every_image_once_in_another_order(run: RunDir) -> None:
    task = tasks.of(run.recipe)
    stream = task.stream(run, task.dataset(run), static=False)
    orders = []
    for epoch in range(2):
        batches = stream.batches(StreamPosition(epoch))
        (first, after), *_ = (next(batches),)
        orders.append(first.images)
        assert first.num_targets == 64 and after == StreamPosition(epoch, 1)
    assert not torch.equal(*orders)


def test_a_run_keeps_its_classes_and_its_validations(run: RunDir) -> None:
    assert list(run.classes) == sorted(CLASSES) and not list(run.path.glob("*tokenizer.json"))
    metrics = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    looks = [entry for entry in metrics if entry["kind"] == "valid"]
    assert [look["step"] for look in looks] == [3, 6] and all(0 <= look["exact"] <= 100 for look in looks)
    with pytest.raises(UserError, match="has no tokenizers"):
        _ = run.tokenizers


def test_accuracy_is_that_of_the_predictions(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    examples = list(Shapes.images("test"))
    found = regard.load(run.path, device="cpu").predict([image for image, _ in examples])
    right = sum(prediction.label == label for prediction, (_, label) in zip(found, examples, strict=True))
    entry = json.loads(call(capsys, "evaluate", run.path, "--json", "--device", "cpu"))
    assert entry["examples"] == 600 and entry["accuracy"] == pytest.approx(100 * right / 600)
    assert sum(map(sum, entry["confusion"])) == 600 and entry["classes"] == sorted(CLASSES)
    for prediction in found[:20]:
        assert sum(prediction.probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert list(prediction.probabilities.values()) == sorted(prediction.probabilities.values(), reverse=True)


def call(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> str:
    from regard.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    assert (left.value.code or 0) == status, printed.err
    return printed.out if status == 0 else printed.err


def test_files_of_images_are_classified_line_by_line(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [image for image, _ in Shapes.images("test", 3)]
    files = [tmp_path / f"{n}.npy" for n in range(3)]
    np.save(files[0], images[0])
    np.save(files[1], images[1].astype(np.int64))
    np.save(files[2], images[2] / 255.0)
    found = LoadedRun.load(run.path, device="cpu").predictions(images)
    out = call(capsys, "predict", run.path, *files, "--device", "cpu")
    assert out.splitlines() == [prediction.label for prediction in found]
    out = call(capsys, "predict", run.path, files[0], "--top", 2, "--format", "jsonl", "--device", "cpu")
    entry = json.loads(out)
    out = call(capsys, "predict", run.path, "test 3", "test 1", "--device", "cpu")
    assert out.splitlines() == [found[2].label, found[0].label]
    assert entry["class"] == found[0].label and list(entry["probabilities"]) == list(found[0].probabilities)[:2]


def test_what_is_no_image_gets_one_line(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "flat.npy", np.zeros(4))
    np.save(tmp_path / "bright.npy", np.full((SIZE, SIZE, 3), 7.0))
    (tmp_path / "text.npy").write_text("not an array")
    for name, why in {
        "flat": "an image is",
        "bright": "from 0 to 1",
        "text": "not an image",
        "gone": "cannot read",
    }.items():
        with pytest.raises(UserError, match=why):
            SHAPE.read(tmp_path / f"{name}.npy")
        message = call(capsys, "predict", run.path, tmp_path / f"{name}.npy", "--device", "cpu", status=2)
        assert len(message.splitlines()) == 1


@pytest.mark.parametrize("verb", [["translate"], ["bench"], ["compare"]])
def test_verbs_that_do_not_apply_say_so_in_one_line(
    verb: list[str], run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    message = call(capsys, verb[0], run.path, *verb[1:], *([run.path] if verb[0] == "compare" else []), status=2)
    assert len(message.splitlines()) == 1 and str(run.path) in message


def test_what_a_format_cannot_express_is_named(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for to, why in {"huggingface": "model.pooling = 'mean'", "onnx": "the vit family"}.items():
        message = call(capsys, "export", run.path, "--to", to, "--out", "x", status=2)
        assert len(message.splitlines()) == 1 and why in message


def test_settings_that_no_image_fits_are_refused() -> None:
    for change, why in {
        "model.patch=5": "does not divide",
        "model.image=32": "24 pixels|patch",
        "task=translation": "vit",
        "model.pixel_mean=[0.5, 0.5]": "pixel_mean needs one number, or one for each of 3 channels",
        "model.pixel_std=[0]": "pixel_std must be above 0",
        "model.class_position=true": 'class_position needs pooling = "class-token"',
    }.items():
        with pytest.raises(UserError, match=why):
            load("shapes", [change])


@pytest.mark.slow
def test_shapes_are_learnt_in_under_two_minutes(tmp_path: Path) -> None:
    found = train(load("shapes"), tmp_path / "run", device="cpu", quiet=True)
    examples = list(Shapes.images("test"))
    predictions = LoadedRun.load(found.path, device="cpu").predictions([image for image, _ in examples])
    right = sum(prediction.label == label for prediction, (_, label) in zip(predictions, examples, strict=True))
    assert right / len(examples) >= 0.97
