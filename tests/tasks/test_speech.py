"""Speech recognition from the built-in tones: training, transcribing, scores, pictures, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

import regard
from regard import tasks
from regard.cli import main
from regard.data.speech import Recording
from regard.data.tones import Tones
from regard.decoding import score
from regard.decoding.ctc import greedy, log_probability, prefix_beam_search
from regard.errors import UserError
from regard.models.speech import SpeechModel
from regard.packed import FeatureBatch, PackedFeatures
from regard.recipes import load
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.runs import LoadedRun
from regard.tasks.speech import SpeechTask
from regard.tasks.transcriber import Transcriber
from regard.text import BOS, EOS
from regard.training.setup import train

Capsys = pytest.CaptureFixture[str]
QUICK = ["training.steps=6", "training.validate_every=3", "training.save_every=3", "data.count=40", "training.seed=3"]
QUICK += ["training.validate_lines=10"]
SMALL = ["model.width=16", "model.heads=2", "model.encoder_layers=1", "model.ffn_width=16", "model.mels=12"]


def quick(*changes: str) -> Recipe:
    return load("tones", [*QUICK, *SMALL, *changes])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(quick(), tmp_path_factory.mktemp("tones") / "run", device="cpu", quiet=True)


@pytest.fixture(scope="module")
def loaded(run: RunDir) -> LoadedRun:
    return LoadedRun(run, "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sounds")
    for number, utterance in enumerate(Tones.utterances("test", 3)):
        soundfile.write(path / f"{number}.wav", utterance.recording.samples(8000), 8000, "FLOAT")
    (path / "notes.txt").write_text("not a sound")
    return path


def speech_task(loaded: LoadedRun) -> SpeechTask:
    assert isinstance(loaded.task, SpeechTask)
    return loaded.task


def features(loaded: LoadedRun, count: int = 5) -> list[Any]:
    task = speech_task(loaded)
    return [task.features(u.recording) for u in Tones.utterances("test", count)]


def call(capsys: Capsys, *words: object, status: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    assert ended.value.code == status, printed.err
    return printed.out, printed.err


def frames_of(model: SpeechModel, array: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.ctc_log_probs(*model.encode(PackedFeatures.from_arrays([array])))[0]


def test_a_run_learns_the_vocabulary_of_its_texts(run: RunDir) -> None:
    assert len(run.tokenizers[1]) == 4 + 8  # special tokens and letters
    measured = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    validations = [entry for entry in measured if "wer" in entry]
    assert validations and all({"cer", "exact", "loss"} <= entry.keys() for entry in validations)
    assert not any("perplexity" in entry for entry in validations)  # CTC has no perplexity per token


def test_training_in_bf16_on_a_cpu_validates_with_features_in_float32(loaded: LoadedRun, tmp_path: Path) -> None:
    recording, task = next(Tones.utterances("test", 1)).recording, speech_task(loaded)
    resampled = Recording("fast", recording.samples(8000), 9000)
    with torch.autocast("cpu", torch.bfloat16):
        inside = [task.features(given) for given in (recording, resampled)]
    for given, array in zip((recording, resampled), inside, strict=True):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, task.features(given))
    trained = train(quick("training.precision=bf16"), tmp_path / "run", device="cpu", quiet=True)
    assert '"wer"' in (trained.path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(("setting", "weight"), [(None, 0.3), (0.8, 0.8)])
def test_candidates_of_both_searches_are_ranked_by_the_weighted_sum(
    setting: float | None, weight: float, loaded: LoadedRun
) -> None:
    model, arrays = loaded.module, features(loaded)
    assert isinstance(model, SpeechModel) and model.settings.ctc_weight == 0.3
    answers = speech_task(loaded).writer(loaded.run, model, beam=3, ctc_weight=setting)(arrays, nbest=3)
    for array, answer in zip(arrays, answers, strict=True):
        rows = frames_of(model, array)
        candidates = [transcript.tokens for transcript in prefix_beam_search(rows, 3, 3)]
        found = [hypothesis.tokens for hypothesis in answer.hypotheses]
        for tokens in {*candidates, *found}:
            batch = FeatureBatch.from_lists([array], [[*tokens, EOS]], bos=BOS)
            (by_decoder,) = score(model.logits, batch)
            (by_ctc,) = log_probability(rows, [tokens])
            both = weight * by_ctc + (1 - weight) * sum(by_decoder)
            if tokens in found:
                assert answer.hypotheses[found.index(tokens)].score == pytest.approx(both, abs=1e-3)
            else:
                assert both <= answer.hypotheses[-1].score + 1e-4
        assert [h.score for h in answer.hypotheses] == sorted((h.score for h in answer.hypotheses), reverse=True)


@pytest.mark.parametrize("beam", [1, 4])
def test_ctc_alone_is_searched_recording_by_recording(beam: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = train(quick("model.ctc_weight=1", "model.decoder_layers=0"), tmp_path / "run", device="cpu", quiet=True)
    loaded = LoadedRun(run, "cpu")
    assert isinstance(loaded.module, SpeechModel)
    arrays = features(loaded)
    answers = loaded.writer(beam=beam)(arrays)
    for array, answer in zip(arrays, answers, strict=True):
        rows = frames_of(loaded.module, array)
        best = greedy(rows) if beam == 1 else prefix_beam_search(rows, beam)[0]
        assert answer.hypotheses[0].score == pytest.approx(best.score, abs=1e-3)
        assert answer.hypotheses[0].tokens == best.tokens


def test_ctc_prefers_texts_of_the_minimum_length(loaded: LoadedRun) -> None:
    log_probs = torch.tensor([[0.6, 0.1, 0.1, 0.1, 0.1]]).log()  # the blank is likeliest
    for fewest, expected in [(0, ()), (1, (1,)), (2, ())]:  # one frame holds no two tokens
        writer = loaded.writer(beam=4, min_length=fewest)
        assert isinstance(writer, Transcriber)
        assert writer._ctc(log_probs)[0].tokens == expected


def test_a_decoder_alone_is_searched_as_other_texts_are(tmp_path: Path) -> None:
    run = train(quick("model.ctc_weight=0"), tmp_path / "run", device="cpu", quiet=True)
    loaded = LoadedRun(run, "cpu")
    (answer,) = loaded.writer()(features(loaded, 1))
    assert len(answer.hypotheses[0].logprobs) == len(answer.hypotheses[0].tokens) + answer.hypotheses[0].finished


def test_transcribing_prints_a_line_for_each_file(
    loaded: LoadedRun, folder: Path, tmp_path: Path, capsys: Capsys
) -> None:
    run = loaded.run.path
    expected = [a.texts[0] for a in loaded.writer()(features(loaded, 3))]
    assert call(capsys, "transcribe", run, folder / "0.wav")[0] == f"{expected[0]}\n"
    assert call(capsys, "transcribe", run, "test 2")[0] == f"{expected[1]}\n"
    named = json.loads(call(capsys, "transcribe", run, "test 3", "--format", "jsonl")[0])
    assert named["text"] == expected[2] and named["seconds"] > 0
    several, _ = call(capsys, "transcribe", run, folder, folder / "1.wav")
    files = [folder / "0.wav", folder / "1.wav", folder / "2.wav", folder / "1.wav"]
    texts = [*expected, expected[1]]
    assert several == "".join(f"{file}\t{text}\n" for file, text in zip(files, texts, strict=True))
    out = tmp_path / "out.jsonl"
    call(capsys, "transcribe", run, folder / "2.wav", "--format", "jsonl", "--nbest", 2, "-o", out)
    entry = json.loads(out.read_text())
    assert entry["file"] == str(folder / "2.wav") and entry["text"] == expected[2] and len(entry["nbest"]) == 2
    assert entry["seconds"] == pytest.approx(soundfile.info(folder / "2.wav").duration, abs=1e-3)


def test_the_api_takes_files_and_arrays(run: RunDir, folder: Path) -> None:
    model = regard.load(run.path, device="cpu")
    file = folder / "0.wav"
    samples = soundfile.read(file, dtype="float32")[0]
    alone = model.transcribe(file)
    assert model.transcribe(samples).text == alone.text
    assert [answer.text for answer in model.transcribe([file, samples])] == [alone.text] * 2
    assert len(model.transcribe(file, nbest=3).texts) == 3
    with pytest.raises(UserError, match=r"transcribe: .* and sound is \[samples\]"):
        model.transcribe([np.zeros((2, 3), np.float32)])


def test_evaluating_prints_error_rates(run: RunDir, tmp_path: Path, capsys: Capsys) -> None:
    out, _ = call(capsys, "evaluate", run.path, "--json", "--quiet", "--save", tmp_path / "out.txt")
    entry = json.loads(out)
    outputs, references = (tmp_path / "out.txt").read_text().splitlines(), [u.text for u in Tones.utterances("test")]
    assert entry["recordings"] == len(outputs) == 200
    words = sum(len(text.split()) for text in references)
    edits = entry["substitutions"] + entry["deletions"] + entry["insertions"]
    assert entry["words"] == words and entry["wer"] == pytest.approx(100 * edits / words)


def test_a_picture_has_the_spectrogram_the_spikes_and_the_attention(
    run: RunDir, folder: Path, tmp_path: Path, capsys: Capsys
) -> None:
    sound = folder / "0.wav"
    call(capsys, "draw", run.path, sound, "--target", "a e i", "--out", tmp_path / "a.json")
    numbers = json.loads((tmp_path / "a.json").read_text())
    attention = np.array(numbers["weights"])
    assert attention.shape[0] == 4
    np.testing.assert_allclose(attention.sum(1), 1, atol=1e-4)
    assert [row["token"] for row in numbers["tokens"]] == ["a", "e", "i", "</s>"]
    times = [row["ctc"] for row in numbers["tokens"][:3]]
    assert times == sorted(times) and times[-1] < numbers["trace"]["axes"]["source"]["seconds"]
    call(capsys, "draw", run.path, sound, "--target", "a e i", "--out", tmp_path / "a.svg")
    content = (tmp_path / "a.svg").read_text()
    assert "log-mel spectrogram" in content and "CTC" in content and "Cross-attention" in content
    printed, _ = call(capsys, "draw", run.path, sound, "--target", "a e i", "--head", 2)
    assert f"{sound}: a e i"[:60] in printed and "█" in printed
    _, error = call(capsys, "draw", run.path, sound, "--head", 9, status=2)
    assert "--head 9: this model has 2 heads" in error


BAD = {
    "text": (b"hello", "not a sound file that can be read"),
    "no bytes": (b"", "is empty: it has no bytes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_one_line(kind: str, run: RunDir, tmp_path: Path, capsys: Capsys) -> None:
    content, message = BAD[kind]
    (tmp_path / "bad.wav").write_bytes(content)
    for verb in ("transcribe", "draw"):
        _, error = call(capsys, verb, run.path, tmp_path / "bad.wav", status=2)
        assert message in error and error.count("\n") == 1


def test_another_sample_rate_is_resampled_with_a_warning(
    run: RunDir, folder: Path, tmp_path: Path, capsys: Capsys
) -> None:
    samples, _ = soundfile.read(folder / "0.wav")
    soundfile.write(tmp_path / "fast.wav", np.repeat(samples, 2), 16000)
    _, error = call(capsys, "transcribe", run.path, tmp_path / "fast.wav")
    assert error == f"regard: warning: {tmp_path / 'fast.wav'} has 16,000 samples per second: " + (
        "resampled to 8,000, which the model reads\n"
    )


def test_an_empty_folder_and_wrong_verbs_are_refused(run: RunDir, tmp_path: Path, capsys: Capsys) -> None:
    assert "has no sound files" in call(capsys, "transcribe", run.path, tmp_path, status=2)[1]
    assert "regard transcribe" in call(capsys, "translate", run.path, "a b", status=2)[1]


@pytest.mark.parametrize(("text", "fits"), [("a e", True), ("a a", False), ("a e a", False)])
def test_recordings_that_are_too_short_for_ctc_are_reported(
    text: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 frames of sound, a subsampling of 8 leaves two: enough for two different letters."""
    run = RunDir.create(tmp_path / "run", quick("model.subsample=8"))
    task = tasks.of(run.recipe)
    run.save_tokenizers(*task.learn_tokenizers())
    recording = Recording("short", np.sin(np.arange(200 + 15 * 80)).astype(np.float32), 8000)
    monkeypatch.setattr(SpeechTask, "training_examples", lambda self, corpus: [(recording, text)])
    said: list[str] = []
    task.dataset(run, say=said.append)
    assert len(said) == (not fits)
    assert fits or "1 recordings have fewer frames than CTC needs for their texts" in said[0]


