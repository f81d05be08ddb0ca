"""The verbs and adjectives that may be combined with a noun, and the combinations held out of training.

About one in ten pairs (adjective of a noun, subject of a verb, object of a verb) is held out, by a hash of the words,
independent of the seed. A sentence of the test split contains at least one of them.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple
from zlib import crc32

from regard.data.builtin.lexicon import Adjective, Noun, Verb, lexicon

HELD_OUT_ONE_IN = 10
ALWAYS_HELD_OUT = {("adjective", "cat", "large")}


class Pairing(NamedTuple):
    """Two lexemes in a relation: (adjective, noun, adjective), (subject, noun, verb) or (object, verb, noun)."""

    relation: str
    first: str
    second: str


def held_out(relation: str, first: str, second: str) -> bool:
    """Whether `train`, `valid` and `shapes` never combine these two words in this relation."""
    return crc32(f"{relation}|{first}|{second}".encode()) % HELD_OUT_ONE_IN == 0 or (
        relation, first, second) in ALWAYS_HELD_OUT  # fmt: skip


class Choices:
    """The words that each word may be combined with; `everything` includes the held-out pairs."""

    def __init__(self, everything: bool) -> None:
        words = lexicon()

        def fits(relation: str, first: str, second: str) -> bool:
            return everything or not held_out(relation, first, second)

        self.adjectives: dict[Noun, Sequence[Adjective]] = {
            n: [a for a in words.adjectives if a.kinds & n.kinds and fits("adjective", n.name, a.name)]
            for n in words.nouns
        }
        self.subjects: dict[Verb, Sequence[Noun]] = {
            v: [n for n in words.nouns if v.subjects & n.kinds and fits("subject", n.name, v.name)] for v in words.verbs
        }
        self.objects: dict[Verb, Sequence[Noun]] = {
            v: [n for n in words.nouns if v.objects & n.kinds and fits("object", v.name, n.name)] for v in words.verbs
        }
        self.things: dict[Verb, Sequence[Noun]] = {
            v: [n for n in nouns if "person" not in n.kinds] for v, nouns in self.objects.items()
        }
        doing = [v for v in words.verbs if v.frame in ("transitive", "giving", "intransitive", "motion")]
        self.actions: dict[Noun, Sequence[Verb]] = {
            n: [v for v in doing if v.subjects & n.kinds and fits("subject", n.name, v.name)] for n in words.nouns
        }
        transitive = [v for v in words.verbs if v.frame == "transitive"]
        self.suffered: dict[Noun, Sequence[Verb]] = {
            n: [v for v in transitive if v.objects & n.kinds and fits("object", v.name, n.name)] for n in words.nouns
        }


@cache
def choices(everything: bool) -> Choices:
    """The tables, built on first use."""
    return Choices(everything)
