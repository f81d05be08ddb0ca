"""Manifests and archives of recordings, joined recordings, and the built-in tones."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from regard.data import spoken
from regard.data.builtin import pairs
from regard.data.speech import Utterance, at_speeds, join_utterances, read_utterances
from regard.data.tones import FORMANTS, LETTERS, Tones
from regard.errors import UserError
from regard.recipes.schema import DataSettings

WORDS = ("one", "two", "three", "four", "five")
PAIR = next(iter(pairs("en-es", "train", 1)))


def data(**changes: Any) -> DataSettings:
    return DataSettings.model_validate({"speech": "list.tsv", **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty recordings by two speakers; the length of a recording tells which word it is."""
    lines = ["file\ttext\tspeaker\tsplit"]
    (tmp_path / "sounds").mkdir()
    for number in range(20):
        word = WORDS[number % 5]
        samples = np.random.default_rng(number).uniform(-0.5, 0.5, 100 * (number % 5 + 1))
        soundfile.write(tmp_path / "sounds" / f"{number}.wav", samples, 8000)
        split = "test" if number % 4 == 3 else "train"
        lines.append(f"sounds/{number}.wav\t{word}\t{'ab'[number // 10]}\t{split}")
    (tmp_path / "list.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


def splits(utterances: list[Utterance]) -> dict[str, int]:
    return dict(Counter(utterance.split for utterance in utterances))


def test_a_manifest_names_files_texts_speakers_and_splits(folder: Path) -> None:
    found = read_utterances(data(folder=str(folder)))
    assert [u.text for u in found[:6]] == [*WORDS, "one"]
    assert [len(u.recording.samples(8000)) for u in found[:6]] == [100, 200, 300, 400, 500, 100]
    assert splits(found) == {"train": 15, "test": 5} and found[10].speaker == "b"


def test_an_archive_is_read_without_extracting(folder: Path) -> None:
    with tarfile.open(folder / "all.tar.xz", "w:xz") as archive:
        archive.add(folder / "list.tsv", "set/list.tsv")
        archive.add(folder / "sounds", "set/sounds")
    packed, loose = (read_utterances(data(folder=str(folder), speech=name)) for name in ("all.tar.xz", "list.tsv"))
    assert [(u.text, u.split, u.speaker) for u in packed] == [(u.text, u.split, u.speaker) for u in loose]
    for one, other in zip(packed, loose, strict=True):
        np.testing.assert_array_equal(one.recording.samples(8000), other.recording.samples(8000))


def test_missing_splits_are_held_out_at_random_and_speakers_by_name(folder: Path) -> None:
    found = read_utterances(data(folder=str(folder), held_out=0.2))
    assert splits(found) == {"train": 12, "valid": 3, "test": 5}
    assert found == read_utterances(data(folder=str(folder), held_out=0.2))
    other = read_utterances(data(folder=str(folder), held_out=0.2, split_seed=1))
    assert [u.split for u in other] != [u.split for u in found]
    alone = read_utterances(data(folder=str(folder), held_out=0.2, test_speakers=["b"]))
    assert splits(alone) == {"train": 8, "valid": 2, "test": 10}
    assert {u.speaker for u in alone if u.split == "test"} == {"b"}
    with pytest.raises(UserError, match="there is no speaker 'c'; there are a, b"):
        read_utterances(data(folder=str(folder), test_speakers=["c"]))


def test_joined_recordings_follow_each_other_by_seed(folder: Path) -> None:
    found = read_utterances(data(folder=str(folder)))
    joined = join_utterances(found, (3, 5), 40, seed=7)
    assert joined == join_utterances(found, (3, 5), 60, seed=7)[:40]
    assert {len(u.text.split()) for u in joined} == {3, 4, 5}
    for utterance in joined:
        first, rest = utterance.recording, utterance.recording.followed_by
        lengths = [100 * (WORDS.index(word) + 1) for word in utterance.text.split()]
        pauses = [round(pause * 8000) for pause, _ in rest]
        samples = first.samples(8000)
        assert len(samples) == sum(lengths) + sum(pauses) and all(0 <= pause <= 800 for pause in pauses)
        begin = lengths[0] + pauses[0]
        np.testing.assert_array_equal(samples[begin : begin + lengths[1]], rest[0][1].samples(8000))
        assert not samples[lengths[0] : begin].any()
    by_file = {str(u.recording.name): u.speaker for u in found}
    assert all(by_file[other.name] == u.speaker for u in joined for _, other in u.recording.followed_by)


def test_copies_at_other_speeds_are_shorter_or_longer_and_other_speakers(folder: Path) -> None:
    found = read_utterances(data(folder=str(folder)))[:5]
    copies = at_speeds(found, [0.8, 1.0, 1.25])
    assert len(copies) == 15 and at_speeds(found, []) == found
    lengths = [len(u.recording.samples(8000)) for u in copies]
    assert lengths == [125, 250, 375, 500, 625, 100, 200, 300, 400, 500, 80, 160, 240, 320, 400]
    np.testing.assert_array_equal(copies[5].recording.samples(8000), found[0].recording.samples(8000))
    assert {u.speaker for u in copies} == {"a at 0.8", "a at 1", "a at 1.25"}
    joined = join_utterances(copies, (2, 3), 20, seed=0)
    assert all(other.speed == u.recording.speed for u in joined for _, other in u.recording.followed_by)


BAD = {
    "columns": ("file\twords\na.wav\tone\n", "the columns file and text, and text is missing"),
    "nothing": ("", "the columns file and text, and file is missing"),
    "no rows": ("file\ttext\n", "list.tsv: no recordings"),
    "cells": ("file\ttext\na.wav\n", "line 2: 1 cells, and the first line names 2"),
    "file": ("file\ttext\nnone.wav\tone\n", "line 2: no such file: .*none.wav"),
    "text": ("file\ttext\na.wav\t \n", "line 2: the text is empty"),
    "split": ("file\ttext\tsplit\na.wav\tone\tdev\n", "line 2: the split is 'dev', and must be train, valid or test"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_manifests_are_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    content, message = BAD[kind]
    (tmp_path / "list.tsv").write_text(content)
    (tmp_path / "a.wav").write_bytes(b"sound")
    with pytest.raises(UserError, match=message) as error:
        read_utterances(data(folder=str(tmp_path)))
    assert "\n" not in str(error.value)


def test_bad_archives_are_refused_in_one_line(tmp_path: Path) -> None:
    def archive(**members: bytes) -> None:
        with tarfile.open(tmp_path / "all.tar", "w") as file:
            for name, content in members.items():
                member = tarfile.TarInfo(name.replace("_", "."))
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))

    def read() -> list[Utterance]:
        return read_utterances(data(folder=str(tmp_path), speech="all.tar"))

    (tmp_path / "all.tar").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"all\.tar: not an archive that can be read"):
        read()
    archive(a_wav=b"sound")
    with pytest.raises(UserError, match=r"holds 0 \.tsv files, and must hold one"):
        read()
    archive(list_tsv=b"file\ttext\na.wav\tone\n")
    with pytest.raises(UserError, match=r"line 2: .*all\.tar has no file a\.wav"):
        read()
    archive(list_tsv=b"file\ttext\na.wav\tone\n", a_wav=b"sound")
    with pytest.raises(UserError, match=r"a\.wav: not a sound file"):
        read()[0].recording.samples(8000)


