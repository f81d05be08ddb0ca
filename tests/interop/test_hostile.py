"""Malicious folders are refused in one line that names file and field, before anything is allocated."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save_file
from test_decoders import CASES
from test_decoders import folder_of as decoder_folder
from test_huggingface import bert_folder, gpt2_folder, marian_folder
from test_image_models import vit_folder
from test_speech_models import whisper_folder
from test_translators import CASES as TRANSLATORS
from test_translators import folder_of as translator_folder

from regard.errors import UserError
from regard.interop import import_folder

MAKERS: dict[str, Callable[[Path], Any]] = {
    "gpt2": gpt2_folder,
    "bert": lambda path: bert_folder(path, "BertForSequenceClassification", num_labels=3),
    "marian": marian_folder,
    "llama": lambda path: decoder_folder(CASES["llama 2"], path),
    "t5": lambda path: translator_folder(TRANSLATORS["t5 v1.1"], path),
    "vit": vit_folder,
    "whisper": whisper_folder,
}
ABSURD = 10**12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A valid folder of each model type."""
    root = tmp_path_factory.mktemp("hostile")
    for name, make in MAKERS.items():
        make(root / name)
    return {name: root / name for name in MAKERS}


@pytest.fixture
def copied(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies a valid folder, to be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(made[name], tmp_path / f"{name} {len(list(tmp_path.iterdir()))}"))

    return copy


def refused(folder: Path) -> str:
    out = folder.parent / "run"
    with pytest.raises(UserError) as caught:
        import_folder(folder, out)
    assert not out.exists(), "nothing is left behind"
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and len(message) < 1000
    return message


def change(folder: Path, file: str, **fields: Any) -> None:
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]),
        ("t5", ["num_layers", "num_decoder_layers", "d_model", "d_kv", "num_heads", "d_ff", "vocab_size"]),
        ("t5", ["relative_attention_num_buckets", "relative_attention_max_distance"]),
        ("vit", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"]),
        ("vit", ["image_size", "patch_size", "num_channels"]),
        ("whisper", ["encoder_layers", "decoder_layers", "d_model", "encoder_attention_heads", "encoder_ffn_dim"]),
        ("whisper", ["max_source_positions", "max_target_positions", "vocab_size", "num_mel_bins"]),
        ("gpt2", ["n_layer", "n_embd", "n_head", "n_inner", "n_positions", "vocab_size"]),
        (
            "bert",
            ["num_hidden_layers", "hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size"],
        ),
        (
            "marian",
            [
                "encoder_layers",
                "decoder_layers",
                "d_model",
                "max_position_embeddings",
                "vocab_size",
                "decoder_vocab_size",
            ],
        ),
    ],
)
def test_sizes_are_compared_with_the_weights_before_allocation(
    copied: Callable[[str], Path], name: str, fields: list[str]
) -> None:
    folder = copied(name)
    sound = (folder / "config.json").read_text()
    for field in fields:
        for value in (ABSURD, 10**30, -3, 2.5, "9", True, [], {"a": 1}):
            (folder / "config.json").write_text(sound)
            change(folder, "config.json", **{field: value})
            assert field in refused(folder), (field, value)


def test_labels_are_compared_with_the_weights(copied: Callable[[str], Path]) -> None:
    folder = copied("bert")
    for fields, complaint in (
        ({"num_labels": ABSURD, "id2label": None}, f"num_labels = {ABSURD} does not fit a model of"),
        (
            {"num_labels": 1000, "id2label": None},
            "num_labels has 1000 classes, but classifier.weight has shape (3, 32)",
        ),
        ({"id2label": {"0": "a", "1": "b", "10000000": "c"}}, "id2label must number its classes from 0 to 2"),
        ({"id2label": {"0": "a", "1": "b", "2": ["c"]}}, "id2label: 2 must be a string, not list"),
        ({"id2label": [1, 2, 3]}, "id2label must be an object, not list"),
        ({"id2label": {"0": "a", "1": "b", "2": "a"}}, "two classes have the same name"),
    ):
        change(folder, "config.json", **fields)
        assert complaint in refused(folder)


