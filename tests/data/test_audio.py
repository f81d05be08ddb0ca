"""Recordings and log-mel features."""

from __future__ import annotations

import io
import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from transformers import audio_utils

from regard.data.audio import Samples, check_samples, cut_at_pauses, read_audio, resample
from regard.data.log_mel import (
    fft_size,
    frame_sizes,
    log_mel,
    mel_filters,
    mel_power,
    num_frames,
    slaney_filters,
    whisper_log_mel,
)
from regard.errors import RegardWarning, UserError


def tone(hertz: float, rate: int = 8000, seconds: float = 0.5) -> Samples:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def noise(count: int = 4000) -> Samples:
    return np.random.default_rng(0).normal(0, 0.1, count).astype(np.float32)


@pytest.mark.parametrize(("rate", "bands"), [(8000, 40), (16000, 80)])
def test_filters_and_powers_are_those_of_transformers(rate: int, bands: int) -> None:
    filters = audio_utils.mel_filter_bank(fft_size(rate) // 2 + 1, bands, 0, rate / 2, rate, mel_scale="htk")
    torch.testing.assert_close(mel_filters(rate, bands), torch.from_numpy(filters).float(), atol=1e-6, rtol=1e-5)
    window, hop = frame_sizes(rate)
    powers = audio_utils.spectrogram(
        noise(),
        audio_utils.window_function(window, "hann", frame_length=window),
        window,
        hop,
        fft_size(rate),
        power=2.0,
        center=False,
        mel_filters=filters,
    )
    ours = mel_power(noise(), rate, bands)
    assert len(ours) == num_frames(4000, rate)
    torch.testing.assert_close(ours, torch.from_numpy(powers.T).float(), atol=1e-5, rtol=1e-4)


def test_a_frame_is_the_discrete_fourier_transform_of_its_window_by_its_definition() -> None:
    samples, n = noise(), fft_size(8000)
    frame = samples[80:280].astype(float) * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200))
    power = [abs(sum(x * np.exp(-2j * np.pi * k * i / n) for i, x in enumerate(frame))) ** 2 for k in range(n // 2 + 1)]
    expected = np.array(power) @ mel_filters(8000, 40).double().numpy()
    np.testing.assert_allclose(mel_power(samples, 8000, 40)[1], expected, rtol=1e-4)


def test_the_band_of_a_tone_is_the_one_whose_centre_is_nearest() -> None:
    centres = 700 * (10 ** (np.linspace(0, 2595 * math.log10(1 + 4000 / 700), 42)[1:-1] / 2595) - 1)
    for hertz in (300, 1000, 2500):
        assert mel_power(tone(hertz), 8000, 40).mean(0).argmax() == abs(centres - hertz).argmin()


def test_features_have_mean_0_and_variance_1_and_ignore_loudness() -> None:
    samples = noise() * np.linspace(0, 1, 4000, dtype=np.float32)
    features = log_mel(samples, 8000, 40)
    assert features.shape == (num_frames(4000, 8000), 40)
    assert float(features.mean()) == pytest.approx(0, abs=1e-5)
    assert float(features.var(correction=0)) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(log_mel(samples * 0.01, 8000, 40), features, atol=1e-3, rtol=0)
    assert log_mel(samples[:50], 8000, 40).shape == (1, 40)  # shorter than a window


@pytest.mark.parametrize(("old", "new"), [(44100, 8000), (8000, 16000), (16000, 8000), (11025, 8000), (8000, 8000)])
def test_a_resampled_tone_is_the_tone_at_the_other_rate(old: int, new: int) -> None:
    found, expected = resample(tone(700, old), old, new), tone(700, new)
    assert len(found) == math.ceil(len(tone(700, old)) * new / old)
    inner = slice(200, -200)
    np.testing.assert_allclose(found[: len(expected)][inner], expected[inner], atol=2e-3)


def test_what_the_lower_rate_cannot_hold_is_removed() -> None:
    assert np.abs(resample(tone(6000, 16000), 16000, 8000)[200:-200]).max() < 2e-3


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_files_are_read_as_one_channel_at_the_wanted_rate(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"stereo.{suffix}"
    soundfile.write(path, np.stack([tone(440, 16000), np.zeros(8000)], 1), 16000)
    with pytest.warns(RegardWarning, match=re.escape(f"{path} has 16,000 samples per second: resampled to 8,000")):
        samples = read_audio(path, 8000)
    np.testing.assert_allclose(samples[200:-200], tone(440)[200:-200] / 2, atol=2e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_audio(path, 16000)) == 8000


def wav(samples: object, subtype: str = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.asarray(samples, np.float32), 8000, subtype, format="WAV")
    return file.getvalue()


BAD = {
    "no bytes": (b"", "is empty: it has no bytes"),
    "no samples": (wav([]), "is empty: it has no samples"),
    "text": (b"hello " * 50, "not a sound file that can be read: Format not recognised.$"),
    "silence": (wav(np.zeros(800)), "is silent: all its 800 samples are equal"),
    "a constant": (wav(np.full(800, 0.25)), "is silent: all its 800 samples are equal"),
    "nan": (wav([0.1, math.nan, 0.2, math.inf]), "2 samples are not finite numbers"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    content, message = BAD[kind]
    path = tmp_path / "bad.wav"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_audio(path, 8000)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_missing_files_are_refused_and_clipped_ones_warned_of(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*: no such file"):
        read_audio(tmp_path / "none.wav", 8000)
    soundfile.write(tmp_path / "loud.wav", np.clip(4 * tone(440), -1, 1), 8000)
    with pytest.warns(RegardWarning, match=r"loud.wav is clipped: 6\d % of its samples are at full scale"):
        read_audio(tmp_path / "loud.wav", 8000)
    with pytest.raises(UserError, match=r"sound is \[samples\]"):
        check_samples(np.zeros((3, 2), np.float32), "array")


@pytest.mark.parametrize("bands", [80, 128])
def test_whisper_s_bands_are_those_of_transformers(bands: int) -> None:
    expected = audio_utils.mel_filter_bank(201, bands, 0, 8000, 16000, norm="slaney", mel_scale="slaney")
    torch.testing.assert_close(slaney_filters(16000, bands), torch.from_numpy(expected).float(), atol=1e-8, rtol=1e-5)


def test_whisper_s_features_are_those_of_a_plain_fourier_transform() -> None:
    """Of the frame at 0.5 s: its window is centred there. After the sound there is silence, at the lowest value."""
    sound = tone(440, 16000, 1.0) + noise(16000) / 100
    found = whisper_log_mel(sound, 16000, 80, 2.0)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    waves = np.exp(-2j * np.pi * np.outer(np.arange(201), np.arange(400)) / 400)
    power = np.abs(waves @ (window * sound[8000 - 200 : 8000 + 200])) ** 2 @ slaney_filters(16000, 80).numpy()
    lowest = float(found.min())
    assert found.shape == (200, 80) and float(found.max()) - lowest == pytest.approx(2)
    expected = np.maximum((np.log10(power) + 4) / 4, lowest)
    np.testing.assert_allclose(found[50].numpy(), expected, atol=1e-4)
    assert bool((found[110:] == lowest).all())


def test_long_sounds_are_cut_where_they_are_weakest() -> None:
    sound = noise(8000 * 20)
    sound[8000 * 9 : 8000 * 9 + 2400] = 0  # from 9 s on: in the last 1 2/3 s of the first part
    sound[8000 * 18 :] /= 10
    first, second, *others = cut_at_pauses(sound, 8000, 10.0)
    assert 9.0 <= len(first) / 8000 <= 9.3 and 18.0 <= (len(first) + len(second)) / 8000 <= 19.3
    parts = [first, second, *others]
    assert all(len(part) <= 8000 * 10 for part in parts) and np.array_equal(np.concatenate(parts), sound)
    assert [len(part) for part in cut_at_pauses(sound[: 8000 * 10], 8000, 10.0)] == [8000 * 10]
    sound[len(first) :] = 0
    (only,) = cut_at_pauses(sound, 8000, 10.0)
    assert np.array_equal(only, first)
