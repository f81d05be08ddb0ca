"""Noun phrases and subjects of the en-es grammar."""

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from regard.data.builtin import english
from regard.data.builtin.function_words import (
    DRAWN_PRONOUNS,
    MASS,
    NUMERALS,
    PLURAL,
    PREPOSITIONS,
    SINGULAR,
    THE,
    A,
    Determiner,
    Pronoun,
)
from regard.data.builtin.lexicon import FUTURE, IT, PAST, PRESENT, THEY, Adjective, Adverb, Noun, Verb, lexicon
from regard.data.builtin.pairings import Pairing, choices
from regard.data.builtin.sentence import Sentence
from regard.data.builtin.spanish import conjugate

T = TypeVar("T")


class Subject:
    """The subject: one noun or more, or a pronoun. Chosen before it is written, as the verb may come first."""

    __slots__ = ("dropped", "feminine", "nouns", "person", "plurals", "pronoun", "relative")

    def __init__(self, nouns: Sequence[Noun] = (), plurals: Sequence[int] = (), pronoun: Pronoun | None = None) -> None:
        self.nouns, self.plurals, self.pronoun = nouns, plurals, pronoun
        self.relative = 0  # how deep relative clauses are nested after the noun
        self.dropped = -1  # where the English pronoun stands that Spanish leaves to the verb
        if pronoun:
            self.person, self.feminine = pronoun.person, pronoun.feminine
        else:
            self.person = THEY if len(nouns) > 1 or plurals[0] else IT
            self.feminine = all(noun.feminine for noun in nouns)


