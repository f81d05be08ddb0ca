"""Imported Vision Transformers read images and compute logits as transformers does, and are exported unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from imported import imported_cases
from safetensors.torch import load_file
from test_huggingface import spread, transformers

from regard import tasks
from regard.cli import run as run_command
from regard.errors import UserError
from regard.interop import export_run, import_folder
from regard.interop.check import largest_difference
from regard.runs import LoadedRun
from regard.tasks.image_classification import ImageClassificationTask

pil = pytest.importorskip("PIL.Image", reason="needs regard[vision]")
# With Pillow also where torchvision is installed, which scales images otherwise.
Processor = getattr(transformers, "ViTImageProcessorPil", transformers.ViTImageProcessor)
BOUND = 1e-4
NAMES = ["cat", "dog", "owl"]
SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16)
SMALL |= dict(patch_size=4, id2label=dict(enumerate(NAMES)), label2id={name: n for n, name in enumerate(NAMES)})
IMAGENET = dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # class, settings, settings of the processor
    "vit": ("ViTForImageClassification", {}, {}),
    "no biases, large epsilon, tanh": (
        "ViTForImageClassification",
        {"qkv_bias": False, "layer_norm_eps": 1e-3, "hidden_act": "gelu_new"},
        {"resample": 3, **IMAGENET},
    ),
    "3 x 3 patches of 8 pixels, relu": (
        "ViTForImageClassification",
        {"patch_size": 8, "image_size": 24, "hidden_act": "relu", "num_hidden_layers": 1},
        {"resample": 0, "do_normalize": False},
    ),
    "grey": (
        "ViTForImageClassification",
        {"num_channels": 1},
        {"resample": 1, "image_mean": [0.2], "image_std": [0.7], "rescale_factor": 1 / 127},
    ),
    "not rescaled": ("ViTForImageClassification", {}, {"do_rescale": False, "image_mean": [99.0, 110.0, 120.0]}),
    "body": ("ViTModel", {}, {}),
}


def vit_folder(path: Path, name: str = "vit") -> Any:
    kind, changes, processing = CASES[name]
    settings = transformers.ViTConfig(**SMALL | changes)
    model = spread(getattr(transformers, kind)(settings), 4)
    model.save_pretrained(path)
    size = {"height": settings.image_size, "width": settings.image_size}
    Processor(size=size, **processing).save_pretrained(path)
    return model


made = imported_cases(lambda name, path: vit_folder(path, name))


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Images of several formats, sizes and modes."""
    random = np.random.default_rng(5)
    smooth = random.random((5, 7, 3)) * 255
    files = []
    for number, (width, height) in enumerate([(16, 16), (40, 23), (9, 31), (300, 200)]):
        image = pil.fromarray(smooth.astype(np.uint8)).resize((width, height), pil.Resampling.BICUBIC)
        files += [tmp_path / f"{number}.png", tmp_path / f"{number}.jpg"]
        image.save(files[-2])
        image.save(files[-1], quality=90)
    pil.fromarray(smooth[..., 0].astype(np.uint8)).resize((20, 30)).save(tmp_path / "grey.png")
    return [*files, tmp_path / "grey.png"]


@pytest.mark.parametrize("name", CASES)
def test_an_imported_vit_computes_the_same_logits(made: Any, name: str) -> None:
    _, folder, run = made(name)
    found = largest_difference(run, folder)
    print(f"{name}: the largest difference of the logits is {found:.1e}")
    assert found <= BOUND


@pytest.mark.parametrize("name", CASES)
def test_files_become_the_pixels_of_transformers(made: Any, name: str, photos: list[Path]) -> None:
    _, folder, run = made(name)
    task, processor, model = tasks.of(run.recipe), Processor.from_pretrained(folder), run.recipe.model
    assert isinstance(task, ImageClassificationTask)
    for photo in photos:
        image = pil.open(photo).convert("RGB" if model.channels == 3 else "L")
        array = np.asarray(image).reshape(image.size[1], image.size[0], -1)
        expected = processor(array, return_tensors="pt", input_data_format="channels_last")["pixel_values"][0]
        pixels = torch.tensor(task.read_input(str(photo))) / 255
        found = ((pixels - torch.tensor(model.pixel_mean)) / torch.tensor(model.pixel_std)).movedim(-1, 0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-4 if "rescaled" in name else 1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name != "body"])
def test_what_is_imported_is_exported_unchanged(made: Any, name: str, tmp_path: Path) -> None:
    _, folder, run = made(name)
    back = export_run(run, tmp_path / "back")
    before, after = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again = import_folder(back, tmp_path / "again")
    ours, theirs = run.recipe.model.model_dump(), again.recipe.model.model_dump()
    for key in ("pixel_mean", "pixel_std"):
        assert theirs.pop(key) == pytest.approx(ours.pop(key))
    assert ours == theirs
    assert again.classes == run.classes == tuple(NAMES)


def test_predictions_are_those_of_transformers(made: Any, photos: list[Path]) -> None:
    model, folder, run = made("vit")
    loaded, processor = LoadedRun.load(run.path, device="cpu"), Processor.from_pretrained(folder)
    for photo in photos[:-1]:
        with torch.inference_mode():
            expected = model(**processor(pil.open(photo), return_tensors="pt")).logits[0].softmax(-1)
        (found,) = loaded.predictions([loaded.prediction_task().read_input(str(photo))])
        assert found.label == NAMES[int(expected.argmax())]
        assert [found.probabilities[name] for name in NAMES] == pytest.approx(expected.tolist(), abs=1e-5)


