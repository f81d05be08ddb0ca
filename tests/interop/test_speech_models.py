"""Imported Whisper models hear, compute and write what they do in transformers."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import locally_trained as trained
import numpy as np
import pytest
import torch
from imported import imported_cases
from safetensors.torch import load_file
from test_huggingface import spread, transformers
from tokenizers import AddedToken

from regard import tasks
from regard.cli import run as run_command
from regard.data.audio import Samples, cut_at_pauses
from regard.errors import UserError
from regard.interop import export_run, import_folder
from regard.interop.check import largest_difference
from regard.interop.exported import verify
from regard.interop.vocabularies import ids_of
from regard.runs import LoadedRun
from regard.tasks.speech import SpeechTask
from regard.text import EOS

BOUND = 1e-4  # of logits, in float32
FEATURE_BOUND = 1e-5  # of log-mel features
RATE = 16000
LANGUAGES = ["en", "de", "haw"]
SPECIALS = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>"]
SPECIALS += ["<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
TIMES = [f"<|{0.02 * number:.2f}|>" for number in range(8)]
SMALL = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
SMALL |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48, max_target_positions=40, max_source_positions=100)


@dataclass(frozen=True)
class Case:
    """`changes` to config.json, and to generation_config.json; the features have `seconds`."""

    changes: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    seconds: int = 2
    english: bool = False
    everyday: bool = True


CASES = {
    "whisper": Case(),
    "tiny": Case(
        {"max_source_positions": 1500, "d_model": 48, "max_target_positions": 448},
        {"forced_decoder_ids": [[1, None], [2, "<|transcribe|>"]]},  # as published: the language is detected
        30,
    ),
    "large-v3": Case(
        {"num_mel_bins": 128, "max_source_positions": 1500, "d_model": 40, "encoder_layers": 3, "decoder_layers": 1},
        {"language": "<|en|>", "task": "transcribe"},
        30,
        everyday=False,
    ),
    "base.en": Case(generation={"is_multilingual": False}, english=True),
    "untied, relu, German to English": Case(
        {"tie_word_embeddings": False, "activation_function": "relu"}, {"language": "de", "task": "translate"}
    ),
}
MARKED_CASES = [pytest.param(name, marks=[] if case.everyday else pytest.mark.slow) for name, case in CASES.items()]


def whisper_tokenizer(path: Path) -> dict[str, int]:
    tokenizer = trained.byte_level([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in TIMES])
    ids = [(name, tokenizer.token_to_id(name)) for name in SPECIALS]
    template = "<|startoftranscript|> <|notimestamps|> $A <|endoftext|>"
    tokenizer.post_processor = trained.processors.TemplateProcessing(template, special_tokens=ids)
    trained.save(tokenizer, path, **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"))
    return tokenizer.get_vocab()


def whisper_folder(path: Path, name: str = "whisper") -> Any:
    case, vocabulary = CASES[name], whisper_tokenizer(path)
    end, start = vocabulary["<|endoftext|>"], vocabulary["<|startoftranscript|>"]
    roles = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), end) | {"decoder_start_token_id": start}
    config = transformers.WhisperConfig(**{**SMALL, "vocab_size": len(vocabulary), **roles, **case.changes})
    model = spread(transformers.WhisperForConditionalGeneration(config), 3)
    torch.nn.init.normal_(
        model.model.decoder.embed_positions.weight, std=0.5, generator=torch.Generator().manual_seed(4)
    )
    multilingual = {
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": vocabulary[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {task: vocabulary[f"<|{task}|>"] for task in ("transcribe", "translate")},
    }
    given = {
        "suppress_tokens": [*range(0, 300, 5), *range(start, end + 11)],  # so many that they matter
        "begin_suppress_tokens": [vocabulary["Ġ"], end, *range(1, 400, 2)],
        "no_timestamps_token_id": vocabulary["<|notimestamps|>"],
        **({} if case.english else multilingual),
        **case.generation,
    }
    if "forced_decoder_ids" in given:
        given["forced_decoder_ids"] = [[place, vocabulary.get(name)] for place, name in given["forced_decoder_ids"]]
    model.generation_config = transformers.GenerationConfig(**roles, **given)
    model.save_pretrained(path)
    features = {"feature_size": config.num_mel_bins, "chunk_length": case.seconds}
    transformers.WhisperFeatureExtractor(**features).save_pretrained(path)
    return transformers.WhisperForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()


made = imported_cases(lambda name, path: whisper_folder(path, name))


def sounds(seconds: float, seed: int = 0) -> list[Samples]:
    """Chords that change, with some noise, of several lengths up to so many seconds."""
    random, found = np.random.default_rng(seed), []
    for share in (0.07, 0.5, 1.0):
        time = np.arange(round(share * seconds * RATE)) / RATE
        pitch = 200 + 1500 * random.random(8)[(time * 8 / seconds).astype(int).clip(max=7)]
        sound = 0.3 * np.sin(2 * np.pi * pitch * time) + 0.01 * random.standard_normal(len(time))
        found.append(sound.astype(np.float32))
    return found


@pytest.mark.parametrize("name", MARKED_CASES)
def test_an_imported_whisper_computes_the_same_logits(made: Any, name: str) -> None:
    _, folder, run = made(name)
    found = largest_difference(run, folder)
    print(f"{name}: the largest difference of the logits is {found:.1e}")
    assert found <= BOUND


@pytest.mark.parametrize("name", MARKED_CASES)
def test_sounds_become_the_features_of_transformers(made: Any, name: str) -> None:
    _, folder, run = made(name)
    task, extractor = tasks.of(run.recipe), transformers.AutoFeatureExtractor.from_pretrained(folder)
    assert isinstance(task, SpeechTask)
    for sound in sounds(CASES[name].seconds):
        expected = extractor(sound, sampling_rate=RATE, return_tensors="np")["input_features"][0].T
        found = task.features(sound)
        assert found.shape == expected.shape == (100 * CASES[name].seconds, run.recipe.model.mels)
        np.testing.assert_allclose(found, expected, rtol=0, atol=FEATURE_BOUND)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", MARKED_CASES)
def test_greedy_and_beam_search_give_transformers_tokens(made: Any, name: str, beams: int) -> None:
    model, folder, run = made(name)
    tokenizer, extractor = run.tokenizers[1], transformers.AutoFeatureExtractor.from_pretrained(folder)
    ids, loaded = ids_of(tokenizer), LoadedRun.load(run.path, device="cpu")
    inputs = sounds(CASES[name].seconds, seed=5)
    prompt = 1 if CASES[name].english else 3
    found = loaded.written("transcribe", inputs, beam=beams, length_penalty=0.0, max_ratio=1e-9, max_extra=12 + prompt)
    suppressed = {ids[token] for token in tokenizer.forbidden()} - {ids[EOS], -1}
    suppressed |= {*model.generation_config.suppress_tokens}
    for sound, answer in zip(inputs, found, strict=True):
        features = extractor(sound, sampling_rate=RATE, return_tensors="pt")["input_features"]
        (out,) = model.generate(
            features,
            max_new_tokens=12,
            num_beams=beams,
            do_sample=False,
            length_penalty=0.0,
            early_stopping=False,
            suppress_tokens=sorted(suppressed),
            return_timestamps=False,
            **({"task": "transcribe"} if name == "whisper" else {}),  # else its prompt has a language, but no task
        ).tolist()
        ours = [ids[token] for token in answer.hypotheses[0].tokens]
        out = [token for token in out if token != ids[EOS]]
        begin = model.config.decoder_start_token_id
        assert ours[prompt:] == (out[prompt + 1 :] if out[0] == begin else out) and len(ours) > prompt
        language = loaded.task.language_of(tokenizer, answer)
        assert language in ([None] if CASES[name].english else LANGUAGES)


def test_shards_in_half_precision_are_imported(made: Any, tmp_path: Path) -> None:
    model, folder, whole = made("whisper")
    theirs = tmp_path / "theirs"
    copy.deepcopy(model).half().save_pretrained(theirs, max_shard_size="40KB")
    for file in folder.iterdir():
        if not file.name.startswith(("model", "config")):
            (theirs / file.name).write_bytes(file.read_bytes())
    run = import_folder(theirs, tmp_path / "run")
    assert len(list(theirs.glob("model-*.safetensors"))) > 1
    assert {tensor.dtype for tensor in load_file(run.best).values()} == {torch.float16}
    assert largest_difference(run, theirs) <= BOUND and run.recipe.model == whole.recipe.model


def test_tokens_are_those_of_transformers(made: Any) -> None:
    """Except where a text spells a special token, which stays text here."""
    _, folder, run = made("whisper")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), run.tokenizers[1]
    for text in trained.strings(2000, 7):
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        tokens = ours.encode(text)
        assert [ids_of(ours)[token] for token in tokens] == expected
        assert ours.decode(tokens) == theirs.decode(expected, clean_up_tokenization_spaces=False)
    for spelled in ("<|en|>", "<|0.02|>", "<|notimestamps|>"):
        assert spelled in ours.tags and ours.decode(ours.encode(spelled)) == spelled
        assert ours.tag(spelled) not in ours.encode(spelled)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of sound files: of 1 second, and of 5, longer than the model's window."""
    soundfile = pytest.importorskip("soundfile", reason="needs regard[audio]")
    path = tmp_path_factory.mktemp("recordings")
    lines = ["file\ttext\tsplit"]
    for name, seconds in (("short", 1), ("long", 5)):
        soundfile.write(path / f"{name}.wav", sounds(seconds, seed=seconds)[-1], RATE)
        lines += [f"{name}.wav\tthe cat sat\ttest", "short.wav\tthe dog saw\ttrain", "short.wav\tthe house\tvalid"]
    (path / "list.tsv").write_text("\n".join(lines) + "\n")
    return path