def test_json_that_is_nested_too_deeply_or_not_an_object_is_refused(copied: Callable[[str], Path]) -> None:
    for name, file in (("gpt2", "config.json"), ("gpt2", "vocab.json"), ("bert", "tokenizer_config.json")):
        folder = copied(name)
        for content, complaint in (
            ('{"a":' * 100_000 + "1" + "}" * 100_000, "is damaged: its values are nested too deeply"),
            ("[" * 100_000, "is damaged: its values are nested too deeply"),
            ("[1, 2]", "it is not a JSON object"),
            ('{"a": ' + "9" * 10_000 + "}", "is damaged"),
            ('{"a": "\\ud800"}', "text that is not valid Unicode"),
            ("", "is damaged"),
        ):
            (folder / file).write_text(content)
            assert complaint in refused(folder) and file in refused(folder)
        (folder / file).write_bytes(b'{"a": "\xff"}')
        assert "it is not UTF-8 text" in refused(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "vocab.json", "tokenizer_config.json"])
def test_anything_but_a_regular_file_is_refused_at_once(copied: Callable[[str], Path], file: str) -> None:
    folder = copied("gpt2")
    path = folder / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert f"{path} is not a regular file" in refused(folder)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert f"{path} is not a regular file" in refused(folder)


def test_a_file_above_the_limit_is_refused(copied: Callable[[str], Path]) -> None:
    for file in ("config.json", "vocab.json"):
        folder = copied("gpt2")
        with open(folder / file, "wb") as handle:
            handle.truncate(1 << 40)
        assert f"{file} is larger than 16 MiB" in refused(folder)


