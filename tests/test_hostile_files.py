"""Malformed files are refused in one line, soon, and before memory is allocated."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from regard import devices, tensor_io
from regard.api import load
from regard.errors import UserError
from regard.files import checksum, json_checksum
from regard.models import build, sizes
from regard.models.gpt import GPTSettings
from regard.models.recurrent import RecurrentSettings
from regard.models.transformer_settings import TransformerSettings
from regard.recipes import load as load_recipe
from regard.run_dir import RunDir
from regard.text import Tokenizer
from regard.training.checkpoint import TrainingProgress
from regard.training.setup import train
from tiny_runs import make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("hostile") / "run", "transformer").path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of a run, whose files may be changed."""
    folder = tmp_path / "run"
    folder.mkdir()
    for file in made.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    yield folder


def substitute(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def change_run_json(run: Path, **entries: Any) -> None:
    """Change entries of run.json, and its checksum with them."""
    info = json.loads((run / "run.json").read_text())
    info = {name: entry for name, entry in {**info, **entries}.items() if name != "checksum"}
    (run / "run.json").write_text(json.dumps({**info, "checksum": json_checksum(info)}))


@pytest.mark.parametrize("name", ["run.json", "recipe.toml", "tokenizer.json", "model.safetensors"])
def test_a_pipe_in_a_run_is_refused_by_name_and_does_not_hang(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(UserError, match=rf"{name} is a pipe or a device, not a file"):
        load(run, device="cpu")


def test_a_recipe_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.toml")
    with pytest.raises(UserError, match=r"mine\.toml is a pipe or a device, not a file"):
        load_recipe(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a = " + "[" * 100_000 + "\n", "not valid TOML: it is nested too deeply"),
        ("a." * 100_000 + "a = 1\n", "not valid TOML: it is nested too deeply"),
        ("training.steps = " + "9" * 5000 + "\n", "not valid TOML: "),
        ("[training]\nseed = " + "9" * 40 + "\n", "line 2: training.seed: must be at most 9007199254740992"),
    ],
)
def test_recipes_that_break_parsers(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "mine.toml").write_text('extends = "copy"\n' * ("nested" not in fault) + text)
    with pytest.raises(UserError, match=r"mine\.toml") as refused:
        load_recipe(str(tmp_path / "mine.toml"))
    assert fault.replace("line 2", "line 3") in str(refused.value)


def test_a_deeply_nested_value_on_the_command_line_is_refused() -> None:
    with pytest.raises(UserError, match=r"--set training\.betas: the value is nested too deeply"):
        load_recipe("copy", ["training.betas=" + "[" * 10_000 + "]" * 10_000])


def test_finding_the_line_of_an_error_takes_linear_time(tmp_path: Path) -> None:
    """Parsing ever longer beginnings of the file took 17 s at line 8,000."""
    texts = [f'[[data.mix]]\ncorpus = "copy"\nsource_tag = """\n[{n}"""\n' for n in range(2000)]
    texts += ['[[data.mix]] # "\ncorpus = "copy"\nweigth = 1\n']
    (tmp_path / "mine.toml").write_text("".join(texts))
    began = time.process_time()
    with pytest.raises(UserError, match=r"line 8003: unknown key data\.mix\[2000\]\.weigth"):
        load_recipe(str(tmp_path / "mine.toml"))
    assert time.process_time() - began < 4


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("run.json", "[" * 100_000, r"run\.json is damaged"),
        ("tokenizer.json", "[" * 100_000, r"tokenizer\.json is damaged"),
        (
            "tokenizer.json",
            '{"format": "regard tokenizer", "version": 1, "unit": "bpe", "tags": 5, "merges": []}',
            "tags",
        ),
        (
            "tokenizer.json",
            '{"format": "regard tokenizer", "version": 1, "unit": "bpe", "tags": [], "merges": ["no pair"]}',
            r"tokenizer\.json is damaged",
        ),
    ],
)
def test_malformed_json_is_refused(run: Path, name: str, text: str, fault: str) -> None:
    (run / name).write_text(text)
    if name == "tokenizer.json":  # a deliberate change includes the checksum
        change_run_json(run, tokenizers={name: checksum(text)})
    with pytest.raises(UserError, match=fault):
        load(run, device="cpu")


@pytest.mark.parametrize("about", ["[" * 100_000, "[1]", "}"])
def test_a_malformed_header_is_refused(tmp_path: Path, about: str) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(2)}, str(file), metadata={"about": about})
    for read in (tensor_io.load, tensor_io.read_metadata):
        with pytest.raises(UserError, match=r"w\.safetensors is damaged"):
            read(file)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("width = 16", "width = 1000000000", "width"),
        ("encoder_layers = 2", "encoder_layers = 1000000", "encoder_layers"),
        ("ffn_width = 24", "ffn_width = 9007199254740992", "ffn_width"),
        ("max_positions = 48", "max_positions = 1000000000000", "max_positions"),
    ],
)
def test_a_run_whose_recipe_is_too_large_is_refused_before_allocation(
    run: Path, old: str, new: str, named: str
) -> None:
    substitute(run / "recipe.toml", old, new)
    began = time.process_time()
    with pytest.raises(UserError, match=rf"recipe\.toml: model\.{named} = {new.split()[-1]}: .*parameters"):
        RunDir(run).model()
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "setting", ["model.width=1000000000", "model.encoder_layers=1000000", "model.ffn_width=10000000000"]
)
def test_a_model_larger_than_the_memory_is_not_trained(tmp_path: Path, setting: str) -> None:
    recipe = load_recipe("copy", [setting])
    with pytest.raises(UserError, match=rf"the recipe: {setting.replace('=', ' = ')}: .* GB of memory here"):
        train(recipe, tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "settings",
    [
        TransformerSettings.model_validate({"size": "tiny", "encoder_layers": 3, "se_dim": 3, "norm": "batch"}),
        TransformerSettings.model_validate({"size": "tiny", "positions": "learned", "tie_embeddings": False}),
        RecurrentSettings.model_validate({"size": "tiny", "encoder_layers": 3, "decoder_layers": 4}),
        GPTSettings.model_validate({"size": "nano", "layers": 5, "positions": "relative"}),
    ],
)
def test_model_sizes_are_exact_and_below_their_bound(settings: Any) -> None:
    size = sizes.Size.of(settings, 30, 40, False)
    model = build(settings, 30, 40, False)
    assert size.stored == sum(tensor.numel() for tensor in tensor_io.model_tensors(model).values())
    assert size.held == size.stored + sum(buffer.numel() for buffer in model.buffers())
    assert size.held <= sizes.upper_bound(settings, 70)


