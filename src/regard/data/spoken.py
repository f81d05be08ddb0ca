"""Make a corpus of spoken sentences: espeak-ng speaks sentences of the built-in grammar, and noise is added.

    python -m regard.data.spoken FOLDER --train 12000

writes sound files (FLAC, 8,000 samples a second) and a manifest, spoken.tsv, with the columns file, text, translation
(into Spanish), speaker and split. Sentences are those of the splits of `en-es`; each split has voices of its own. The
n-th utterance of a split is a function of the seed, of n and of the sound that espeak-ng makes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from regard.data.audio import Samples, resample
from regard.data.builtin import Pair, pairs
from regard.data.stream import generator
from regard.errors import UserError

RATE = 8000
MANIFEST = "spoken.tsv"
# Accents and variants of espeak-ng's English. A voice is one of each, and no variant is in two splits.
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-029")
VOICES = {
    "train": (ACCENTS, ("m1", "m2", "m3", "m4", "m6", "m8", "f1", "f2", "f3", "Andy", "Annie", "linda", "max", "paul")),
    "valid": (ACCENTS, ("m5", "f5", "john")),
    "test": ((*ACCENTS, "en-gb-x-gbcwmd"), ("m7", "f4", "david", "belinda")),  # one accent is new, too
}
COUNTS = {"train": 12000, "valid": 300, "test": 500}
SPEED, PITCH = (130, 200), (30, 70)  # words a minute; espeak-ng's scale from 0 to 99
SNR = (5.0, 25.0)  # decibels by which speech is louder than noise
TILT = (0.0, 1.5)  # the power of noise falls with frequency to the power of -tilt: 0 is white, 1 is pink
PEAK = (0.1, 0.8)  # of the recording


def speak(text: str, voice: str, speed: int, pitch: int) -> Samples:
    """The samples of a text as espeak-ng speaks it, `RATE` a second."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text]
    finished = subprocess.run(command, capture_output=True, check=False)
    if finished.returncode or len(finished.stdout) <= 44:
        reason = finished.stderr.decode(errors="replace").strip().splitlines() or ["no sound"]
        raise UserError(f"espeak-ng failed: {reason[0]}")
    wav = finished.stdout  # the header of 44 bytes does not know the length
    rate = int.from_bytes(wav[24:28], "little")
    samples = np.frombuffer(wav[44 : len(wav) // 2 * 2], "<i2") / np.float32(32768)
    return resample(samples.astype(np.float32), rate, RATE)


def add_noise(samples: Samples, random: np.random.Generator) -> Samples:
    """Add noise of a drawn colour and level, and set a drawn loudness."""
    spectrum = np.fft.rfft(random.normal(size=len(samples)))
    spectrum *= np.maximum(np.arange(len(spectrum)), 1.0) ** (-random.uniform(*TILT) / 2)
    noise = np.fft.irfft(spectrum, len(samples))
    level = 10 ** (-random.uniform(*SNR) / 20) * np.sqrt(np.mean(samples**2) / np.mean(noise**2))
    mixed = samples + level * noise
    return np.asarray(mixed * random.uniform(*PEAK) / np.abs(mixed).max(), np.float32)


def utterance(folder: Path, split: str, seed: int, number: int, pair: Pair) -> str:
    """Write one sound file; return its line of the manifest."""
    import soundfile

    random = generator(seed, list(VOICES).index(split), number)
    accents, variants = VOICES[split]
    voice = f"{accents[random.integers(len(accents))]}+{variants[random.integers(len(variants))]}"
    samples = speak(pair.source, voice, int(random.integers(*SPEED)), int(random.integers(*PITCH)))
    name = f"audio/{split}-{number:05}.flac"
    soundfile.write(folder / name, add_noise(samples, random), RATE)
    return "\t".join((name, pair.source, pair.target, voice, split))


def make(folder: Path, counts: dict[str, int], seed: int = 0, jobs: int = 1) -> Path:
    """Write the corpus; return the path of its manifest."""
    if shutil.which("espeak-ng") is None:
        raise UserError("espeak-ng is not installed (Debian: apt-get install espeak-ng)")
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    lines = ["file\ttext\ttranslation\tspeaker\tsplit"]
    with ThreadPoolExecutor(jobs) as pool:  # threads: most of the time espeak-ng works, in processes of its own
        for split, count in counts.items():
            sentences = pairs("en-es", split, count)
            lines += pool.map(partial(utterance, folder, split, seed), range(count), sentences)
            print(f"{split}: {count:,} recordings", file=sys.stderr)
    manifest = folder / MANIFEST
    manifest.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return manifest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m regard.data.spoken", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write")
    for split, count in COUNTS.items():
        parser.add_argument(f"--{split}", type=int, default=count, help=f"number of recordings (default {count})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="recordings made at the same time (default 2)")
    given = parser.parse_args(arguments)
    try:
        print(make(given.folder, {split: getattr(given, split) for split in COUNTS}, given.seed, given.jobs))
    except UserError as error:
        print(f"regard: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
