"""Exported runs in transformers: tokenizer, then model, without further settings."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_huggingface import BOUND, ENGLISH, OUR_RUNS, gpt2_folder, marian_folder, own_run, texts, transformers

from regard.api import load
from regard.cli import run as run_command
from regard.errors import UserError
from regard.interop import export_run, import_folder
from regard.interop.check import largest_difference
from regard.interop.generation import generation_settings
from regard.interop.vocabularies import ids_of
from regard.recipes.schema import DecodingSettings
from regard.registry import EXPORTERS
from regard.run_dir import RunDir
from regard.text import train

LINES = texts(ENGLISH, 20, 8)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run and the folder it was exported to; created once."""
    known: dict[str, tuple[RunDir, Path]] = {}

    def get(name: str) -> tuple[RunDir, Path]:
        if name not in known:
            path = tmp_path_factory.mktemp("exports")
            run = own_run(path / "run", OUR_RUNS[name], texts(ENGLISH, 10))
            known[name] = run, export_run(run, path / "out")
        return known[name]

    return get


def opened(folder: Path) -> tuple[Any, Any]:
    (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    return transformers.AutoTokenizer.from_pretrained(folder), getattr(transformers, kind).from_pretrained(folder)


@pytest.mark.parametrize("name", ["gpt", "gpt untied", "gpt with rotary positions"])
def test_an_exported_gpt_generates_like_regard(exported: Any, name: str) -> None:
    run, folder = exported(name)
    tokenizer, model = opened(folder)
    ours = load(run.path, device="cpu")
    for line in LINES:
        inputs = tokenizer(line, return_tensors="pt")
        assert set(inputs) == {"input_ids", "attention_mask"}
        out = model.generate(**inputs, do_sample=False, max_new_tokens=10)[0, inputs["input_ids"].shape[1] :]
        wanted = ours.generate(line, tokens=10, method="beam", beam=1).text
        assert tokenizer.decode(out, skip_special_tokens=True) == wanted


@pytest.mark.parametrize("name", ["transformer", "transformer untied", "transformer with norms first"])
def test_an_exported_transformer_translates_like_regard(exported: Any, name: str) -> None:
    run, folder = exported(name)
    tokenizer, model = opened(folder)
    ours = load(run.path, device="cpu").translator(beam=1, max_ratio=1e-9, max_extra=12)
    for line, wanted in zip(LINES, ours(LINES), strict=True):
        inputs = tokenizer(line, return_tensors="pt")
        out = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=12, forced_eos_token_id=None)[0]
        assert tokenizer.decode(out, skip_special_tokens=True) == wanted.texts[0]


@pytest.mark.parametrize("name", ["bert", "bert of words"])
def test_an_exported_bert_fills_masks_like_regard(exported: Any, name: str) -> None:
    run, folder = exported(name)
    tokenizer, model = opened(folder)
    assert (tokenizer.cls_token, tokenizer.sep_token, tokenizer.mask_token) == ("<s>", "</s>", "<mask>")
    filler = load(run.path, device="cpu").filler()
    for line in ("the <mask> sat on the mat", "<mask> dog saw the <mask>", "the cat <mask>"):
        inputs = tokenizer(line, return_tensors="pt")
        (filled,) = filler([line.replace("<mask>", "[MASK]")], top=1)
        masks = inputs["input_ids"][0] == tokenizer.mask_token_id
        assert masks.sum() == len(filled.guesses)
        logits = model(**inputs).logits[0][masks]
        logits[:, [*tokenizer.all_special_ids, *run.tokenizers[0].forbidden()]] = -torch.inf
        guesses = [run.tokenizers[0].token_texts([best])[0] for best in logits.argmax(-1).tolist()]
        assert guesses == [guess[0].text for guess in filled.guesses]


@pytest.mark.parametrize("name", ["gpt", "transformer"])
def test_text_that_spells_a_special_token_stays_text(exported: Any, name: str) -> None:
    run, folder = exported(name)
    tokenizer, text = transformers.AutoTokenizer.from_pretrained(folder), "the </s> cat <s>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == run.tokenizers[0].encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("name", ["transformer", "transformer with norms first"])
def test_the_length_penalty_is_that_of_sentences_of_15_tokens(exported: Any, name: str, tmp_path: Path) -> None:
    run, folder = exported(name)
    settings = json.loads((folder / "generation_config.json").read_text())
    alpha, power = run.recipe.decoding.length_penalty, settings["length_penalty"]
    ours, theirs = ((20.001 / 6) ** alpha / (20 / 6) ** alpha, 15.001**power / 15**power)
    assert alpha > 0 and abs(ours - theirs) < 1e-9, "one token more lengthens both equally"
    again = import_folder(folder, tmp_path / "again").recipe.decoding
    assert abs(again.length_penalty - alpha) < 1e-6 and again.beam == run.recipe.decoding.beam


