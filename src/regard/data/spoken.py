"""Make a corpus of spoken sentences: espeak-ng speaks sentences of the built-in grammar, and noise is added.

    python -m regard.data.spoken FOLDER

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
# Whispering variants are left out, and those that sound like another one.
TRAIN_VARIANTS = (
    "m1 m2 m3 m4 m6 m8 f1 f2 f3 Alex Alicia Andrea Andy Annie AnxiousAndy Denis Diogo Gene Gene2 Henrique Hugo Jacky "
    "Lee Marco Mario Mike Nguyen RicishayMax RicishayMax2 Storm Tweaky UniRobot adam anika anikaRobot antonio "
    "benjamin boris croak ed edward grandma grandpa gustave iven iven3 kaukovalta klatt klatt2 klatt3 klatt4 klatt5 "
    "linda max miguel norbert pablo paul pedro rob robert robosoft robosoft2 robosoft3 robosoft5 robosoft6 "
    "robosoft7 sandro shelby steph steph3 travis victor zac"
)
VALID_VARIANTS = ("m5", "f5", "john", "announcer", "aunty", "marcelo", "Michael", "quincy")
TEST_VARIANTS = ("m7", "f4", "david", "belinda")
VOICES = {
    "train": ((*ACCENTS, "en-us-nyc"), tuple(TRAIN_VARIANTS.split())),
    "valid": (ACCENTS, VALID_VARIANTS),
    "test": ((*ACCENTS, "en-gb-x-gbcwmd"), TEST_VARIANTS),  # one accent is new, too
}
COUNTS = {"train": 30000, "valid": 400, "test": 500}
SPEED, PITCH = (130, 200), (30, 70)  # words a minute; espeak-ng's scale from 0 to 99
PLAYED = (0.85, 1.2)  # how fast training sounds are played: formants and pitch move, as if speakers had other sizes
STEP = 250  # to which the rate of a sound that is played faster or slower is rounded: resampling needs few filters
SNR = (5.0, 25.0)  # decibels by which speech is louder than noise
TILT = (0.0, 1.5)  # the power of noise falls with frequency to the power of -tilt: 0 is white, 1 is pink
PEAK = (0.1, 0.8)  # of the recording


def speak(text: str, voice: str, speed: int, pitch: int, played: float = 1.0) -> Samples:
    """The samples of a text as espeak-ng speaks it, `RATE` a second.

    It is spoken at the speed `speed / played`, and played `played` times as fast.
    """
    command = ["espeak-ng", "-v", voice, "-s", str(round(speed / played)), "-p", str(pitch), "--stdout", text]
    finished = subprocess.run(command, capture_output=True, check=False)
    if finished.returncode or len(finished.stdout) <= 44:
        reason = finished.stderr.decode(errors="replace").strip().splitlines() or ["no sound"]
        raise UserError(f"espeak-ng failed: {reason[0]}")
    wav = finished.stdout  # the header of 44 bytes does not know the length
    rate = int.from_bytes(wav[24:28], "little")
    samples = np.frombuffer(wav[44 : len(wav) // 2 * 2], "<i2") / np.float32(32768)
    if played != 1:
        rate = round(rate * played / STEP) * STEP
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
    speed, pitch = int(random.integers(*SPEED)), int(random.integers(*PITCH))
    played = random.uniform(*PLAYED) if split == "train" else 1.0
    samples = speak(pair.source, voice, speed, pitch, played)
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