class Phrases:
    """The rules: each appends to the sentence; all random choices come from one stream.

    `everything` admits the held-out pairings.
    """

    def __init__(self, rng: Random, everything: bool) -> None:
        self.random: Callable[[], float] = rng.random
        self.choices = choices(everything)
        words = lexicon()
        self.verbs = {
            frame: [v for v in words.verbs if v.frame == frame]
            for frame in ("transitive", "giving", "intransitive", "motion", "reporting", "controlling", "modal")
        }
        self.doing = self.verbs["transitive"] + self.verbs["giving"] + self.verbs["intransitive"] + self.verbs["motion"]
        self.of_things = [v for v in self.verbs["transitive"] if self.choices.things[v]]
        self.personal = [v for v in self.doing if "person" in v.subjects]
        self.nouns = {k: [n for n in words.nouns if k in n.kinds] for k in PREPOSITIONS}
        # Food and drink are the subject of little else: named three times, they come up as often as other nouns.
        self.described = words.nouns + tuple(n for n in words.nouns if n.kinds & {"food", "drink"}) * 2
        self.for_people = [a for a in words.adjectives if "person" in a.kinds]
        kinds = {k: [a for a in words.adverbs if a.kind == k] for k in {a.kind for a in words.adverbs}}
        self.adverbs: dict[str, list[Adverb]] = kinds
        self.times = {t: kinds["any"] + kinds[k] for t, k in ((PRESENT, "present"), (PAST, "past"), (FUTURE, "future"))}
        self.very = next(a for a in kinds["degree"] if a.name == "very")
        self.copulas = {}
        for copula in ("ser", "estar"):
            rows = conjugate(copula)
            self.copulas[copula] = (rows.present, rows.imperfect, rows.future)

    # chance

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]

    def tense(self, s: Sentence) -> int:
        roll = self.random()
        if roll < 0.42:
            return PRESENT
        s.features.add("tense")
        return PAST if roll < 0.75 else FUTURE

    def plural(self, noun: Noun) -> int:
        return 1 if not noun.mass and self.random() < 0.35 else 0

    # noun phrases

    def noun_phrase(self, s: Sentence, noun: Noun, plural: int, relative: int = 0, owned: bool = False) -> None:
        """Determiner, perhaps a numeral, perhaps an adjective; after the noun an owner or a relative clause."""
        random = self.random
        numeral = adjective = degree = None
        if plural:
            determiner = self.pick(NUMERALS if random() < 0.22 else PLURAL)
            if determiner is THE[1] and random() < 0.2:
                numeral = self.pick(NUMERALS)
        else:
            determiner = self.pick(MASS if noun.mass else SINGULAR)
        owned = owned and random() < 0.07
        if owned:  # "the house of a judge", never "my house of a judge"
            determiner = THE[plural]
        if random() < 0.27:
            adjective = self.pick(self.choices.adjectives[noun])
            s.pairings.append(Pairing("adjective", noun.name, adjective.name))
            if adjective.graded and random() < 0.2:
                degree = self.very
        self.say_noun(s, noun, plural, determiner, numeral, degree, adjective)
        if relative:
            self.relative_clause(s, noun, plural, relative)
        elif owned:
            s.say("of", "de")
            owner = self.pick(self.nouns["person"])
            self.say_noun(s, owner, 0, self.pick(SINGULAR))

    def say_noun(
        self,
        s: Sentence,
        noun: Noun,
        plural: int,
        determiner: Determiner,
        numeral: Determiner | None = None,
        degree: Adverb | None = None,
        adjective: Adjective | None = None,
    ) -> None:
        """`this very large cat` / `este gato muy grande`: the adjective and its adverb change sides."""
        feminine = noun.feminine
        word = noun.english[plural]
        article = determiner.english
        if determiner is A and english.takes_an(degree.name if degree else adjective.name if adjective else word):
            article = "an"
        s.article(article, determiner.spanish[feminine])
        if determiner.feature:
            s.features.add(determiner.feature)
        if numeral:
            s.say(numeral.english, numeral.spanish[0])
            s.features.add("number")
        if feminine or plural:
            s.features.add("agreement")
        i, j = len(s.source), len(s.target)
        if adjective is None:
            s.say(word, noun.spanish[plural])
            return
        s.features.add("adjective")
        described = adjective.spanish[feminine][plural]
        if degree is None:
            s.source += (adjective.name, word)
            s.target += (noun.spanish[plural], described)
            s.links += ((i + 1, j), (i, j + 1))
        else:
            s.source += (degree.name, adjective.name, word)
            s.target += (noun.spanish[plural], degree.spanish[0], described)
            s.links += ((i + 2, j), (i, j + 1), (i + 1, j + 2))

    def relative_clause(self, s: Sentence, noun: Noun, plural: int, depth: int) -> None:
        """A phrase may hold a clause, and clauses are built on phrases: `Clauses` says how."""
        raise NotImplementedError

    # subjects

    def subject(self, s: Sentence, verb: Verb, rich: bool = False) -> Subject:
        """A subject that makes sense with the verb; a rich one may be coordinated or carry a relative clause."""
        if "person" in verb.subjects and self.random() < 0.28:
            return Subject(pronoun=self.pick(DRAWN_PRONOUNS))
        nouns = self.choices.subjects[verb]
        subject = self.some_subject(nouns, rich)
        for noun in subject.nouns:
            s.pairings.append(Pairing("subject", noun.name, verb.name))
        return subject

    def some_subject(self, nouns: Sequence[Noun], rich: bool) -> Subject:
        noun = self.pick(nouns)
        plural = self.plural(noun)
        roll = self.random() if rich else 1.0
        if roll < 0.07:
            other = self.pick(nouns)
            if other is not noun:
                return Subject((noun, other), (plural, self.plural(other)))
        subject = Subject((noun,), (plural,))
        if 0.07 <= roll < 0.19:
            subject.relative = 1
        return subject

    def known_subject(self, s: Sentence, noun: Noun, plural: int, verb: Verb) -> Subject:
        """A noun that is already written, as the subject of one more verb."""
        s.pairings.append(Pairing("subject", noun.name, verb.name))
        return Subject((noun,), (plural,))

    def say_subject(self, s: Sentence, subject: Subject) -> None:
        pronoun = subject.pronoun
        if pronoun:
            if pronoun.spanish:
                s.say(pronoun.english, pronoun.spanish)
            else:
                subject.dropped = len(s.source)
                s.source.append(pronoun.english)
        elif len(subject.nouns) == 1:
            relative = subject.relative
            self.noun_phrase(s, subject.nouns[0], subject.plurals[0], relative, owned=not relative)
        else:
            self.coordinated(s, subject.nouns, subject.plurals)

    def coordinated(self, s: Sentence, nouns: Sequence[Noun], plurals: Sequence[int], word: str = "and") -> None:
        """`a , b and c`, in both languages."""
        s.features.add("coordination")
        s.shape.append(f"{len(nouns)}{word}")
        for i, (noun, plural) in enumerate(zip(nouns, plurals, strict=True)):
            if i == len(nouns) - 1:
                s.join(word, "y" if word == "and" else "o")
            elif i:
                s.say(",", ",")
            self.noun_phrase(s, noun, plural)
