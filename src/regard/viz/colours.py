"""Colour scales for weights between 0 and 1 and for signed numbers, and readable text colours on them.

The scale of weights is viridis: equal steps in weight look like equal steps in lightness, also in greyscale and with
the common colour vision deficiencies. The sixteen anchors are entries 0, 17, 34, ... 255 of matplotlib's 256-entry
viridis table (by N. Smith and S. van der Walt, released as CC0). Between them colours are interpolated linearly, which
stays within 7 of 255 of the full table in every channel.

Signed numbers have a diverging scale, blue above zero and vermilion below it. Both colours are from the palette of
Okabe and Ito and can be told apart with the common colour vision deficiencies.
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

POSITIVE, NEGATIVE, NEUTRAL = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0xF2, 0xF2, 0xF2)
DARK_INK = "#000000"
LIGHT_INK = "#ffffff"


def rgb(weight: float) -> tuple[int, int, int]:
    """Return the colour of a weight as three bytes; weights are clamped to 0..1."""
    position = min(max(weight, 0.0), 1.0) * (len(ANCHORS) - 1)
    below = min(int(position), len(ANCHORS) - 2)
    part = position - below
    low, high = ANCHORS[below], ANCHORS[below + 1]
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


def rgbs(weights: np.ndarray) -> np.ndarray:
    """Vectorised `rgb`: [...] -> bytes [..., 3]."""
    position = np.clip(np.asarray(weights, np.float64), 0.0, 1.0) * (len(ANCHORS) - 1)
    below = np.minimum(position.astype(int), len(ANCHORS) - 2)
    anchors = np.array(ANCHORS, np.float64)
    low, high = anchors[below], anchors[below + 1]
    return np.rint(low + (high - low) * (position - below)[..., None]).astype(np.uint8)


def signed_rgb(value: float) -> tuple[int, int, int]:
    """Return the colour of a number, which is clamped to -1..1."""
    end, part = (POSITIVE if value > 0 else NEGATIVE), min(abs(value), 1.0)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(NEUTRAL, end, strict=True))
    return red, green, blue


def signed_rgbs(values: np.ndarray) -> np.ndarray:
    """Vectorised `signed_rgb`: [...] -> bytes [..., 3]."""
    values = np.asarray(values, np.float64)[..., None]
    ends = np.where(values > 0, np.array(POSITIVE, np.float64), np.array(NEGATIVE, np.float64))
    neutral = np.array(NEUTRAL, np.float64)
    return np.rint(neutral + (ends - neutral) * np.minimum(np.abs(values), 1.0)).astype(np.uint8)


def colour(weight: float) -> str:
    """Return the colour of a weight in CSS notation: `colour(0.0) == "#440154"`."""
    return "#{:02x}{:02x}{:02x}".format(*rgb(weight))


def luminance(colour: tuple[int, int, int]) -> float:
    """Return the relative luminance of an sRGB colour, 0 (black) to 1 (white), as defined by WCAG 2."""

    def linear(byte: int) -> float:
        c = byte / 255
        return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4

    red, green, blue = colour
    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)


def ink(weight: float) -> str:
    """Return the text colour for a cell of this weight."""
    return readable_ink(rgb(weight))


def readable_ink(background: tuple[int, int, int]) -> str:
    """Return black or white, whichever has more contrast on this colour.

    Both have a contrast of 4.58 at a luminance of 0.179, so that the contrast of text on a cell is always above 4.5.
    """
    return DARK_INK if luminance(background) > 0.179 else LIGHT_INK


@dataclass(frozen=True)
class Ramp:
    """A mapping of numbers to colours: viridis from `low` to `high`, or (`signed`) diverging from -high to high."""

    low: float = 0.0
    high: float = 1.0
    kind: Literal["weights", "signed"] = "weights"

    @classmethod
    def signed(cls, values: np.ndarray) -> Ramp:
        """Return a diverging ramp that ends at the greatest absolute value."""
        most = float(np.abs(values).max()) or 1.0
        return cls(-most, most, "signed")

    @classmethod
    def between(cls, values: np.ndarray) -> Ramp:
        """Return a ramp from the least to the greatest of the numbers."""
        low, high = float(values.min()), float(values.max())
        return cls(low, high if high > low else low + 1.0)

    def shares(self, values: np.ndarray) -> np.ndarray:
        """Return the positions of numbers on the scale: 0 to 1, or -1 to 1 if it is signed."""
        values = np.asarray(values, np.float64)
        return values / self.high if self.kind == "signed" else (values - self.low) / (self.high - self.low)

    def rgbs(self, values: np.ndarray) -> np.ndarray:
        """Return the colours of numbers: [...] -> bytes [..., 3]."""
        return (signed_rgbs if self.kind == "signed" else rgbs)(self.shares(values))

    def rgb(self, value: float) -> tuple[int, int, int]:
        red, green, blue = self.rgbs(np.array(value)).tolist()
        return red, green, blue

    def steps(self, count: int) -> np.ndarray:
        """Return `count` numbers from one end of the scale to the other."""
        return np.linspace(self.low, self.high, count)


WEIGHTS = Ramp()
