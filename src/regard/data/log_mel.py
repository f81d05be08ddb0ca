"""Log-mel features: the energy of sound in bands that are as wide as the ear's, frame by frame.

    mel(f) = 2595 log10(1 + f / 700)        (HTK's scale)

A frame is `WINDOW` seconds of sound, weighted by a Hann window, every `HOP` seconds. Band b is a triangle: 0 at the
centres of its neighbours, 1 at its own; centres are equally spaced in mels between 0 and half the sample rate. Shapes:
n samples, T frames, B bands, K frequencies.

Whisper's features (Radford et al. 2022) have the same frames and bands, but frames are centred on multiples of `HOP`,
the scale is Slaney's, triangles have equal areas, and loudness has a fixed scale.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.audio import Samples

WINDOW, HOP = 0.025, 0.01  # seconds
DYNAMIC_RANGE = 8.0  # powers of ten below the loudest value of a recording at which values are cut off: 80 dB
SILENCE = 1e-10  # the least power
WHISPER_TOP = 8000.0  # end of the highest of Whisper's bands, in Hz


def frame_sizes(rate: int) -> tuple[int, int]:
    """Samples of a window and of a hop."""
    return round(WINDOW * rate), round(HOP * rate)


def num_frames(samples: int, rate: int) -> int:
    """Frames of a recording: those whose window is within it, at least one.

    >>> num_frames(8000, 8000), num_frames(10, 8000)
    (98, 1)
    """
    window, hop = frame_sizes(rate)
    return max(samples - window, 0) // hop + 1


def fft_size(rate: int) -> int:
    """The power of 2 that a window is padded to."""
    return int(2 ** math.ceil(math.log2(frame_sizes(rate)[0])))


@lru_cache
def mel_filters(rate: int, bands: int) -> Tensor:
    """[K, B] the weight of each frequency of the Fourier transform in each band."""
    hertz = np.linspace(0, rate / 2, fft_size(rate) // 2 + 1)
    mels = np.linspace(0, 2595 * math.log10(1 + rate / 2 / 700), bands + 2)
    centres = 700 * (10 ** (mels / 2595) - 1)  # centres of the bands, and the ends of the first and the last
    rising = (hertz[:, None] - centres[:-2]) / (centres[1:-1] - centres[:-2])
    falling = (centres[2:] - hertz[:, None]) / (centres[2:] - centres[1:-1])
    return torch.from_numpy(np.maximum(np.minimum(rising, falling), 0).astype(np.float32))


def mel_power(samples: Samples, rate: int, bands: int) -> Tensor:
    """Samples [n] -> [T, B], the power in each band."""
    window, hop = frame_sizes(rate)
    sound = torch.from_numpy(np.ascontiguousarray(samples, np.float32))
    frames = F.pad(sound, (0, max(window - len(sound), 0))).unfold(0, window, hop)  # [T, window]
    spectrum = torch.fft.rfft(frames * torch.hann_window(window), fft_size(rate))  # [T, K]
    return spectrum.abs().square() @ mel_filters(rate, bands)


def log_mel(samples: Samples, rate: int, bands: int) -> Tensor:
    """Samples [n] -> features [T, B] with mean 0 and variance 1 over the whole recording.

    The decimal logarithm, cut off `DYNAMIC_RANGE` below its maximum. So the loudness of a recording has no effect, but
    differences of loudness within it have: subtracting the mean of each band would make steady vowels equal.
    """
    logarithm = _clamped_log(mel_power(samples, rate, bands))
    return (logarithm - logarithm.mean()) / logarithm.std(correction=0).clamp(min=1e-5)


def _clamped_log(power: Tensor) -> Tensor:
    logarithm = power.clamp(min=SILENCE).log10()
    return logarithm.clamp(min=float(logarithm.max()) - DYNAMIC_RANGE)


@lru_cache
def slaney_filters(rate: int, bands: int) -> Tensor:
    """[K, B] the weight of each frequency of a Fourier transform of one window in each of Whisper's bands.

    Slaney's scale is linear up to 1 kHz, 200 / 3 Hz to a mel, then logarithmic, 27 mels to a factor of 6.4.
    """
    step, corner, factor = 200 / 3, 1000.0, math.log(6.4) / 27
    top = corner / step + math.log(WHISPER_TOP / corner) / factor
    mels = np.linspace(0, top, bands + 2)
    above = corner * np.exp(factor * (mels - corner / step))
    centres = np.where(mels < corner / step, step * mels, above)  # centres of the bands, and the ends of the outer ones
    hertz = np.linspace(0, rate // 2, frame_sizes(rate)[0] // 2 + 1)
    rising = (hertz[:, None] - centres[:-2]) / np.diff(centres)[:-1]
    falling = (centres[2:] - hertz[:, None]) / np.diff(centres)[1:]
    triangles = np.maximum(np.minimum(rising, falling), 0) * (2 / (centres[2:] - centres[:-2]))
    return torch.from_numpy(triangles.astype(np.float32))


def whisper_log_mel(samples: Samples, rate: int, bands: int, seconds: float) -> Tensor:
    """Samples [n] -> features [T, B] of the sound with silence after it, so that it lasts so many seconds.

    The decimal logarithm, cut off `DYNAMIC_RANGE` below its maximum, plus 4, divided by 4.
    """
    window, hop = frame_sizes(rate)
    sound = torch.from_numpy(np.ascontiguousarray(samples, np.float32))
    padded = F.pad(sound, (0, max(round(seconds * rate) - len(sound), 0)))
    spectrum = torch.stft(padded, window, hop, window=torch.hann_window(window), return_complex=True)  # [K, T + 1]
    power = slaney_filters(rate, bands).T @ spectrum[:, :-1].abs().square()
    return (_clamped_log(power).T + 4) / 4
