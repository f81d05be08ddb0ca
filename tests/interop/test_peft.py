"""Low-rank adapters: files of peft load, ours load in peft, and training changes nothing but the adapters."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_decoders import CASES, TEMPLATE, folder_of
from test_huggingface import marian_folder, transformers

from regard.cli import run as run_command
from regard.errors import UserError
from regard.interop import agreement, import_folder
from regard.interop.exported import verify
from regard.interop.peft import export_adapter, import_adapter
from regard.interop.vocabularies import ids_of
from regard.nn.lora import is_adapter
from regard.packed import PackedTokens, SeqBatch
from regard.registry import EXPORTERS
from regard.run_dir import RunDir

if os.environ.get("CI"):
    import peft
else:
    peft = pytest.importorskip("peft", reason="needs peft")

TOKENS = [5, 9, 30, 12, 7, 40]


def our_logits(run: RunDir) -> torch.Tensor:
    """Logits in the order of their ids."""
    model, ids = run.model(), list(ids_of(run.tokenizers[1]))
    packed = PackedTokens.from_lists([[ids.index(token) for token in TOKENS]])
    with torch.inference_mode():
        logits = model.logits(SeqBatch(PackedTokens.from_lists([[]]), packed, packed.ids))
    return logits[:, [ids.index(i) for i in range(3, max(ids))]]


def their_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0][:, 3 : model.config.vocab_size - 1]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunDir]:
    path = tmp_path_factory.mktemp("peft")
    folder_of(CASES["llama 2"], path / "theirs")
    (path / "theirs" / "chat_template.jinja").write_text(TEMPLATE)
    return path / "theirs", import_folder(path / "theirs", path / "run")


def fresh(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def adapter(base: tuple[Path, RunDir], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
    peft.get_peft_model(fresh(base[0]), config).save_pretrained(path)
    return path


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]])
@pytest.mark.parametrize("rslora", [False, True])
def test_files_of_peft_load(base: tuple[Path, RunDir], tmp_path: Path, targets: list[str], rslora: bool) -> None:
    folder, run = base
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, use_rslora=rslora)
    adapted = peft.get_peft_model(fresh(folder), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    made = import_adapter(tmp_path / "adapter", run, tmp_path / "run")
    assert (made.path / "chat_template.jinja").read_text() == TEMPLATE
    assert not torch.allclose(our_logits(made), our_logits(run), atol=1e-2), "the adapters do something"
    torch.testing.assert_close(our_logits(made), their_logits(adapted), atol=1e-4, rtol=1e-4)
    again = export_adapter(made, tmp_path / "again")
    before, after = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "adapter", again))
    if targets == ["q_proj", "v_proj"]:
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("kind", "to"), [("llama", "ctranslate2"), ("marian", "huggingface")])
def test_exports_have_the_adapters_in_their_weights(
    base: tuple[Path, RunDir], kind: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "MAX_TEXTS", 6)
    folder, run = base
    if kind == "marian":
        folder = tmp_path / "theirs"
        marian_folder(folder)
        run = import_folder(folder, tmp_path / "base")
    theirs = fresh(folder) if kind == "llama" else transformers.MarianMTModel.from_pretrained(folder)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path / "adapter")
    tuned = import_adapter(tmp_path / "adapter", run, tmp_path / "run")
    found = verify(tuned, EXPORTERS[to](tuned, tmp_path / "out"), to)
    assert found is not None and all(each.equal + each.ties == 6 for each in found)
    if kind == "llama":
        with pytest.raises(UserError, match="the export differs"):
            verify(run, tmp_path / "out", to)


def test_training_changes_adapters_only_and_peft_reads_them(
    base: tuple[Path, RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = base
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n\nthe dog saw the cats\n\n" * 30)
    settings = ["data.text=" + str(tmp_path / "text.txt"), "data.held_out=0.1", "training.adapter=lora"]
    settings += ["training.steps=6", "training.warmup=1", "training.learning_rate=0.01", "training.adapter_rank=2"]
    settings += ["training.batch_tokens=64", "training.validate_every=3", "training.save_every=3", "training.average=0"]
    settings += ["model.max_positions=32", "training.optimizer=adamw"]
    changes = [part for setting in settings for part in ("--set", setting)]
    recipe, out = str(run.path / "recipe.toml"), tmp_path / "tuned"
    command = ["train", recipe, "--from", str(run.path), "--out", str(out), *changes, "--device", "cpu", "-q"]
    assert run_command(command, debug=True) == 0
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    before, after = load_file(run.best), load_file(out / "model.safetensors")
    trained = {name for name in after if is_adapter(name)}
    assert after.keys() - before.keys() == trained and len(trained) == 2 * 2 * 2
    assert all(torch.equal(before[name], after[name]) for name in before), "the base weights are untouched"
    assert all(after[name].abs().max() > 0 for name in trained)
    adapter = export_adapter(RunDir(out), tmp_path / "adapter")
    adapted = peft.PeftModel.from_pretrained(fresh(folder), adapter).eval()
    torch.testing.assert_close(our_logits(RunDir(out)), their_logits(adapted), atol=1e-4, rtol=1e-4)
    # resumed from its first save, it ends the same
    shorter = tmp_path / "resumed"
    half = [part.replace("training.steps=6", "training.steps=3") for part in command]
    half[half.index(str(out))] = str(shorter)
    assert run_command(half, debug=True) == 0
    whole = [str(shorter) if part == str(out) else part for part in command]
    assert run_command(whole, debug=True) == 0
    last = [load_file(path / "resume.safetensors") for path in (out, shorter)]
    weights = [name for name in last[0] if name.startswith("model.")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in weights)


def test_bad_adapters_are_refused_in_one_line(base: tuple[Path, RunDir], tmp_path: Path) -> None:
    folder, run = base
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    peft.get_peft_model(fresh(folder), config).save_pretrained(tmp_path / "dora")
    with pytest.raises(UserError, match="use_dora"):
        import_adapter(tmp_path / "dora", run, tmp_path / "run")
    marian_folder(tmp_path / "marian")
    other = import_folder(tmp_path / "marian", tmp_path / "other")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(fresh(folder), config).save_pretrained(tmp_path / "llama")
    with pytest.raises(UserError, match="has no counterpart in the base run"):
        import_adapter(tmp_path / "llama", other, tmp_path / "run")
    alone = ["train", "copy", "--set", "training.adapter=lora", "--out", str(tmp_path / "run"), "--device", "cpu", "-q"]
    assert run_command(alone, debug=False) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4'"),
        ({"init_lora_weights": ["gaussian"]}, "init_lora_weights = list"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"kasa_config": {"beta": 1.0}}, "kasa_config"),
        ({"r": 10**9}, "r must be between 1 and the width of the base run, 32"),
        ({"r": 3}, "does not have rank r = 3"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a positive number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a positive number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a positive number"),
    ],
)
def test_adapters_that_would_compute_something_else_are_refused(
    base: tuple[Path, RunDir], adapter: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").symlink_to(adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=re.escape(message)):
        import_adapter(tmp_path, base[1], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_without_adapters_and_a_base_with_adapters_are_refused(
    base: tuple[Path, RunDir], adapter: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="has no adapters"):
        import_adapter(tmp_path, base[1], tmp_path / "run")
    once = import_adapter(adapter, base[1], tmp_path / "once")
    with pytest.raises(UserError, match="has adapters already"):
        import_adapter(adapter, once, tmp_path / "twice")