def test_an_index_may_name_files_of_its_own_folder_only(copied: Callable[[str], Path]) -> None:
    folder = copied("gpt2")
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    shutil.copy(folder / "model.safetensors", folder / "twice.safetensors")
    for files, complaint in (
        (["../outside.safetensors"], "names '../outside.safetensors', not a safetensors file of this folder"),
        ([str(folder.parent / "outside.safetensors")], "not a safetensors file of this folder"),
        (["config.json"], "names 'config.json', not a safetensors file of this folder"),
        (["missing.safetensors"], "names 'missing.safetensors', which does not exist"),
        (["pipe.safetensors"], "pipe.safetensors is not a regular file"),
        (["model.safetensors", "twice.safetensors"], "both contain"),
        ([7], "weight_map: t0 must be a string, not 7"),
        ([[1]], "weight_map: t0 must be a string, not list"),
    ):
        listed = {f"t{number}": file for number, file in enumerate(files)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
        assert complaint in refused(folder)


def test_a_header_is_bounded_and_has_the_right_shapes(copied: Callable[[str], Path]) -> None:
    folder = copied("gpt2")
    path = folder / "model.safetensors"
    sound = path.read_bytes()
    tensors = load(sound)
    for content in (b"", b"\x01", (10**15).to_bytes(8, "little") + sound[8:], sound[:-40], b"PK\x03\x04" * 400):
        path.write_bytes(content)
        assert "model.safetensors is damaged or not a safetensors file" in refused(folder)
    for name in ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight"):
        save_file(tensors | {name: tensors[name].t().contiguous()}, path)
        assert name in refused(folder)
        save_file(tensors | {name: tensors[name].flatten()[:0]}, path)
        assert name in refused(folder)


def test_tensors_and_settings_of_t5_are_compared(copied: Callable[[str], Path]) -> None:
    folder = copied("t5")
    path, sound = folder / "model.safetensors", (folder / "model.safetensors").read_bytes()
    tensors = load(sound)
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for name in (bias, "decoder.final_layer_norm.weight", "lm_head.weight"):
        if name != "lm_head.weight":  # without one, embeddings are tied, as in transformers 5
            save_file({other: tensor for other, tensor in tensors.items() if other != name}, path)
            assert "lacks tensor" in refused(folder)
        save_file(tensors | {name: tensors[name].flatten()[:-1].clone()}, path)
        assert name in refused(folder)
    save_file(
        tensors | {"encoder.block.9.layer.0.layer_norm.weight": tensors["encoder.final_layer_norm.weight"].clone()},
        path,
    )
    assert "has an unknown tensor" in refused(folder)
    path.write_bytes(sound)
    for fields, complaint in (
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj = 'gated-tanh' has no counterpart"),
        ({"feed_forward_proj": ["relu"]}, "feed_forward_proj must be a string"),
        ({"architectures": ["T5ForSequenceClassification"]}, "architectures = 'T5ForSequenceClassification'"),
        ({"decoder_start_token_id": None, "pad_token_id": None}, "decoder_start_token_id is missing"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder = False has no counterpart"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ):
        sound_config = (folder / "config.json").read_text()
        change(folder, "config.json", **fields)
        assert complaint in refused(folder), fields
        (folder / "config.json").write_text(sound_config)
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused(folder)


def test_tensors_of_vit_are_compared(copied: Callable[[str], Path]) -> None:
    folder = copied("vit")
    path, sound = folder / "model.safetensors", (folder / "model.safetensors").read_bytes()
    tensors = load(sound)
    for name in ("vit.embeddings.position_embeddings", "vit.embeddings.cls_token", "classifier.weight"):
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, path)
        assert "lacks tensor" in refused(folder)
        for damaged in (tensors[name].transpose(0, -1).contiguous(), tensors[name].flatten()[:-1].clone()):
            save_file(tensors | {name: damaged}, path)
            if damaged.shape != tensors[name].shape:
                assert name in refused(folder)
    projection = "vit.embeddings.patch_embeddings.projection.weight"  # as many numbers in another shape
    save_file(tensors | {projection: tensors[projection].flatten(1)}, path)
    assert projection in refused(folder)
    save_file(tensors | {"vit.encoder.layer.9.layernorm_before.weight": tensors["vit.layernorm.weight"].clone()}, path)
    assert "has an unknown tensor" in refused(folder)
    path.write_bytes(sound)
    for content, complaint in (
        ('{"size": ' + "9" * 400 + "}", "size must be that of config.json"),
        ('{"image_mean": [NaN, 0, 0], "size": 16}', "image_mean must have numbers"),
        ('{"image_std": [Infinity, 1, 1], "size": 16}', "image_std must have numbers"),
        ('{"rescale_factor": 1e-320, "size": 16}', "pixel_mean"),
        ("[]", "it is not a JSON object"),
    ):
        (folder / "preprocessor_config.json").write_text(content)
        assert complaint in refused(folder), content
    (folder / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json" in refused(folder)


def test_tensors_of_whisper_are_compared(copied: Callable[[str], Path]) -> None:
    folder = copied("whisper")
    path, sound = folder / "model.safetensors", (folder / "model.safetensors").read_bytes()
    tensors = load(sound)
    block = "model.decoder.layers.1"
    for name in (
        "model.encoder.conv1.weight",
        f"{block}.encoder_attn.v_proj.bias",
        "model.decoder.embed_tokens.weight",
    ):
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, path)
        assert "lacks tensor" in refused(folder) and name in refused(folder)
        save_file(tensors | {name: tensors[name][:-1].clone()}, path)
        assert name in refused(folder)
    for name in (f"{block}.encoder_attn.k_proj.bias", "model.decoder.layers.2.fc1.bias", "projector.weight"):
        save_file(tensors | {name: tensors[f"{block}.encoder_attn.v_proj.bias"].clone()}, path)
        assert f"has an unknown tensor: {name}" in refused(folder)
    path.write_bytes(sound)
    for content, complaint in (
        ('{"chunk_length": ' + "9" * 400 + "}", "chunk_length = 999"),
        ('{"padding_value": NaN, "chunk_length": 2}', "padding_value = nan has no counterpart"),
        ('{"sampling_rate": [16000], "chunk_length": 2}', "sampling_rate = list has no counterpart"),
        ("[]", "it is not a JSON object"),
    ):
        (folder / "preprocessor_config.json").write_text(content)
        assert complaint in refused(folder), content
    (folder / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json" in refused(folder)
    (folder / "processor_config.json").write_text('{"feature_extractor": [2]}')
    assert "feature_extractor must be an object" in refused(folder)


def test_kinds_that_are_not_read_are_refused_with_the_reason(copied: Callable[[str], Path]) -> None:
    for kind, complaint in (
        ("mixtral", "mixtures of experts"),
        ("blip", "model_type = 'blip' has no counterpart here"),
    ):
        folder = copied("llama")
        change(folder, "config.json", model_type=kind)
        assert complaint in refused(folder)


def test_sizes_that_no_tensor_confirms_are_bounded(copied: Callable[[str], Path]) -> None:
    for name, file, field, values in (
        ("llama", "config.json", "max_position_embeddings", (ABSURD, 10**30, -3, 1)),
        ("t5", "config.json", "n_positions", (ABSURD, -3)),
        ("llama", "generation_config.json", "num_beams", (ABSURD, -3)),
        ("t5", "generation_config.json", "num_beams", (ABSURD,)),
        ("whisper", "generation_config.json", "num_beams", (ABSURD, -3)),
        ("whisper", "preprocessor_config.json", "chunk_length", (ABSURD, 10**30, -3, 0)),
        ("whisper", "preprocessor_config.json", "feature_size", (ABSURD, 10**30, -3)),
        ("marian", "generation_config.json", "num_beams", (ABSURD,)),
        ("marian", "generation_config.json", "length_penalty", (-1, float("nan"), float("inf"), "1")),
    ):
        folder = copied(name)
        for value in values:
            change(folder, file, **{field: value})
            assert field in refused(folder) and file in refused(folder)


def test_a_table_with_more_rows_than_a_vocabulary_can_have_is_refused(copied: Callable[[str], Path]) -> None:
    folder, rows = copied("llama"), 1 << 26
    header = {"model.embed_tokens.weight": {"dtype": "F16", "shape": [rows, 1], "data_offsets": [0, 2 * rows]}}
    content = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:  # a sparse file
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + 2 * rows)
    change(folder, "config.json", vocab_size=rows, hidden_size=1, intermediate_size=1, num_hidden_layers=0)
    assert f"vocab_size = {rows} is more than" in refused(folder)


def test_headers_whose_tensors_overlap_or_overflow_are_refused(copied: Callable[[str], Path]) -> None:
    path = copied("gpt2") / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    sound = json.loads(data[8 : 8 + size])
    name, other = "transformer.wte.weight", "transformer.wpe.weight"
    for changes in (
        {name: sound[name] | {"data_offsets": sound[other]["data_offsets"]}},
        {name: sound[name] | {"shape": [2**62, 8]}},
        {name: sound[name] | {"shape": [-1, 8]}},
        {name: sound[name] | {"data_offsets": [-8, 8]}},
        {name: sound[name] | {"data_offsets": [16, 8]}},
        {name: sound[name] | {"dtype": "F4096"}},
        {"x" * 10**6: sound[name]},
    ):
        header = json.dumps(sound | changes).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
        assert "model.safetensors is damaged or not a safetensors file" in refused(path.parent)


def test_numbers_of_rope_that_mean_nothing_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 16, "rope_theta": 1e4}
    for changes, complaint in (
        ({"rope_type": "xpos"}, "rope_type = 'xpos' has no counterpart here"),
        ({"rope_type": ["llama3"]}, "rope_type must be a string"),
        ({"factor": float("nan")}, "factor must be a positive number, not nan"),
        ({"factor": -8.0}, "factor must be a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number, not inf"),
        ({"rope_theta": 0}, "rope_theta must be a positive number"),
        ({"original_max_position_embeddings": 0.5}, "rope_original"),
        ({"low_freq_factor": 4.0, "high_freq_factor": 4.0}, "rope_turns in ascending order"),
    ):
        change(folder, "config.json", rope_parameters=None, rope_theta=None, rope_scaling=llama3 | changes)
        assert complaint in refused(folder), changes
    for settings in ({"temperature": float("nan")}, {"temperature": -1}, {"top_p": 7}, {"top_k": -1}):
        change(folder, "config.json", rope_scaling=None)
        change(folder, "generation_config.json", do_sample=True, **settings)
        assert next(iter(settings)) in refused(folder), settings
        (folder / "generation_config.json").unlink()


def test_a_tokenizer_that_lengthens_texts_without_bound_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    sound = json.loads((folder / "tokenizer.json").read_text())

    def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": content}

    doubled = replace({"String": "a"}, "aa")
    table = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"a" * 5000 + b"\0").decode()
    for normalizer in (
        {"type": "Sequence", "normalizers": [doubled] * 40},
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [doubled] * 20}] * 2},
        {"type": "Sequence", "normalizers": [replace({"Regex": "x*"}, "aaaa")] * 9},
        replace({"String": "a"}, "a" * 10**6),
        {"type": "Prepend", "prepend": "a" * 10**6},
        {"type": "Precompiled", "precompiled_charsmap": table},
    ):
        (folder / "tokenizer.json").write_text(json.dumps(sound | {"normalizer": normalizer}))
        message = refused(folder)
        assert "tokenizer.json" in message and ("normalizer can make a text" in message or "damaged" in message)


