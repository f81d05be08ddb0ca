"""The colour scale for weights between 0 and 1, and what can be read on top of it.

The scale is viridis: even steps in weight look like even steps in lightness, it survives printing in grey, and people
with any of the common colour deficiencies can read it. The sixteen anchors are entries 0, 17, 34, ... 255 of
matplotlib's 256-entry viridis table (by N. Smith and S. van der Walt, released as CC0); between them we interpolate
linearly, which stays within 7 of 255 of the full table in every channel.
"""

from __future__ import annotations

ANCHORS: tuple[tuple[int, int, int], ...] = tuple(
    (code >> 16, code >> 8 & 255, code & 255)
    for code in (
        0x440154, 0x481A6C, 0x472F7D, 0x414487, 0x39568C, 0x31688E, 0x2A788E, 0x23888E,
        0x1F988B, 0x22A884, 0x35B779, 0x54C568, 0x7AD151, 0xA5DB36, 0xD2E21B, 0xFDE725,
    )
)  # fmt: skip

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


def wants_dark_ink(weight: float) -> bool:
    """Whether black text has more contrast than white on the colour of this weight.

    The two tie at a luminance of 0.179, where each has a contrast of 4.58; so text on a cell never has less than 4.5.
    """
    return luminance(rgb(weight)) > 0.179


def ink(weight: float) -> str:
    """The text colour to write on a cell of this weight."""
    return DARK_INK if wants_dark_ink(weight) else LIGHT_INK


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