def test_all_verbs_take_an_imported_vit(
    made: Any, photos: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, run = made("vit")
    data = tmp_path / "data"
    for number, name in enumerate(["yes", "no"]):
        (data / name).mkdir(parents=True)
        for i in range(4):
            pil.fromarray(np.full((16, 16, 3), 40 + 100 * number + i, np.uint8)).save(data / name / f"{i}.png")
    changes = [f"data.images={data}", "data.held_out=0.3", "training.steps=2", "training.batch_tokens=16"]
    changes += ["training.validate_every=2", "training.save_every=2", "training.average=0"]
    tuning = [word for setting in changes for word in ("--set", setting)]
    path, tuned, photo = str(run.path), str(tmp_path / "tuned"), str(photos[3])
    for command in (
        ["import", str(folder), "--out", str(tmp_path / "checked"), "--check"],
        ["predict", path, photo, "--top", "2", "--device", "cpu"],
        ["draw", path, photo, "--out", str(tmp_path / "drawn.svg")],
        ["explain", path, photo, "--masks", "8", "--device", "cpu", "--out", str(tmp_path / "why.svg")],
        ["train", str(run.path / "recipe.toml"), "--from", path, "--out", tuned, *tuning],
        ["evaluate", tuned, "--device", "cpu"],
        ["export", tuned, "--to", "huggingface", "--out", str(tmp_path / "exported"), "--check"],
    ):
        assert run_command(command, debug=True) == 0, command
    said = capsys.readouterr()
    assert "largest difference of the logits" in said.out and "accuracy" in said.out
    assert "predictions: 32 of 32 are the same" in said.err
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["id2label"] == {"0": "no", "1": "yes"}
    assert (tmp_path / "drawn.svg").read_text().startswith("<svg")


def test_what_an_imported_vit_cannot_do_is_one_line(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(made("vit")[2].path)
    for command, complaint in (
        (["evaluate", path], "its weights were imported): set data.images"),
        (["predict", path, "test 1"], "its weights were imported): set data.images"),
        (["predict", path, "none.png"], "cannot read none.png"),
        (["draw", path, "test 1"], "its weights were imported): set data.images"),
        (["export", path, "--to", "onnx", "--out", str(tmp_path / "a")], "the vit family"),
        (["export", path, "--to", "ctranslate2", "--out", str(tmp_path / "b")], "the vit family"),
    ):
        assert run_command(command, debug=False) == 2, command
        said = capsys.readouterr().err
        assert complaint in said and said.count("\n") == 1, said


def test_a_body_gets_a_new_head_which_is_dropped_for_other_classes(made: Any, tmp_path: Path) -> None:
    model, _, run = made("body")
    assert run.recipe.about.endswith("; its head is new") and run.classes == tuple(NAMES)
    weights = load_file(run.best)
    assert torch.equal(weights["encoder.norm.weight"], model.layernorm.weight.detach())
    fresh = run.fresh_model()
    before = fresh.classifier.weight.detach().clone()
    fresh.init_from(type(fresh).body(weights), run.best)
    assert torch.equal(fresh.classifier.weight, before)
    assert torch.equal(fresh.tokens.positions, weights["tokens.positions"])


def test_classes_of_the_same_name_are_numbered(tmp_path: Path) -> None:
    vit_folder(tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"id2label": {"0": "crane", "1": "x", "2": "crane"}}))
    assert import_folder(tmp_path / "theirs", tmp_path / "run").classes == ("crane (0)", "x", "crane (2)")


@pytest.mark.parametrize(
    ("file", "fields", "complaint"),
    [
        ("config.json", {"architectures": ["ViTForMaskedImageModeling"]}, "'ViTForMaskedImageModeling' has no"),
        ("config.json", {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu' has no counterpart"),
        ("config.json", {"image_size": [16, 32]}, "image_size = 16 x 32 has no counterpart here"),
        ("config.json", {"patch_size": 5}, "patch_size = 5 does not divide image_size = 16"),
        ("config.json", {"num_channels": 4}, "num_channels = 4 has no counterpart"),
        ("config.json", {"head_dim": 16}, "head_dim must be"),
        ("config.json", {"layer_norm_eps": 0}, "norm_eps: Input should be greater than 0"),
        ("config.json", {"qkv_bias": "yes"}, "qkv_bias must be true or false"),
        ("config.json", {"quantization_config": {}}, "quantization_config"),
        ("config.json", {"problem_type": "regression"}, "problem_type = 'regression'"),
        ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, "image_processor_type = 'CLIP"),
        ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop = true"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 16}}, "size must be that of config.json"),
        ("preprocessor_config.json", {"size": 20}, "size must be that of config.json: image_size = 16"),
        ("preprocessor_config.json", {"resample": 6}, "resample = 6"),
        ("preprocessor_config.json", {"resample": "bilinear"}, "resample must be a whole number"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, "image_mean must have a number for each of 3"),
        ("preprocessor_config.json", {"image_mean": [0.5, 1e300, 0]}, "image_mean must have numbers"),
        ("preprocessor_config.json", {"image_std": [0.5, 0, 0.5]}, "image_std must be above 0"),
        ("preprocessor_config.json", {"rescale_factor": "1/255"}, "rescale_factor must have numbers"),
        ("preprocessor_config.json", {"rescale_factor": 0}, "rescale_factor must be above 0"),
    ],
)
def test_settings_without_a_counterpart_are_named(
    made: Any, tmp_path: Path, file: str, fields: dict[str, Any], complaint: str
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for one in made("vit")[1].iterdir():
        (folder / one.name).write_bytes(one.read_bytes())
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | fields))
    with pytest.raises(UserError) as caught:
        import_folder(folder, tmp_path / "run")
    assert complaint in str(caught.value) and "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert not (tmp_path / "run").exists()