def test_a_tokenizer_that_fails_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    sound = json.loads((folder / "tokenizer.json").read_text())
    words = {token["content"]: token["id"] for token in sound["added_tokens"]}
    for changes in (
        {"model": {"type": "WordLevel", "vocab": words, "unk_token": "[GONE]"}},
        {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0]], "unk_id": 7}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}]}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        {"added_tokens": [{"id": 10**20, "content": "x", "special": True}]},
        {"added_tokens": 3},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "//8="}},
    ):
        (folder / "tokenizer.json").write_text(json.dumps(sound | changes))
        assert "tokenizer" in refused(folder), changes


def test_invalid_tokenizer_files_are_named(copied: Callable[[str], Path]) -> None:
    for name, file, fields, complaint in (
        ("gpt2", "vocab.json", {"a": "b"}, "vocab.json: 'a' must have a whole number as its id, not 'b'"),
        ("gpt2", "vocab.json", {"a": -1}, "vocab.json: 'a' must have a whole number as its id, not -1"),
        ("gpt2", "vocab.json", {"a": ABSURD}, "the vocabulary has ids up to"),
        ("gpt2", "added_tokens.json", {"a": [1]}, "added_tokens.json: 'a' must have a whole number"),
        ("gpt2", "tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token must be true or false"),
        ("gpt2", "tokenizer.json", {"added_tokens": {"a": 1}}, "added_tokens must be a list, not dict"),
        ("gpt2", "tokenizer.json", {"added_tokens": [1]}, "added_tokens must list objects, not 1"),
        ("gpt2", "tokenizer.json", {"added_tokens": [{"id": "x", "content": "y"}]}, "a token needs an id"),
        ("gpt2", "tokenizer.json", {"post_processor": [1]}, "post_processor must be an object, not list"),
        ("bert", "tokenizer_config.json", {"do_lower_case": 3}, "do_lower_case must be true or false, not 3"),
        ("bert", "tokenizer_config.json", {"mask_token": "[GONE]"}, "the vocabulary has no [GONE]"),
        ("bert", "config.json", {"architectures": "BertModel"}, "architectures must be a list"),
        ("bert", "config.json", {"architectures": [1, 2]}, "architectures must list one class"),
        ("bert", "config.json", {"layer_norm_eps": "small"}, "layer_norm_eps must be a number"),
        ("marian", "vocab.json", {"a": None}, "vocab.json: 'a' must have a whole number as its id, not None"),
        ("marian", "generation_config.json", {"num_beams": "4"}, "num_beams must be a whole number, not '4'"),
        ("marian", "config.json", {"scale_embedding": "yes"}, "scale_embedding must be true or false, not 'yes'"),
    ):
        folder = copied(name)
        change(folder, file, **fields)
        assert complaint in refused(folder)


