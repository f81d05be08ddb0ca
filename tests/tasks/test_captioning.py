"""Captions of images: training, evaluation, regions of words, files of users."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard import tasks
from regard.data.features import FeaturePacker
from regard.data.scenes import SIDE, SPLITS, scenes
from regard.decoding.cuda_graphs import PaddedLayout
from regard.decoding.static_search import StaticRunner
from regard.errors import UserError
from regard.models import build
from regard.models.captioner import PatchEmbedding
from regard.packed import PackedFeatures
from regard.recipes import load
from regard.recipes.schema import Recipe
from regard.registry import CORPORA
from regard.run_dir import RunDir
from regard.tasks import regions, text_writer
from regard.tasks.aligner import AttentionView, cross_attention
from regard.tasks.captioning import CaptioningTask, patch_rows
from regard.tasks.regions import WordRegion, region_shares
from regard.text import UNK
from regard.training.setup import train
from regard.training.static_batch import StaticBatchShape

QUICK = ["training.steps=6", "training.validate_every=3", "training.save_every=3", "training.validate_lines=4"]
SMALL = ["model.width=16", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=2", "model.ffn_width=16"]
CPU = torch.device("cpu")


def quick(*changes: str) -> Recipe:
    return load(
        "scenes",
        [
            *QUICK,
            *SMALL,
            "data.corpus=scenes",
            "data.count=64",
            "training.batch_tokens=96",
            "training.warmup=2",
            *changes,
        ],
    )


@pytest.fixture(scope="module", autouse=True)
def fewer_scenes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for split, seed in (("valid", 1), ("test", 2)):
            patch.setitem(SPLITS, split, (seed, 30))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(quick(), tmp_path_factory.mktemp("scenes") / "run", device="cpu", quiet=True)


def task_of(run: RunDir) -> CaptioningTask:
    task = tasks.of(run.recipe)
    assert isinstance(task, CaptioningTask)
    return task


def call(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> str:
    from regard.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    assert (left.value.code or 0) == status, printed.err
    return printed.out if status == 0 else printed.err


def test_patches_are_the_pixels_in_reading_order() -> None:
    image = np.random.default_rng(0).integers(0, 256, (24, 24, 3)).astype(np.uint8)
    rows = patch_rows(image, 6)
    assert rows.shape == (16, 108)
    for number in (0, 1, 4, 11):
        row, column = (6 * n for n in divmod(number, 4))
        assert np.array_equal(rows[number], image[row : row + 6, column : column + 6].flatten())


def test_convolutions_read_the_image_that_the_patches_make_up() -> None:
    """Whatever the rows of a batch are: packed, with padding at the end, or each image padded to more rows."""
    torch.manual_seed(0)
    settings = load("scenes", [*SMALL, "model.patch=8"]).model
    embedding = PatchEmbedding(settings).eval()  # type: ignore[arg-type]
    assert embedding.stem is not None
    images = np.stack([scene.pixels() / np.float32(255) for scene in scenes("train", 3)])
    rows = [torch.from_numpy(patch_rows(image, 8)) for image in images]
    expected = embedding.stem((torch.from_numpy(images) - 0.5) / 0.25).flatten(1, 2) + embedding.positions
    packed = PackedFeatures.from_arrays(rows, size=120)  # 3 images of 36 patches, and 12 rows of padding
    found = embedding(packed.values, packed.layout)
    torch.testing.assert_close(found[:108].unflatten(0, (3, 36)), expected, atol=1e-5, rtol=1e-5)
    wide = torch.cat([torch.nn.functional.pad(row, (0, 0, 0, 12), value=7.0) for row in rows])
    found = embedding(wide, PaddedLayout(torch.tensor([36, 36, 36]), 48))
    torch.testing.assert_close(found.unflatten(0, (3, 48))[:, :36], expected, atol=1e-5, rtol=1e-5)


def test_batches_hold_the_patches_and_tokens_of_their_images(run: RunDir) -> None:
    task = task_of(run)
    stream = task.stream(run, task.dataset(run), static=False)
    batch = stream.batch_at(0)
    pixels = [(scene.caption("en"), scene.pixels()) for scene in scenes("train", 64)]  # captions can be the same
    rows = [(text, torch.from_numpy(patch_rows(image, task.settings.patch) / 255).float()) for text, image in pixels]
    texts = [run.tokenizers[1].decode(ids.tolist()) for ids in batch.inputs.layout.split(batch.labels)]
    for text, values in zip(texts, batch.source.layout.split(batch.source.values), strict=True):
        assert any(text == other and torch.allclose(values, image) for other, image in rows)
    assert batch.num_targets == sum(len(text.split()) + 1 for text in texts)


def parts(*changes: str) -> Recipe:
    return load(
        "scenes-parts", [*QUICK, *SMALL, "data.count=64", "training.batch_tokens=96", "training.warmup=2", *changes]
    )


def test_missing_words_are_read_as_unknown_and_have_no_loss(tmp_path: Path) -> None:
    run = train(parts(), tmp_path / "run", device="cpu", quiet=True)
    task, tokenizer = task_of(run), run.tokenizers[1]
    assert tokenizer.encode("___") == [UNK] and UNK not in tokenizer.encode("a small star is to the left of a red moon")
    for static in (False, True):
        batch = task.packer(task.dataset(run), static=static).batch_at(0)
        tokens = batch.inputs.layout.is_token
        assert torch.equal(batch.target_mask, tokens & (batch.labels != UNK))
        assert batch.num_targets == int(tokens.sum() - (batch.labels == UNK).sum()) < int(tokens.sum())
    pair = ("a small ___ star", "a small red star")
    masked, whole = (task.batches(run, [(next(scenes("train", 1)), text)])[0][1] for text in pair)
    assert masked.target_mask.tolist() == [True, True, False, True, True] and masked.inputs.ids[3] == UNK
    model = run.model(CPU).eval()
    losses = -model.logits(masked).log_softmax(-1).gather(1, masked.labels[:, None])[:, 0]
    torch.testing.assert_close(model(masked), losses[masked.target_mask].sum())
    other = masked.labels.masked_fill(masked.labels == UNK, 5)
    assert torch.equal(model(masked), model(replace(masked, labels=other)))  # whatever the label of the missing word
    assert whole.target_mask.all()


def test_static_batches_and_searches_change_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU captures as graphs: the same loss and gradients, the same captions."""
    task, model = task_of(run), run.model(CPU)
    packer = task.packer(task.dataset(run), static=True)
    assert isinstance(packer, FeaturePacker)
    shape = StaticBatchShape(packer.batch_at(0))
    for number in range(2):
        batch = packer.batch_at(number)
        results = []
        for some in (batch, shape.unflatten(shape.flatten(batch))):
            loss = model(some)
            results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    features = [task.features(scene) for scene in scenes("test", 7)]
    write = task.writer(run, model.eval(), beam=3, max_ratio=0.5)
    expected = write(features)
    monkeypatch.setattr(text_writer, "select_runner", lambda *_: StaticRunner(round_sizes=True))
    for one, other in zip(write(features), expected, strict=True):
        assert one.texts == other.texts
        assert one.hypotheses[0].score == pytest.approx(other.hypotheses[0].score, abs=1e-4)


