"""A sentence under construction in both languages, with the links between their words."""

from regard.data.builtin.pairings import Pairing

CONTRACTIONS = {"a": "al", "de": "del"}  # before the article el


class Sentence:
    """Words are appended to `source` and `target` from left to right, with the links between them.

    `pairings` and `shape` record the derivation: which words were combined, and how clauses and phrases are nested.
    """

    __slots__ = ("features", "joints", "links", "pairings", "shape", "source", "target")

    def __init__(self) -> None:
        self.source: list[str] = []
        self.target: list[str] = []
        self.links: list[tuple[int, int]] = []
        self.features: set[str] = set()
        self.pairings: list[Pairing] = []
        self.shape: list[str] = []
        self.joints: list[int] = []

    def say(self, english: str, spanish: str) -> None:
        """One word in each language, linked."""
        self.links.append((len(self.source), len(self.target)))
        self.source.append(english)
        self.target.append(spanish)

    def unit(self, english: str, spanish: tuple[str, ...]) -> None:
        """One English word that is one or more words in Spanish, each linked to it."""
        for word in spanish:
            self.links.append((len(self.source), len(self.target)))
            self.target.append(word)
        self.source.append(english)

    def article(self, english: str, spanish: str) -> None:
        """A determiner; `el` contracts with a preceding `a` or `de`, and the link goes to the contraction."""
        if spanish == "el" and self.target and self.target[-1] in CONTRACTIONS:
            self.target[-1] = CONTRACTIONS[self.target[-1]]
            self.links.append((len(self.source), len(self.target) - 1))
            self.source.append(english)
        else:
            self.say(english, spanish)

    def join(self, english: str, spanish: str) -> None:
        """A conjunction. What follows may change `y` to `e` and `o` to `u`: see `close`."""
        self.joints.append(len(self.target))
        self.say(english, spanish)

    def close(self) -> None:
        """Once every word is there: `y` before the sound i becomes `e`, `o` before the sound o becomes `u`."""
        for at in self.joints:
            following = self.target[at + 1].removeprefix("h")
            if self.target[at] == "y" and following[0] in "ií" and following[1] not in "ae":
                self.target[at] = "e"
            elif self.target[at] == "o" and following[0] in "oó":
                self.target[at] = "u"

    @property
    def signature(self) -> str:
        """The shape as one string: clauses, relative clauses and coordinations, and their nesting."""
        return " ".join(self.shape)