def test_damaged_merges_and_models_are_named(copied: Callable[[str], Path]) -> None:
    for merges in ("a", "a b c", "zz qq", "\u4e2d \u6587"):
        folder = copied("gpt2")
        with open(folder / "merges.txt", "a", encoding="utf-8") as file:
            file.write(merges + "\n")
        assert f"the merge {merges!a} makes no token of the vocabulary" in refused(folder)
    folder = copied("gpt2")
    change(folder, "vocab.json", **{"\u4e2d\u6587": 5})
    (folder / "merges.txt").write_text("\u4e2d \u6587\n", encoding="utf-8")
    assert "its tokenizer is damaged" in refused(folder)
    for content in (b"", b"nonsense", bytes(1000)):
        folder = copied("marian")
        (folder / "target.spm").write_bytes(content)
        assert "target.spm: the tokenizer's SentencePiece model is damaged" in refused(folder)


def test_a_name_on_the_hub_is_refused_in_one_line_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from regard.cli import run as run_command

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert run_command(["import", "Helsinki-NLP/opus-mt-en-de", "--out", "run"], debug=False) == 2
    complaint = capsys.readouterr().err
    assert "Helsinki-NLP/opus-mt-en-de is not a folder, and could not be fetched from the hub" in complaint
    assert complaint.count("\n") == 1 and not (tmp_path / "run").exists()