def test_all_verbs_take_an_imported_whisper(
    made: Any, recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, run = made("whisper")
    path, tuned, short = str(run.path), str(tmp_path / "tuned"), str(recordings / "short.wav")
    changes = [
        f"data.speech={recordings / 'list.tsv'}",
        "data.language=de",
        "training.steps=2",
        "training.save_every=2",
    ]
    changes += ["training.validate_every=2", "training.average=0", "training.batch_tokens=32"]
    tuning = [word for setting in changes for word in ("--set", setting)]
    for command in (
        ["import", str(folder), "--out", str(tmp_path / "checked"), "--check"],
        ["transcribe", path, str(recordings), "--device", "cpu"],
        ["transcribe", path, short, "--language", "haw", "--task", "translate", "--beam", "2", "--format", "jsonl"],
        ["draw", path, short, "--out", str(tmp_path / "drawn.svg")],
        ["train", str(run.path / "recipe.toml"), "--from", path, "--out", tuned, *tuning],
        ["evaluate", tuned, "--device", "cpu"],
        ["export", tuned, "--to", "huggingface", "--out", str(tmp_path / "exported"), "--check"],
    ):
        assert run_command(command, debug=True) == 0, command
    said = capsys.readouterr().out.splitlines()
    assert "largest difference of the logits" in said[0]
    assert [line.split("\t")[0] for line in said[1:3]] == [
        str(recordings / f"{name}.wav") for name in ("long", "short")
    ]
    assert json.loads(said[3])["language"] == "haw"
    assert any(line.startswith("WER") for line in said[4:])
    assert (tmp_path / "drawn.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("name", MARKED_CASES)
def test_what_is_imported_is_exported_unchanged(made: Any, name: str, tmp_path: Path) -> None:
    model, folder, run = made(name)
    back = export_run(run, tmp_path / "back")
    before, after = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again = import_folder(back, tmp_path / "again").recipe
    assert again.model == run.recipe.model and again.data == run.recipe.data
    assert again.decoding.begin_suppress_ids == run.recipe.decoding.begin_suppress_ids
    assert again.decoding.suppress_ids == run.recipe.decoding.suppress_ids
    (found,) = verify(run, back, "huggingface") or []
    assert found.equal == found.texts == 3 and found.difference is not None and found.difference <= BOUND
    processor = transformers.AutoProcessor.from_pretrained(back)
    features = processor(sounds(1)[0], sampling_rate=RATE, return_tensors="pt")["input_features"]
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(back).eval()
    options = dict(max_new_tokens=8, num_beams=1, do_sample=False, suppress_tokens=None)
    task = {"task": "transcribe"} if name == "whisper" else {}
    assert theirs.generate(features, **options).equal(model.generate(features, **options, **task))
    tokens = [ids_of(run.tokenizers[1])[token] for token in run.tokenizers[1].encode(" the cat sat")]
    assert processor.tokenizer(" the cat sat", add_special_tokens=False)["input_ids"] == tokens
    assert processor.batch_decode([tokens]) == [" the cat sat"]


def test_a_long_recording_is_the_texts_of_its_parts(made: Any) -> None:
    """Silence between two sounds: it is cut there, and each part is written as it is alone."""
    run = made("whisper")[2]
    loaded = LoadedRun.load(run.path, device="cpu")
    task, first, second = loaded.task, sounds(2, 8)[-1][: int(1.7 * RATE)], sounds(1.5, 9)[-1]
    assert isinstance(task, SpeechTask)
    whole = np.concatenate([first, np.zeros(RATE // 2, np.float32), second])
    parts = cut_at_pauses(whole, RATE, 2.0)
    assert np.array_equal(np.concatenate(parts), whole) and len(parts) == 2
    assert not parts[0][len(first) :].any() and not parts[1][: -len(second)].any()
    options = dict(beam=1, max_ratio=1e-9, max_extra=12)
    one, other = loaded.written("transcribe", parts, **options)
    both = loaded.written("transcribe", whole, **options)
    assert both.texts == (f"{one.text} {other.text}",) and both.hypotheses[0].tokens[:3] == one.hypotheses[0].tokens[:3]
    with pytest.raises(UserError, match="nbest must be 1"):
        loaded.written("transcribe", whole, nbest=2)
    with pytest.raises(UserError, match=r"3\.7 seconds long, and the model reads at most 2: cut it into parts"):
        task.inspect(whole)


def test_what_an_imported_whisper_cannot_do_is_one_line(
    made: Any, recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, english, short = str(made("whisper")[2].path), str(made("base.en")[2].path), str(recordings / "short.wav")
    for command, complaint in (
        (["transcribe", path, short, "--language", "fr"], "the model knows no language 'fr'; it knows en, de, haw"),
        (["transcribe", english, short, "--language", "en"], "this model takes no language and no task"),
        (["transcribe", english, short, "--task", "translate"], "this model takes no language and no task"),
        (["transcribe", path, short, "--task", "summarize"], "Invalid value for '--task'"),
        (["export", path, "--to", "onnx", "--out", "nowhere"], "the speech family cannot be exported to ONNX"),
        (["export", path, "--to", "ctranslate2", "--out", "nowhere"], "the speech family has no counterpart"),
        (["evaluate", path], "its weights were imported): set data.speech"),
        (["draw", path, short, "--target", "the cat"], "data.language is not set"),
        (["draw", path, str(recordings / "long.wav")], "5.0 seconds long, and the model reads at most 2"),
    ):
        assert run_command(command, debug=False) == 2, command
        said = capsys.readouterr().err
        assert complaint in said and said.count("\n") == 1, said


@pytest.mark.parametrize(
    ("file", "fields", "complaint"),
    [
        ("config.json", {"architectures": ["WhisperForAudioClassification"]}, "architectures = 'WhisperForAudioClass"),
        ("config.json", {"architectures": ["WhisperModel"]}, "architectures = 'WhisperModel' has no counterpart"),
        ("config.json", {"activation_function": "quick_gelu"}, "activation_function = 'quick_gelu' has no counterpart"),
        ("config.json", {"decoder_ffn_dim": 64}, "decoder_ffn_dim = 64 must equal encoder_ffn_dim = 48"),
        ("config.json", {"decoder_attention_heads": 2}, "decoder_attention_heads = 2 must equal"),
        ("config.json", {"decoder_start_token_id": 10**9}, "decoder_start_token_id is missing, or outside"),
        ("config.json", {"quantization_config": {}}, "quantization_config"),
        ("config.json", {"num_mel_bins": 64}, "feature_size = 80, but config.json has num_mel_bins = 64"),
        (
            "preprocessor_config.json",
            {"feature_extractor_type": "ClapFeatureExtractor"},
            "feature_extractor_type = 'Cl",
        ),
        (
            "preprocessor_config.json",
            {"sampling_rate": 8000},
            "sampling_rate = 8000 has no counterpart here (only 16000",
        ),
        ("preprocessor_config.json", {"n_fft": 512}, "n_fft = 512 has no counterpart"),
        ("preprocessor_config.json", {"hop_length": "160"}, "hop_length = '160' has no counterpart"),
        ("preprocessor_config.json", {"dither": 0.1}, "dither = 0.1 has no counterpart"),
        ("preprocessor_config.json", {"do_normalize": True}, "do_normalize = True has no counterpart"),
        (
            "preprocessor_config.json",
            {"chunk_length": 30},
            "chunk_length = 30, but config.json has max_source_positions",
        ),
        ("generation_config.json", {"return_timestamps": True}, "return_timestamps = true has no counterpart"),
        ("generation_config.json", {"suppress_tokens": [1, -1]}, "suppress_tokens must list ids of the"),
        ("generation_config.json", {"suppress_tokens": [420]}, "suppress_tokens has the token that ends a text"),
        ("generation_config.json", {"begin_suppress_tokens": "all"}, "begin_suppress_tokens must be a list"),
        ("generation_config.json", {"language": "german"}, "language = 'german' is not the code of a language"),
        ("generation_config.json", {"task": "summarize"}, "task = 'summarize' has no counterpart"),
        (
            "generation_config.json",
            {"forced_decoder_ids": [[1, 5]]},
            "forced_decoder_ids has 5, which is not a special",
        ),
        ("generation_config.json", {"forced_decoder_ids": [7]}, "forced_decoder_ids must list pairs"),
        (
            "generation_config.json",
            {"forced_decoder_ids": [[1, 10**12]]},
            "forced_decoder_ids has 1000000000000, which",
        ),
    ],
)
def test_settings_without_a_counterpart_are_named(
    made: Any, tmp_path: Path, file: str, fields: dict[str, Any], complaint: str
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for one in made("whisper")[1].iterdir():
        (folder / one.name).write_bytes(one.read_bytes())
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | fields))
    with pytest.raises(UserError) as caught:
        import_folder(folder, tmp_path / "run")
    assert complaint in str(caught.value) and "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert not (tmp_path / "run").exists()