def test_validations_and_evaluation_count_the_exact_captions(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics if entry["kind"] == "valid"] == [3, 6]
    task, model = task_of(run), regard.load(run.path, device="cpu")
    examples = task.held_out("valid")
    found = model.caption([scene for scene, _ in examples])
    exact = sum(answer.text == text for answer, (_, text) in zip(found, examples, strict=True)) / len(examples)
    entry = json.loads(call(capsys, "evaluate", run.path, "--split", "valid", "--json", "--device", "cpu"))
    assert entry["images"] == len(examples) and entry["exact"] == pytest.approx(100 * exact)
    words = entry["attention"]["words"]
    assert words["all"]["chance"] < words["relation"]["chance"] < 50
    assert all(0 < row["all_heads"] <= 100 for row in words.values())


def test_attention_that_is_spread_evenly_is_inside_by_chance(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(run)
    examples = [((scene, text), task.word_regions(scene, text)) for scene, text in task.held_out("valid")[:5]]
    patches = task.settings.grid**2

    def evenly(model: Any, batch: Any, view: Any = None) -> torch.Tensor:
        shape = 2, len(batch.source.layout), 2, batch.inputs.layout.max_len, patches
        return torch.full(shape, 1 / patches)

    monkeypatch.setattr(regions, "cross_attention", evenly)
    shares = region_shares(task, run, run.model(CPU), examples, CPU)  # type: ignore[arg-type]
    assert shares.share(AttentionView()) == pytest.approx(shares.by_chance(), rel=1e-5)
    assert shares.share(AttentionView(1, 0, "reading"), ["shape"]) == pytest.approx(shares.by_chance(["shape"]))


def test_the_share_of_a_head_that_looks_at_one_patch(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head 1 of layer 2 looks at patch 5 when it predicts the third word, and else at patch 0."""
    task = task_of(run)
    scene = next(scene for scene in scenes("valid") if scene.caption("en").count(" ") == 3)
    inside = np.arange(task.settings.grid**2) == 5
    words = [WordRegion(role, inside) for role in ("article", "size", "colour", "shape")]

    def looks(model: Any, batch: Any, view: Any = None) -> torch.Tensor:
        weights = torch.zeros(2, 1, 2, batch.inputs.layout.max_len, len(inside))
        weights[..., 0] = 1
        weights[1, 0, 1, 2] = torch.nn.functional.one_hot(torch.tensor(5), len(inside))
        return weights

    monkeypatch.setattr(regions, "cross_attention", looks)
    shares = region_shares(task, run, run.model(CPU), [((scene, scene.caption("en")), words)], CPU)
    head = AttentionView(1, 1, "predicting")
    assert [shares.share(head, [role]) for role in ("article", "size", "colour", "shape")] == [0, 0, 100, 0]
    assert shares.share(AttentionView(1, 1, "reading"), ["size"]) == 100  # the row that predicts the third reads it
    assert shares.share(AttentionView(), ["colour"]) == pytest.approx(25) and shares.best_head(["colour"]) == head
    assert shares.by_chance() == pytest.approx(100 / len(inside))


def test_regions_are_the_patches_with_pixels_of_the_shapes(run: RunDir) -> None:
    task = task_of(run)
    side, across = task.settings.patch, task.settings.grid
    for scene, text in task.held_out("test")[:6]:
        found = task.word_regions(scene, text)
        assert found is not None and [word.role for word in found] == [word.role for word in scene.words("en")]
        for word, region in zip(scene.words("en"), found, strict=True):
            rows, columns = np.nonzero(scene.region(word.shapes))
            expected = {(row // side) * across + column // side for row, column in zip(rows, columns, strict=True)}
            assert set(np.flatnonzero(region.patches)) == expected
        assert task.word_regions(scene, "something else") is None
    assert task.word_regions(np.zeros((SIDE, SIDE, 3)), "a small red cross") is None


def test_a_mix_of_scenes_has_its_held_out_examples_once() -> None:
    for name, plain in {"scenes": "scenes", "scenes-parts": "scenes", "scenes-es": "scenes-es"}.items():
        found = tasks.of(load(name)).held_out("test")
        assert found == list(CORPORA[plain].examples("test"))


def test_spanish_captions_have_the_same_images(run: RunDir) -> None:
    spanish = tasks.of(load("scenes-es"))
    pairs = zip(task_of(run).held_out("test")[:5], spanish.held_out("test")[:5], strict=True)
    for (scene, english), (same, text) in pairs:
        assert scene == same and text == scene.caption("es") != english


# -- inside ------------------------------------------------------------------------------------------------------------


def test_a_trace_has_the_attention_of_every_word_over_the_patches(run: RunDir) -> None:
    model = regard.load(run.path, device="cpu")
    trace = model.trace("test 2", target="a small red cross")
    axes, task = trace.header["axes"], task_of(run)
    assert axes["source"]["kind"] == "patches" and len(axes["source"]["elements"]) == task.settings.grid**2
    assert trace.header["text"]["target"] == "a small red cross"
    weights = trace.array("decoder.1.cross_attn.weights")
    scene = list(scenes("test", 2))[1]
    ((_, batch),) = task.batches(run, [(scene, "a small red cross")])
    np.testing.assert_allclose(weights, cross_attention(model.module, batch)[1, 0], atol=1e-5)
    assert weights.shape[1:] == (5, task.settings.grid**2)  # four words and EOS


def test_hidden_patches_are_grey(run: RunDir) -> None:
    model, task = regard.load(run.path, device="cpu"), task_of(run)
    scene = next(scenes("test", 1))
    image = scene.pixels().astype(np.float64) / 255
    image[8:16, :8] = 0.5  # the first patch of the second row
    hidden = {"kind": "hide", "side": "source", "element": task.settings.grid}
    changed = model.trace("test 1", target="a small red cross", changes=[hidden])
    (by_hand,) = task.batches(run, [(scene, "a small red cross")])
    batch = replace(by_hand[1], source=PackedFeatures.from_arrays([patch_rows(image, 8).astype(np.float32)]))
    expected = model.module.logits(batch).log_softmax(-1).gather(1, batch.labels[:, None]).exp()[:, 0]
    assert changed.header["output"]["p"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_picture_has_the_image_once_for_every_word(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scene.svg"
    call(capsys, "draw", run.path, "test 1", "--target", "a small red cross", "--out", file, "--device", "cpu")
    svg = file.read_text()
    assert svg.count("<image") == 1 + 5 and all(f">{word}<" in svg for word in ("a", "small", "red", "cross"))
    message = call(capsys, "draw", run.path, "gone.png", "--device", "cpu", status=2)
    assert "cannot read gone.png" in message and len(message.splitlines()) == 1


# -- files of users ----------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """12 scenes in files of three kinds, named relative to the manifest, with a header."""
    pillow = pytest.importorskip("PIL.Image")
    (tmp_path / "Images").mkdir()
    lines = ["image\tcaption"]
    for number, scene in enumerate(scenes("train", 12)):
        name = f"Images/{number}.{['png', 'npy', 'bmp'][number % 3]}"
        if name.endswith("npy"):
            np.save(tmp_path / name, scene.pixels())
        else:
            pillow.fromarray(scene.pixels()).resize((96, 64)).save(tmp_path / name)
        lines.append(f"{name}\t{scene.caption('en').upper()}")
    file = tmp_path / "train.tsv"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_model_is_trained_on_files_and_describes_files(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'extends = "scenes"\n[data]\ncaptions = "train.tsv"\nheld_out = 0.25\nlowercase = true\n'
        '[model]\nfamily = "captioner"\nimage = 32\npatch = 8\nwidth = 16\nheads = 2\n'
        "[training]\nsteps = 2\nwarmup = 1\nvalidate_every = 1\nsave_every = 1\nvalidate_lines = 2\n"
    )
    monkeypatch.chdir("/")  # file names are relative to the manifest
    call(capsys, "train", recipe, "--out", tmp_path / "run", "--device", "cpu", "--quiet")
    trained = RunDir(tmp_path / "run")
    task = task_of(trained)
    assert [len(task.held_out(split)) for split in ("valid", "test")] == [3, 3]
    image, text = task.held_out("test")[0]
    assert image.shape == (32, 32, 3) and text == text.lower()
    files = [tmp_path / "Images" / name for name in ("0.png", "1.npy")]
    out = call(capsys, "caption", trained.path, *files, "--device", "cpu")
    captions = regard.load(trained.path, device="cpu").caption(files)
    assert out.splitlines() == [answer.text for answer in captions]
    call(capsys, "evaluate", trained.path, "--device", "cpu")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("Images/gone.png\ta cross", r"example 2: cannot read .*gone\.png"),
        ("text.png\ta cross", r"example 2: .*text\.png"),
        ("nan.npy\ta cross", r"example 2: .*nan\.npy: pixels are numbers"),
        ("thin.npy\ta cross", r"example 2: .*thin\.npy.*an image is"),
        ("Images/0.png", "columns"),
    ],
)
def test_a_bad_line_of_a_manifest_is_named(line: str, why: str, manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    np.save(tmp_path / "nan.npy", np.full((8, 8, 3), np.nan))
    np.save(tmp_path / "thin.npy", np.zeros((8, 3)[:1]))
    manifest.write_text("\n".join([*manifest.read_text().splitlines()[:2], line]) + "\n")
    recipe = quick().model_dump()
    recipe["data"] = {"captions": str(manifest), "valid": [str(manifest)]}
    with pytest.raises(UserError, match=why) as error:
        train(Recipe.model_validate(recipe), tmp_path / "run", device="cpu", quiet=True)
    assert "\n" not in str(error.value)


def test_captions_on_the_command_line(run: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = regard.load(run.path, device="cpu")
    scene = list(scenes("test", 3))[2]
    (best, *others) = model.caption(scene, nbest=3).texts
    out = call(capsys, "caption", run.path, "test 3", "--nbest", 3, "--device", "cpu")
    assert [line.split("\t")[1] for line in out.splitlines()] == [best, *others]
    out = call(capsys, "caption", run.path, "test 3", "test 1", "--format", "jsonl", "--device", "cpu")
    entries = [json.loads(line) for line in out.splitlines()]
    assert [entry["input"] for entry in entries] == ["test 3", "test 1"]
    assert entries[0]["text"] == model.caption(scene).text
    call(capsys, "caption", run.path, "test 1", "-o", tmp_path / "out", "--device", "cpu")
    assert (tmp_path / "out").read_text().splitlines() == [entries[1]["text"]]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["caption", "RUN"], "nothing to read"),
        (["caption", "RUN", "gone.png"], "cannot read gone.png"),
        (["caption", "RUN", "test 31"], "there is no example"),
        (["translate", "RUN", "a"], "use `regard caption`"),
        (["predict", "RUN", "a.png"], "use `regard caption`"),
        (["evaluate", "RUN", "--stride", "4"], "--stride has no effect"),
        (["evaluate", "RUN", "--split", "dev"], "no split 'dev'"),
    ],
)
def test_mistakes_get_one_line(
    words: list[str], why: str, run: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    message = call(capsys, *(str(run.path) if word == "RUN" else word for word in words), status=2)
    assert why in message and len(message.splitlines()) == 1


def test_positions_of_patches_are_learned_or_sinusoids_of_row_and_column() -> None:
    """Sinusoids are as large as the features beside them, and not trained: patches of a row share a half of them."""
    learned, waves = (
        PatchEmbedding(load("scenes", [*SMALL, f"model.patch_positions={name}"]).model)  # type: ignore[arg-type]
        for name in ("learned", "sinusoidal")
    )
    assert "positions" in dict(learned.named_parameters()) and "positions" not in dict(waves.named_parameters())
    grid = waves.positions.unflatten(0, (6, 6))
    assert torch.equal(grid[2, 0, :8], grid[2, 5, :8]) and not torch.equal(grid[2, 0, 8:], grid[2, 5, 8:])
    assert torch.equal(grid[0, 3, 8:], grid[4, 3, 8:]) and not torch.equal(grid[0, 3, :8], grid[4, 3, :8])
    images = np.stack([scene.pixels() / np.float32(255) for scene in scenes("train", 20)])
    assert waves.stem is not None
    tokens = waves.stem((torch.from_numpy(images) - 0.5) / 0.25)
    assert 0.3 < float(tokens.detach().std() / waves.positions.std()) < 3


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="masked_word is for captions"):
        load("en-es", ["data.masked_word=___"])
    for change, why in {
        "model.patch=7": "does not divide",
        "model.patch=6": "patch must be 2, 4, 8",
        "task=translation": "captioner",
        "data.documents=line": "has no effect",
        "data.corpus=en-es": "captions|pairs",
    }.items():
        with pytest.raises(UserError, match=why):
            load("scenes", [change])


def test_the_size_of_an_image_is_free() -> None:
    """A model of other images than the corpus draws: they are resized, and so are the regions."""
    pytest.importorskip("PIL.Image")
    recipe = load("scenes", ["model.image=24", "model.patch=6", "model.stem=patches"])
    task = tasks.of(recipe)
    assert isinstance(task, CaptioningTask)
    scene, text = task.held_out("valid")[0]
    assert task.features(scene).shape == (16, 108)
    half, whole = (
        task.word_regions(scene, text),
        tasks.of(load("scenes", ["model.patch=12", "model.stem=patches"])).word_regions(scene, text),
    )  # type: ignore[attr-defined]
    assert half is not None and sum((a.patches ^ b.patches).sum() for a, b in zip(half, whole, strict=True)) <= 3
    assert build(recipe.model, 0, 40, True).encoded_length(16) == 16