REFUSED = {
    "training.r_drop=1": "training.r_drop needs model.ctc_weight = 0",
    "data.join=[2,3]": "data.join is for the recordings of data.speech",
    "data.test_speakers=[a]": "data.test_speakers is for the recordings of data.speech",
    "model.subsample=3": "model.subsample",
}


@pytest.mark.parametrize("change", REFUSED)
def test_settings_that_do_not_fit_are_refused(change: str) -> None:
    with pytest.raises(UserError, match=REFUSED[change].replace("[", r"\[")):
        quick(change)


@pytest.mark.parametrize("weight", [1, 0.3])
@pytest.mark.slow
def test_tones_are_learnt_in_under_a_minute(weight: float, tmp_path: Path) -> None:
    layers = ["model.decoder_layers=0"] if weight == 1 else []
    recipe = load("tones", [f"model.ctc_weight={weight}", *layers])
    run = train(recipe, tmp_path / "run", device="cpu", quiet=True)
    loaded = LoadedRun(run, "cpu")
    task = speech_task(loaded)
    examples = task.held_out("test")
    outputs = [a.texts[0] for a in loaded.writer()([task.features(given) for given, _ in examples])]
    assert task.scores(outputs, [text for _, text in examples])["wer"] < 3


def test_speech_translation_starts_from_the_encoder_of_a_recogniser(tmp_path: Path) -> None:
    lines = ["file\ttext\ttranslation\tsplit"]
    for number, utterance in enumerate(Tones.utterances("train", 12)):
        soundfile.write(tmp_path / f"{number}.wav", utterance.recording.samples(8000), 8000, "FLOAT")
        split = "valid" if number < 3 else "train"
        lines.append(f"{number}.wav\t{utterance.text}\t{utterance.text[::-1].upper()}\t{split}")
    (tmp_path / "list.tsv").write_text("\n".join(lines) + "\n")
    recipe = quick().model_dump()
    recipe["data"] = {"speech": "list.tsv", "folder": str(tmp_path)}
    recogniser = Recipe.model_validate(recipe | {"model": recipe["model"] | {"ctc_weight": 1, "decoder_layers": 0}})
    origin = train(recogniser, tmp_path / "recogniser", device="cpu", quiet=True)
    recipe["data"]["columns"] = ["file", "translation"]
    recipe["training"] |= {"learning_rate": 1e-30}
    run = train(Recipe.model_validate(recipe), tmp_path / "run", device="cpu", quiet=True, start_from=origin.path)
    assert run.tokenizers[1].decode(run.tokenizers[1].encode("A")) == "A"  # a vocabulary of its own
    theirs, own = load_file(origin.best), load_file(run.best)
    encoder = {name for name in own if name.startswith(("encoder.", "source_embedding."))}
    assert len(encoder) > 10 and all(torch.equal(own[name], theirs[name]) for name in encoder)
    assert own.keys() - encoder and any(name.startswith("decoder.") for name in own)
    recipe["model"]["width"] = 32
    with pytest.raises(UserError, match=r"do not fit this model: model\.width is 16 there and 32 here"):
        train(Recipe.model_validate(recipe), tmp_path / "wide", device="cpu", quiet=True, start_from=origin.path)