def test_tones_differ_between_splits_and_letters_have_their_frequencies() -> None:
    train, again = (list(Tones.utterances("train", 20)) for _ in range(2))
    assert all(np.array_equal(a.recording.sound, b.recording.sound) for a, b in zip(train, again, strict=True))
    texts = {split: [u.text for u in Tones.utterances(split, 20)] for split in ("train", "valid", "test")}
    assert texts["train"] != texts["valid"] != texts["test"]
    assert {len(text.split()) for text in texts["train"]} <= set(range(LETTERS[0], LETTERS[1] + 1))
    single = next(u for u in Tones.utterances("train") if set(u.text.split()) == {"s"} or u.text.split()[0] == "s")
    spectrum = np.abs(np.fft.rfft(single.recording.samples(8000)[:1600]))
    peak = np.fft.rfftfreq(1600, 1 / 8000)[spectrum.argmax()]
    assert min(abs(peak / hertz - 1) for hertz in FORMANTS["s"]) < 0.06
    with pytest.raises(UserError, match="no split 'other'"):
        next(Tones.utterances("other"))


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
def test_espeak_speaks_sentences_with_voices_of_their_own_for_each_split(tmp_path: Path) -> None:
    manifest = spoken.make(tmp_path, {"train": 6, "valid": 2, "test": 3})
    found = read_utterances(data(folder=str(tmp_path), speech=manifest.name))
    assert splits(found) == {"train": 6, "valid": 2, "test": 3}
    translated = read_utterances(data(folder=str(tmp_path), speech=manifest.name, columns=["file", "translation"]))
    assert [u.text for u in translated[:1]] != [u.text for u in found[:1]]
    variants = [{u.speaker.split("+")[1] for u in found if u.split == split} for split in ("train", "valid", "test")]
    assert not variants[0] & variants[1] and not variants[0] & variants[2] and not variants[1] & variants[2]
    samples = found[0].recording.samples(8000)
    assert 0.5 * 8000 < len(samples) < 8 * 8000 and 0.05 < np.abs(samples).max() < 0.9


