"""Readable tokens: labels without invisible characters, and the width of text in a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from regard.text.tokenizers import join_tokens

_SPECIAL = re.compile(r"<[^<>\s]+>|\[[A-Z]+\]")
_JOINERS = "\u200c\u200d"  # zero-width (non-)joiner: part of the spelling of Persian, Hindi and emoji


def looks_special(token: str) -> bool:
    """Whether a token is written like a special token, such as `</s>`, `<2de>` or `[CLS]`."""
    return _SPECIAL.fullmatch(token.strip()) is not None


def space_at(tokens: Sequence[str], i: int) -> bool:
    """Whether token i begins with white space; the bytes of one space may be spread over up to four tokens."""
    return join_tokens(tokens[i : i + 4])[:1].isspace()


def labels(tokens: Sequence[str], words: bool = False) -> tuple[str, ...]:
    """Make the labels of the tokens on one axis, without invisible or control characters.

    The space that begins a word is left out where every token is a whole word, and written ␣ where some tokens are
    continuations, since there it tells the two apart: `(" l", "arge")` gives `("␣l", "arge")`. `words`: the tokens are
    known to be whole words, though not each begins with a space.
    """
    if words or all(
        _spaced(token) or looks_special(token) or looks_special(before) for before, token in pairwise(tokens)
    ):
        tokens = [token[1:] if _spaced(token) and token.strip() else token for token in tokens]
    return tuple(visible(token) for token in tokens)


def _spaced(token: str) -> bool:
    """Whether a token begins with a space of any width; other white space, such as a line feed, stays visible."""
    return token[:1].isspace() and unicodedata.category(token[0]) == "Zs"


def visible(token: str) -> str:
    """Replace invisible characters by visible ones: space ␣, newline ␊, escape ␛; an empty token is ∅."""
    if not token:
        return "∅"
    text = "".join(_visible_character(c) for c in token)
    return "◌" + text if unicodedata.combining(text[0]) else text


def _visible_character(c: str) -> str:
    code, category = ord(c), unicodedata.category(c)
    if c == " ":
        return "␣"
    if code < 0x20:
        return chr(0x2400 + code)  # the block of control pictures
    if code == 0x7F:
        return "␡"
    if category == "Cs" or code & 0xFFFE == 0xFFFE:
        return "\ufffd"  # half of a surrogate pair, or not a character: neither XML nor UTF-8 can represent it
    if c not in _JOINERS and category in ("Cc", "Cf", "Zl", "Zp", "Zs"):
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    return c


def clusters(text: str) -> list[str]:
    """Split text into visible units: accents, joiners and variation selectors stay with the character before them."""
    units: list[str] = []
    for c in text:
        if units and (unicodedata.category(c) in ("Mn", "Me", "Cf") or units[-1][-1] == "\u200d"):
            units[-1] += c
        else:
            units.append(c)
    return units


def columns(text: str) -> int:
    """Count the terminal columns of text: two for East Asian wide characters, none for accents."""
    return sum(2 if unicodedata.east_asian_width(cluster[0]) in "WF" else 1 for cluster in clusters(text))


def shorten(text: str, max_columns: int) -> str:
    """Shorten text to at most `max_columns` columns, ending in an ellipsis if anything was cut."""
    if columns(text) <= max_columns:
        return text
    kept, used = "", 1
    for cluster in clusters(text):
        used += columns(cluster)
        if used > max_columns:
            break
        kept += cluster
    return (kept + "…") if max_columns > 0 else ""
