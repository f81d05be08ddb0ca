"""Recordings: reading sound files, checks, and other sample rates.

WAV, FLAC, OGG, MP3 and what else libsndfile knows are read through the soundfile package (`regard[audio]`).
"""

from __future__ import annotations

import io
import math
import warnings
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import RegardWarning, UserError, first_line
from regard.files import errno_text

Samples = npt.NDArray[np.float32]  # [n] from -1 to 1
SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au")  # files of a folder that are read
MAX_SECONDS = 3600.0  # maximum length of a recording: cut longer ones beforehand
CLIPPED = 0.01  # share of samples at full scale from which on a recording is called clipped
SEARCHED = 1 / 6  # share of a part, before its end, in which it is cut
PAUSE = 0.2  # seconds of the stretches of sound that are compared there
LOBES = 16  # zero crossings of the resampling filter to each side


def read_audio(path: str | Path, rate: int) -> Samples:
    """Read a sound file as one channel with `rate` samples a second; problems that can be put right are warned of."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {errno_text(error)}") from error
    samples, actual = decode_audio(content, str(path))
    samples = check_samples(samples, str(path))
    if actual != rate:
        message = f"{path} has {actual:,} samples per second: resampled to {rate:,}, which the model reads"
        warnings.warn(message, RegardWarning, stacklevel=2)
    warn_of_clipping(samples, str(path))
    return resample(samples, actual, rate)


def decode_audio(content: bytes, name: str) -> tuple[Samples, int]:
    """The samples of a sound file, its channels averaged, and its sample rate. Messages call it `name`."""
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: without libsndfile
        raise UserError(f"{name}: sound files need one more package: pip install 'regard[audio]'") from None
    if not content:
        raise UserError(f"{name} is empty: it has no bytes")
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.frames > MAX_SECONDS * file.samplerate:
                raise UserError(f"{name} is longer than {MAX_SECONDS / 60:.0f} minutes: cut it into parts")
            samples = file.read(dtype="float32", always_2d=True)
            return samples.mean(1, dtype=np.float32), int(file.samplerate)
    except (RuntimeError, TypeError, ValueError) as error:  # libsndfile's errors are RuntimeErrors
        reason = first_line(error).rsplit(": ", 1)[-1]  # without "Error opening <_io.BytesIO object at ...>"
        raise UserError(f"{name}: not a sound file that can be read: {reason}") from error


def check_samples(samples: npt.NDArray[np.floating], name: str) -> Samples:
    """Check the samples [n] of a recording that messages call `name`."""
    array = np.asarray(samples)
    if array.ndim != 1 or array.dtype.kind != "f":
        raise UserError(f"{name}: {array.dtype} of shape {array.shape}, and sound is [samples] of numbers from -1 to 1")
    if not len(array):
        raise UserError(f"{name} is empty: it has no samples")
    if not np.isfinite(array).all():
        raise UserError(f"{name}: {np.count_nonzero(~np.isfinite(array))} samples are not finite numbers")
    if not np.ptp(array):
        raise UserError(f"{name} is silent: all its {len(array):,} samples are equal")
    return array.astype(np.float32)


def cut_at_pauses(samples: Samples, rate: int, longest: float) -> list[Samples]:
    """Cut a recording into parts of at most `longest` seconds, each where the sound is weakest near its end.

    Parts in which all samples are equal are left out.
    """
    size, search, step = round(longest * rate), round(longest * SEARCHED * rate), max(round(PAUSE * rate), 1)
    parts, begin = [], 0
    while len(samples) - begin > size:
        near = samples[begin + size - search : begin + size]
        power = np.square(near[: len(near) // step * step].reshape(-1, step), dtype=np.float64).mean(1)
        cut = begin + size - search + int(power.argmin()) * step + step // 2
        parts.append(samples[begin:cut])
        begin = cut
    return [part for part in (*parts, samples[begin:]) if np.ptp(part)]


def warn_of_clipping(samples: Samples, name: str) -> None:
    """Warn if many samples are at the largest value, and that value is full scale."""
    share = float(np.mean(np.abs(samples) >= 0.999)) if len(samples) else 0.0
    if share >= CLIPPED:
        message = f"{name} is clipped: {share * 100:.0f} % of its samples are at full scale, which costs accuracy"
        warnings.warn(message, RegardWarning, stacklevel=3)


def resample(samples: Samples, old: int, new: int) -> Samples:
    """Samples at the rate `old` as samples at the rate `new`: [n] -> [ceil(n · new / old)].

    The sound is low-passed below half the lower rate by a windowed sinc, whose values at the times of new samples
    repeat every new / gcd of them: one filter for each, applied as a strided convolution.
    """
    if old == new or not len(samples):
        return samples
    filters, width, step = _resampling_filters(old, new)
    sound = torch.from_numpy(np.ascontiguousarray(samples, np.float32))
    padded = F.pad(sound, (width, width + step))[None, None]
    phases = F.conv1d(padded, filters[:, None], stride=step)[0]  # [new / gcd, ...]
    length = -(-len(samples) * new // old)
    resampled: Samples = phases.T.flatten()[:length].numpy()
    return resampled


@lru_cache
def _resampling_filters(old: int, new: int) -> tuple[Tensor, int, int]:
    """[new / gcd, 2 width + old / gcd] the filters of new samples, their reach in old samples, and the stride.

    Filter p computes the new sample p · old / new after an old one; weight i is that of the old sample i - width.
    """
    common = math.gcd(old, new)
    step, phases = old // common, new // common
    cutoff = min(1.0, new / old) * 0.95  # relative to half the old rate; the filter falls off around it
    width = math.ceil(LOBES / cutoff)
    times = torch.arange(phases, dtype=torch.float64)[:, None] * old / new
    distance = torch.arange(-width, width + step, dtype=torch.float64) - times
    window = torch.cos(math.pi / 2 * (distance * cutoff / LOBES).clamp(-1, 1)).square()
    filters = cutoff * torch.sinc(cutoff * distance) * window
    return filters.float(), width, step
