"""Built-in sounds: spelled words, in which every letter is a short chord of its own.

A letter is two tones, as a vowel has two formants; pitch, length, loudness, pauses and noise are drawn. An utterance is
a function of its split and its number, so the splits never share one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from regard.data.audio import Samples
from regard.data.speech import Recording, Utterance
from regard.data.stream import generator
from regard.errors import UserError
from regard.registry import CORPORA

RATE = 8000
FORMANTS = {  # frequencies of each letter in hertz
    "a": (700, 1300),
    "e": (400, 2100),
    "i": (280, 2600),
    "o": (450, 850),
    "u": (300, 700),
    "m": (250, 1100),
    "s": (2900, 3600),
    "t": (1800, 3200),
}
SPLITS = {"train": (0, 2000), "valid": (1, 200), "test": (2, 200)}  # seed and number of utterances
LETTERS = (2, 6)  # minimum and maximum number of letters of an utterance


@CORPORA.register("tones")
class Tones:
    """The built-in corpus `tones`."""

    kind = "speech"

    @staticmethod
    def utterances(split: str, count: int | None = None) -> Iterator[Utterance]:
        """The first `count` utterances of a split."""
        if split not in SPLITS:
            raise UserError(f"corpus 'tones' has no split {split!r}; it has {', '.join(SPLITS)}")
        seed, usual = SPLITS[split]
        for number in range(usual if count is None else count):
            random = generator(seed, number)
            letters = random.choice(list(FORMANTS), random.integers(LETTERS[0], LETTERS[1] + 1)).tolist()
            yield Utterance(Recording(f"{split} {number}", synthesize(letters, random), RATE), " ".join(letters), split)


def synthesize(letters: list[str], random: np.random.Generator) -> Samples:
    """The sound of letters."""
    shift, parts = random.uniform(0.95, 1.05), [np.zeros(int(random.uniform(0.02, 0.08) * RATE))]
    for letter in letters:
        time = np.arange(int(random.uniform(0.06, 0.12) * RATE)) / RATE
        tones = sum(np.sin(2 * np.pi * hertz * shift * time + random.uniform(0, 6)) for hertz in FORMANTS[letter])
        envelope = np.sin(np.pi * np.arange(len(time)) / len(time)) * random.uniform(0.1, 0.3)
        parts += [tones * envelope, np.zeros(int(random.uniform(0.01, 0.06) * RATE))]
    sound = np.concatenate(parts)
    return np.asarray(sound + random.normal(0, 0.01, len(sound)), np.float32)