def test_generation_settings_of_a_decoder() -> None:
    beam = generation_settings(DecodingSettings(beam=3, length_penalty=2.0), 1, [2])
    assert beam == {"bos_token_id": 1, "eos_token_id": 2, "num_beams": 3, "length_penalty": 1.5}
    sample = DecodingSettings(method="sample", temperature=0.5, top_k=9, top_p=0.8, repetition_penalty=1.25)
    assert generation_settings(sample, 1, [2, 7]) == {
        **{"bos_token_id": 1, "eos_token_id": [2, 7], "do_sample": True, "temperature": 0.5, "top_k": 9, "top_p": 0.8},
        "repetition_penalty": 1.25,
    }


@pytest.mark.parametrize("name", OUR_RUNS)
def test_an_export_can_be_imported_again(exported: Any, name: str, tmp_path: Path) -> None:
    run, folder = exported(name)
    again = import_folder(folder, tmp_path / "again")
    assert largest_difference(again, folder) <= BOUND
    (tokenizer, _), text = again.tokenizers, "the cat, ☃"
    assert [ids_of(tokenizer)[one] for one in tokenizer.encode(text)] == run.tokenizers[0].encode(text)
    before, after = (load_file(path / "model.safetensors") for path in (folder, export_run(again, tmp_path / "out")))
    assert after.keys() - before.keys() <= {"final_logits_bias"}
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)


def test_all_unsupported_settings_are_named_at_once(tmp_path: Path) -> None:
    changes = {"norm": "rms", "qk_norm": True, "activation": "gated", "se_dim": 4}
    run = own_run(
        tmp_path / "run", OUR_RUNS["transformer"] | {"model": OUR_RUNS["transformer"]["model"] | changes}, LINES
    )
    with pytest.raises(UserError) as caught:
        export_run(run, tmp_path / "out")
    assert all(f"model.{setting} = " in str(caught.value) for setting in changes)


# -- checks ------------------------------------------------------------------------------------------------------------


def test_a_check_passes_all_outputs_of_the_tokenizer_to_the_model(exported: Any, tmp_path: Path) -> None:
    """GPT-2 looks up token types as words, and by default the tokenizer of transformers 4 returns them."""
    run, _ = exported("gpt")
    folder = export_run(run, tmp_path / "out")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    names = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_input_names": names}))
    assert largest_difference(run, folder) > BOUND


def test_a_check_compares_tokens(exported: Any, tmp_path: Path) -> None:
    run, _ = exported("gpt")
    folder = export_run(run, tmp_path / "out")
    whole = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(whole | {"normalizer": {"type": "Prepend", "prepend": "x"}}))
    with pytest.raises(UserError, match="into different tokens"):
        largest_difference(run, folder)


def test_half_precision_is_checked_in_float32_and_a_failure_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "theirs", tmp_path / "run"
    marian_folder(folder).half().save_pretrained(folder)
    assert run_command(["import", str(folder), "--out", str(run), "--check", "-q"], debug=True) == 0
    out = tmp_path / "out"
    stored = load_file(run / "model.safetensors")
    assert stored["encoder.0.feed_forward.w_in.weight"].dtype == torch.float16, "half the space"
    assert {parameter.dtype for parameter in RunDir(run).model().parameters()} == {torch.float32}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    capsys.readouterr()
    assert run_command(["import", str(folder), "--out", str(out), "--check", "-q"], debug=False) == 2
    assert "architectures names 'GPT2LMHeadModel', not a class" in capsys.readouterr().err and not out.exists()


def test_a_failed_check_of_an_export_leaves_no_folder(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.interop.check.TOLERANCE", -1.0)
    command = ["export", str(exported("gpt")[0].path), "--to", "huggingface", "--out", str(tmp_path / "out"), "--check"]
    assert run_command(command, debug=False) == 2
    assert "differ by up to" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_registered_format_can_be_written_and_others_are_refused(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(run: RunDir, path: Path) -> Path:
        path.write_text(run.recipe.model.family)
        return path

    command = ["export", str(exported("gpt")[0].path), "--out", str(tmp_path / "out"), "--to", "name"]
    assert run_command(command, debug=False) == 2
    assert "--to name: must be huggingface" in capsys.readouterr().err
    monkeypatch.setitem(EXPORTERS._entries, "name", write)
    assert run_command([*command, "--check"], debug=False) == 2
    assert "--check compares with transformers" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert run_command(command, debug=False) == 0 and (tmp_path / "out").read_text() == "gpt"


# -- small ones --------------------------------------------------------------------------------------------------------


def test_the_command_that_converts_a_pickle_works_as_printed(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    model = gpt2_folder(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError) as caught:
        import_folder(folder, tmp_path / "run")
    printed = re.search(r"python -c .*\)'", str(caught.value))
    assert printed
    exec(shlex.split(printed[0])[2])
    assert largest_difference(import_folder(folder, tmp_path / "run"), folder) <= BOUND


def test_words_refuse_a_lone_surrogate() -> None:
    with pytest.raises(UserError, match="not valid Unicode"):
        train(["the cat"], "word", 260).encode("the \ud800 cat")


def test_tensors_that_are_not_floats_are_refused(exported: Any, tmp_path: Path) -> None:
    folder = export_run(exported("gpt")[0], tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.ln_f.bias"] = tensors["transformer.ln_f.bias"].int()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"transformer\.ln_f\.bias has type I32"):
        import_folder(folder, tmp_path / "run")