def test_the_memory_of_the_machine_is_known() -> None:
    assert 1 << 28 < devices.memory(torch.device("cpu")) < 1 << 50


def test_a_damaged_sentencepiece_model_is_named() -> None:
    pytest.importorskip("sentencepiece")
    head = '{"format": "regard tokenizer", "version": 1, "unit": "sentencepiece", '
    text = head + '"tags": [], "words": [], "model": "AAAA"}'
    with pytest.raises(UserError, match="SentencePiece model is damaged"):
        Tokenizer.from_json(text).encode("a")


def test_a_step_that_is_not_a_number_is_refused(run: Path) -> None:
    tensors, facts = tensor_io.load(run / "model.safetensors")
    tensor_io.save(run / "model.safetensors", tensors, {**facts, "step": [1]})
    with pytest.raises(UserError, match=r"model\.safetensors is damaged: the step in its header is \[1\]"):
        _ = load(run, device="cpu").step


@pytest.mark.parametrize(
    "shards",
    [
        {"/etc/passwd": ""},
        {"resume-1/../../secret": ""},
        {"resume-1/..": ""},
        {"resume-1": ""},
        {"resume-1/": ""},
        {"resume-1/a/b": ""},
        {"resume-1/a\\b": ""},
        {"resume-1/a\0b": ""},
        {"../resume-1": ""},
        {"other/part": ""},
        {"resume.safetensors": ""},
        {"resume-1/part": 5},
        ["resume-1/part"],
        "resume-1/part",
        5,
    ],
)
def test_shards_elsewhere_are_refused_before_they_are_opened(
    tmp_path: Path, shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "resume.safetensors"
    tensor_io.save(file, {"model.a": torch.zeros(3)}, {"shards": shards})
    monkeypatch.setattr(tensor_io, "file_digest", lambda path: pytest.fail(f"{path} was read"))
    facts, name = {"shards": shards}, next(iter(shards)) if isinstance(shards, dict) else ""
    for read in (
        lambda: tensor_io.load(file),
        lambda: tensor_io.elements(file),
        lambda: tensor_io.shard_folder(file, facts),
        lambda: tensor_io.verify_shard(file, facts, name),
    ):
        with pytest.raises(UserError, match=r"^.*resume\.safetensors is damaged: .* shard.*$"):
            read()


def test_a_shard_that_names_shards_is_counted_once(tmp_path: Path) -> None:
    file, part = tmp_path / "resume.safetensors", tmp_path / "resume-1" / "resume.safetensors"
    part.parent.mkdir()
    (tmp_path / "resume-1" / "resume-1").symlink_to(tmp_path / "resume-1")
    for path in (file, part):
        tensor_io.save(path, {"model.a": torch.zeros(3)}, {"shards": {"resume-1/resume.safetensors": ""}})
    assert tensor_io.elements(file) == 6


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"step": "9"}, "step is '9'"),
        ({"position": {"epoch": [], "batch": 0}}, "epoch is"),
        ({"position": 5}, "items"),
        ({"unheard": 1}, "unheard"),
        ({"logs": None}, "logs is None"),
    ],
)
def test_metadata_of_wrong_types_is_refused(tmp_path: Path, facts: dict[str, Any], fault: str) -> None:
    file = tmp_path / "resume.safetensors"
    tensor_io.save(file, {"model.a": torch.zeros(1)}, {**asdict(TrainingProgress(step=3)), **facts})
    with pytest.raises(UserError, match=rf"resume\.safetensors does not hold the state of a run.*{fault}"):
        TrainingProgress.read(file)
    tensor_io.save(file, {"model.a": torch.zeros(1)}, asdict(TrainingProgress(step=3, best=-1.5)))
    assert TrainingProgress.read(file) == TrainingProgress(step=3, best=-1.5)


def test_an_unknown_family_in_run_json_gets_the_line_of_a_recipe(run: Path) -> None:
    settings = RunDir(run).info["recipe"]
    change_run_json(run, recipe={**settings, "model": {**settings["model"], "family": "mamba"}})
    families = "bert, captioner, decision, gpt, graph, recurrent, speech, transformer or vit"
    with pytest.raises(UserError, match=rf'run\.json: model\.family = "mamba": must be {families}$'):
        _ = RunDir(run).recipe


@pytest.mark.parametrize(("key", "value"), [("tokenizers", [1]), ("recipe", "x"), ("from", 5)])
def test_entries_of_run_json_of_wrong_types_are_refused(run: Path, key: str, value: Any) -> None:
    change_run_json(run, **{key: value})
    with pytest.raises(UserError, match=rf"run\.json is damaged: {key} is"):
        RunDir(run)