def test_an_utterance_is_a_function_of_its_number_and_of_what_is_spoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def speak(*arguments: Any) -> np.ndarray:
        asked.append(arguments)
        return np.sin(np.arange(4000, dtype=np.float32) / 7)

    monkeypatch.setattr(spoken, "speak", speak)
    made = []
    for folder, number in (("one", 3), ("two", 3), ("three", 4)):
        (tmp_path / folder / "audio").mkdir(parents=True)
        line = spoken.utterance(tmp_path / folder, "train", 0, number, PAIR)
        made.append(soundfile.read(tmp_path / folder / line.split("\t")[0])[0])
    assert asked[0] == asked[1] != asked[2]
    np.testing.assert_array_equal(made[0], made[1])
    assert np.abs(made[0] - made[2]).max() > 0.01


def test_no_variant_is_in_two_splits_and_held_out_voices_are_as_espeak_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [variant for _, names in spoken.VOICES.values() for variant in names]
    assert len(variants) == len(set(variants))
    assert spoken.VOICES["test"] == ((*spoken.ACCENTS, "en-gb-x-gbcwmd"), ("m7", "f4", "david", "belinda"))
    played: dict[str, set[float]] = {split: set() for split in spoken.VOICES}

    def speak(text: str, voice: str, speed: int, pitch: int, factor: float) -> np.ndarray:
        played[split].add(factor)
        assert voice.split("+")[1] in spoken.VOICES[split][1]
        return np.sin(np.arange(400, dtype=np.float32) / 7)

    monkeypatch.setattr(spoken, "speak", speak)
    (tmp_path / "audio").mkdir()
    for split in spoken.VOICES:
        for number in range(50):
            spoken.utterance(tmp_path, split, 0, number, PAIR)
    assert played["valid"] == played["test"] == {1.0}
    assert 0.85 <= min(played["train"]) < 0.88 and 1.17 < max(played["train"]) < 1.2


@pytest.mark.parametrize(("played", "rate", "speed"), [(1.0, 22050, 150), (0.85, 18750, 176), (1.2, 26500, 125)])
def test_a_sound_that_is_played_faster_is_spoken_more_slowly(
    played: float, rate: int, speed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tone = (8000 * np.sin(2 * np.pi * 1000 * np.arange(22050) / 22050)).astype("<i2").tobytes()
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        header = b"RIFF" + bytes(20) + (22050).to_bytes(4, "little") + bytes(16)
        return subprocess.CompletedProcess(command, 0, header + tone, b"")

    monkeypatch.setattr(spoken.subprocess, "run", run)
    samples = spoken.speak("one", "en-us+m1", 150, 50, played)
    assert commands[0][3:5] == ["-s", str(speed)]
    assert len(samples) == -(-22050 * 8000 // rate)
    spectrum = np.abs(np.fft.rfft(samples))
    peak = np.fft.rfftfreq(len(samples), 1 / 8000)[spectrum.argmax()]
    assert abs(peak - 1000 * rate / 22050) < 1  # the tone of 1 kHz


def test_without_espeak_the_script_says_what_to_install(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("PATH", "")
    assert spoken.main([str(tmp_path)]) == 2
    assert "espeak-ng is not installed (Debian: apt-get install espeak-ng)" in capsys.readouterr().err
