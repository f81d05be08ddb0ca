"""Checks of arguments that users pass to public functions: the wrong type is a TypeError that names the argument."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from regard.errors import UserError

MAX_BEAM = 1000  # wider beams take all memory before they can be useful


def whole_number(name: str, value: Any, minimum: int = 1) -> int:
    """Check that an argument is an integer of at least `minimum`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {_describe(value)}") from None
    if number < minimum:
        raise UserError(f"{name} = {number}: must be at least {minimum}")
    return number


def text_list(name: str, value: str | Iterable[str]) -> list[str]:
    """Make a list of one string or of several."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} takes a string, or several in a list, not {_describe(value)}")
    texts = list(value)
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}: input {i} must be a string, not {_describe(text)}")
    for i, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{name}: input {i}: not valid Unicode (half of a surrogate pair)") from None
    return [str(text) for text in texts]  # np.str_ and other subclasses become plain strings


def require_text(name: str, value: Any) -> None:
    """Check that an argument is one string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} takes one string, not {_describe(value)}")


def pair_list(value: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Make a list of (source, target) tuples."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"pairs are (source, target) tuples in a list, not {_describe(value)}")
    pairs = list(value)
    for i, pair in enumerate(pairs):
        is_pair = not isinstance(pair, str | bytes | Mapping) and isinstance(pair, Sequence) and len(pair) == 2
        if not is_pair or not all(isinstance(side, str) for side in pair):
            raise TypeError(f"pair {i} must be two strings, not {_describe(pair)}")
    return [(str(source), str(target)) for source, target in pairs]


def _describe(value: Any) -> str:
    """The type and the shortened representation of a value, for a message."""
    text = repr(value)
    return "None" if value is None else f"{type(value).__name__} ({text if len(text) <= 40 else text[:37] + '...'})"
