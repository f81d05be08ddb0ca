"""One attention map: the weights, the tokens on its two axes, and how to write those tokens so that they can be read.

Nothing here knows how a map is drawn; `svg.draw` and `terminal.draw` take a `Map` and do that.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from regard.text.tokenizers import join_tokens

_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z]+\]")
_JOINERS = "\u200c\u200d"  # zero-width (non-)joiner: part of how Persian, Hindi and emoji are spelt


def looks_like_mark(piece: str) -> bool:
    """Whether a piece is a special mark, such as `</s>`, `<2de>` or `[CLS]`, and so never part of a word."""
    return _MARK.fullmatch(piece.strip()) is not None


@dataclass(frozen=True, eq=False)
class Map:
    """One attention matrix with its tokens: `weights[q, k]` is how much query token q looks at key token k.

    `weights` is [Q, K], every row sums to one (or is all zero, where a query looks at nothing). For cross-attention
    the queries are the target tokens and the keys the source tokens. `words`: the tokens are whole words.

        Map(np.eye(2), ("el", " gato"), ("the", " cat"), "cross-attention, layer 2, mean of 4 heads")
    """

    weights: np.ndarray
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    title: str = ""
    words: bool = False

    def __post_init__(self) -> None:
        weights = np.array(self.weights, dtype=np.float64)  # a copy of our own: a picture must not change later
        weights.setflags(write=False)
        for field, value in (("weights", weights), ("queries", tuple(self.queries)), ("keys", tuple(self.keys))):
            object.__setattr__(self, field, value)
        if weights.shape != (len(self.queries), len(self.keys)):
            raise ValueError(f"weights of shape {weights.shape} for {len(self.queries)} queries, {len(self.keys)} keys")
        if weights.size == 0:
            raise ValueError("a map needs at least one query and one key")
        if not (np.isfinite(weights).all() and weights.min() >= 0.0 and weights.max() <= 1.001):
            raise ValueError("attention weights lie between 0 and 1")

    def to_words(self, is_mark: Callable[[str], bool] = looks_like_mark) -> Map:
        """Merge the pieces of each word, on both axes.

        A piece begins a word if it is the first one, begins with white space, is a special mark or follows one;
        its pieces are joined by `join_tokens`. The weight a query gives to a word is the SUM over the word's key pieces
        (what was given to any of them was given to the word); the row of a word is the MEAN over its query pieces (each
        piece had one unit to give). So rows that summed to one still do. Text without spaces stays one word.
        """
        return self.merged(_words(self.queries, is_mark), _words(self.keys, is_mark))

    def merged(self, query_words: Sequence[Sequence[int]], key_words: Sequence[Sequence[int]]) -> Map:
        """As `to_words`, with the places of each word's pieces given: `map.merged([[0], [1, 2]], [[0, 1]])`."""
        into = np.zeros((len(self.keys), len(key_words)))  # [K, words]: one where the piece belongs to the word
        for word, pieces in enumerate(key_words):
            into[pieces, word] = 1.0
        mean = np.zeros((len(query_words), len(self.queries)))  # [words, Q]: one over the number of pieces
        for word, pieces in enumerate(query_words):
            mean[word, pieces] = 1.0 / len(pieces)
        return Map(
            np.minimum(mean @ self.weights @ into, 1.0),
            tuple(join_tokens([self.queries[i] for i in pieces]) for pieces in query_words),
            tuple(join_tokens([self.keys[i] for i in pieces]) for pieces in key_words),
            self.title,
            words=True,
        )


def _words(pieces: Sequence[str], is_mark: Callable[[str], bool]) -> list[list[int]]:
    """The positions of the pieces of each word, in order."""
    words: list[list[int]] = []
    after_mark = True  # so that the first piece begins a word
    for i, piece in enumerate(pieces):
        mark = is_mark(piece)
        if after_mark or mark or space_at(pieces, i):
            words.append([])
        words[-1].append(i)
        after_mark = mark
    return words


def space_at(pieces: Sequence[str], i: int) -> bool:
    """Whether white space begins with this piece; up to four may share its bytes."""
    return join_tokens(pieces[i : i + 4])[:1].isspace()


def labels(tokens: Sequence[str], words: bool = False) -> tuple[str, ...]:
    """How the tokens of one axis are written: nothing invisible, nothing that a screen would obey.

    The space that begins a word is left out where every token is a whole word, and written ␣ where some tokens are
    continuations, since there it tells the two apart: `(" l", "arge")` gives `("␣l", "arge")`. `words`: they are known
    to be whole words, though a space may not begin each.
    """
    if words or all(
        _spaced(token) or looks_like_mark(token) or looks_like_mark(before) for before, token in pairwise(tokens)
    ):
        tokens = [token[1:] if _spaced(token) and token.strip() else token for token in tokens]
    return tuple(visible(token) for token in tokens)


def _spaced(token: str) -> bool:
    """Whether a space of any width begins it, but no other white space: a line break is worth seeing."""
    return token[:1].isspace() and unicodedata.category(token[0]) == "Zs"


def visible(token: str) -> str:
    """A token with every invisible character shown: space ␣, newline ␊, escape ␛, an empty token ∅."""
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
        return "\ufffd"  # half a surrogate pair, or no character at all: XML and UTF-8 both refuse it
    if c not in _JOINERS and category in ("Cc", "Cf", "Zl", "Zp", "Zs"):
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    return c


def clusters(text: str) -> list[str]:
    """The text cut where a reader would: accents, joiners and variation marks stay with the sign before them."""
    out: list[str] = []
    for c in text:
        if out and (unicodedata.category(c) in ("Mn", "Me", "Cf") or out[-1][-1] == "\u200d"):
            out[-1] += c
        else:
            out.append(c)
    return out


def columns(text: str) -> int:
    """How many columns of a terminal the text takes: East Asian wide signs two, accents none."""
    return sum(2 if unicodedata.east_asian_width(cluster[0]) in "WF" else 1 for cluster in clusters(text))


def shorten(text: str, room: int) -> str:
    """The text itself if it fits into `room` columns, else as much of it as does and an ellipsis."""
    if columns(text) <= room:
        return text
    kept, used = "", 1
    for cluster in clusters(text):
        used += columns(cluster)
        if used > room:
            break
        kept += cluster
    return (kept + "…") if room > 0 else ""
