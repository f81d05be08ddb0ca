"""The colour scales, for weights between 0 and 1 and for signed numbers, and what can be read on top of them.

The scale of weights is viridis: even steps in weight look like even steps in lightness, it survives printing in grey,
and people with any of the common colour deficiencies can read it. The sixteen anchors are entries 0, 17, 34, ... 255 of
matplotlib's 256-entry viridis table (by N. Smith and S. van der Walt, released as CC0); between them we interpolate
linearly, which stays within 7 of 255 of the full table in every channel.

Signed numbers have a scale with two arms, blue above zero and orange below it (of Okabe and Ito), which people with the
common colour deficiencies can tell apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

ANCHORS: tuple[tuple[int, int, int], ...] = tuple(
    (code >> 16, code >> 8 & 255, code & 255)
    for code in (
        0x440154, 0x481A6C, 0x472F7D, 0x414487, 0x39568C, 0x31688E, 0x2A788E, 0x23888E,
        0x1F988B, 0x22A884, 0x35B779, 0x54C568, 0x7AD151, 0xA5DB36, 0xD2E21B, 0xFDE725,
    )
)  # fmt: skip

FOR, AGAINST, NEITHER = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0xF2, 0xF2, 0xF2)  # Okabe and Ito's blue, vermilion
DARK_INK = "#000000"
LIGHT_INK = "#ffffff"

_CUBE = (0, 95, 135, 175, 215, 255)  # the six levels of a channel in the 256-colour palette of terminals


def rgb(weight: float) -> tuple[int, int, int]:
    """The colour of a weight, as three bytes; weights outside 0..1 take the nearest end of the scale."""
    place = min(max(weight, 0.0), 1.0) * (len(ANCHORS) - 1)
    below = min(int(place), len(ANCHORS) - 2)
    part = place - below
    low, high = ANCHORS[below], ANCHORS[below + 1]
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


def rgbs(weights: np.ndarray) -> np.ndarray:
    """`rgb` of many weights at once: [...] -> bytes [..., 3]."""
    place = np.clip(np.asarray(weights, np.float64), 0.0, 1.0) * (len(ANCHORS) - 1)
    below = np.minimum(place.astype(int), len(ANCHORS) - 2)
    anchors = np.array(ANCHORS, np.float64)
    low, high = anchors[below], anchors[below + 1]
    return np.rint(low + (high - low) * (place - below)[..., None]).astype(np.uint8)


def signed_rgb(value: float) -> tuple[int, int, int]:
    """The colour of a number from -1 to 1; what lies outside takes the nearest end."""
    end, part = (FOR if value > 0 else AGAINST), min(abs(value), 1.0)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(NEITHER, end, strict=True))
    return red, green, blue


def signed_rgbs(values: np.ndarray) -> np.ndarray:
    """`signed_rgb` of many numbers at once: [...] -> bytes [..., 3]."""
    values = np.asarray(values, np.float64)[..., None]
    ends = np.where(values > 0, np.array(FOR, np.float64), np.array(AGAINST, np.float64))
    pale = np.array(NEITHER, np.float64)
    return np.rint(pale + (ends - pale) * np.minimum(np.abs(values), 1.0)).astype(np.uint8)


def colour(weight: float) -> str:
    """The colour of a weight as CSS writes it: `colour(0.0) == "#440154"`."""
    return "#{:02x}{:02x}{:02x}".format(*rgb(weight))


def luminance(colour: tuple[int, int, int]) -> float:
    """Relative luminance of an sRGB colour, 0 (black) to 1 (white), as WCAG 2 defines it."""

    def linear(byte: int) -> float:
        c = byte / 255
        return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4

    red, green, blue = colour
    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)


def ink(weight: float) -> str:
    """The text colour to write on a cell of this weight."""
    return readable_ink(rgb(weight))


def readable_ink(ground: tuple[int, int, int]) -> str:
    """Black or white, whichever has more contrast on this colour.

    The two tie at a luminance of 0.179, where each has a contrast of 4.58; so text on a cell never has less than 4.5.
    """
    return DARK_INK if luminance(ground) > 0.179 else LIGHT_INK


@dataclass(frozen=True)
class Ramp:
    """How numbers become colours: from `low` to `high` by viridis, or, `signed`, from -high over 0 to high."""

    low: float = 0.0
    high: float = 1.0
    kind: Literal["weights", "signed"] = "weights"

    @classmethod
    def signed(cls, values: np.ndarray) -> Ramp:
        """One whose ends are the greatest of the numbers, whichever its sign."""
        most = float(np.abs(values).max()) or 1.0
        return cls(-most, most, "signed")

    @classmethod
    def between(cls, values: np.ndarray) -> Ramp:
        """One from the least to the greatest of the numbers."""
        low, high = float(values.min()), float(values.max())
        return cls(low, high if high > low else low + 1.0)

    def shares(self, values: np.ndarray) -> np.ndarray:
        """Where numbers lie on the scale: 0 to 1, or -1 to 1 where it is signed."""
        values = np.asarray(values, np.float64)
        return values / self.high if self.kind == "signed" else (values - self.low) / (self.high - self.low)

    def rgbs(self, values: np.ndarray) -> np.ndarray:
        """Their colours: [...] -> bytes [..., 3]."""
        return (signed_rgbs if self.kind == "signed" else rgbs)(self.shares(values))

    def rgb(self, value: float) -> tuple[int, int, int]:
        red, green, blue = self.rgbs(np.array(value)).tolist()
        return red, green, blue

    def steps(self, count: int) -> np.ndarray:
        """Numbers from one end of the scale to the other."""
        return np.linspace(self.low, self.high, count)


WEIGHTS = Ramp()


def xterm256(colour: tuple[int, int, int]) -> int:
    """The nearest entry of the 256-colour terminal palette: its 6 x 6 x 6 cube (16..231) or its greys (232..255)."""

    def distance(other: tuple[int, int, int]) -> int:
        return sum((a - b) ** 2 for a, b in zip(colour, other, strict=True))

    r, g, b = (min(range(6), key=lambda level: abs(_CUBE[level] - channel)) for channel in colour)
    step = min(23, max(0, round((sum(colour) / 3 - 8) / 10)))
    grey = 8 + 10 * step
    if distance((grey, grey, grey)) < distance((_CUBE[r], _CUBE[g], _CUBE[b])):
        return 232 + step
    return 16 + 36 * r + 6 * g + b
